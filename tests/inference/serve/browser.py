"""A headless Chromium, driven over WebDriver's protocol with the standard library only."""

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request

DRIVER = shutil.which("chromedriver")
BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = "" if DRIVER and BINARY else "no chromium with chromedriver on the PATH"
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=900,800",
             "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]  # fmt: skip


class Browser:
    """One window."""

    def __init__(self, address: str):
        self._address = address
        options = {"binary": BINARY, "args": ARGUMENTS}
        capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        self._path = f"/session/{session['sessionId']}"

    def open(self, url: str) -> None:
        self._call("POST", f"{self._path}/url", {"url": url})

    def run(self, script: str):
        """Runs the body of a function; returns its result."""
        return self._call("POST", f"{self._path}/execute/sync", {"script": script, "args": []})

    def wait(self, expression: str, seconds: float = 60.0):
        """Returns the value of an expression as soon as it is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(f"return {expression}")):
            assert time.monotonic() < end, expression
            time.sleep(0.1)
        return value

    def log(self) -> list[str]:
        """Returns the messages of the console, such as those of scripts that failed or of rejected requests."""
        return [entry["message"] for entry in self._call("POST", f"{self._path}/se/log", {"type": "browser"})]

    def screenshot(self) -> bytes:
        return base64.b64decode(self._call("GET", f"{self._path}/screenshot"))

    def close(self) -> None:
        self._call("DELETE", self._path)

    def _call(self, method: str, path: str, body=None):
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, content, {"Content-Type": "application/json"})
        request.method = method
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)["value"]


@contextlib.contextmanager
def open_browser():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address, end = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while True:
            with contextlib.suppress(urllib.error.URLError):
                urllib.request.urlopen(f"{address}/status", timeout=5)
                break
            assert time.monotonic() < end
            time.sleep(0.1)
        browser = Browser(address)
        yield browser
        browser.close()
    finally:
        driver.terminate()
        driver.wait(20)
