"""A server with OpenAI's API, and a client of the standard library. Needs: pip install 'shardformer[serve]'

    python scripts/examples/serve_and_query.py

It trains a small model, serves it at a free port, asks for two continuations with their log-probabilities, and shows
that a seed gives the same text again. Any client of OpenAI's API works with base_url=http://127.0.0.1:PORT/v1.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

BASE = "checkpoints/example"


def ask(address: str, **request) -> dict:
    """Returns the answer to a request for continuations."""
    content = json.dumps({"prompt": "Tamsin: ", "max_tokens": 24, "temperature": 0.8} | request).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{address}/v1/completions", content, headers)) as answer:
        return json.load(answer)


def start_server() -> tuple[subprocess.Popen, str]:
    """Returns the server, which chose a free port, and its address as soon as it answers."""
    command = [sys.executable, "-m", "shardformer", *shlex.split(f"serve {BASE} port=0 batch=2 mesh=1x1")]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in server.stdout:
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            return server, found[0]
    raise SystemExit(f"the server ended with status {server.wait()}")


def main() -> list[dict]:
    if not Path(BASE, "final.json").exists():  # which the end of its training writes
        shutil.rmtree(BASE, ignore_errors=True)
        words = f"train tiny data=builtin seq=32 steps=100 out={BASE}"
        subprocess.run([sys.executable, "-m", "shardformer", *words.split()], check=True)
    server, address = start_server()
    try:
        answers = [ask(address, seed=seed, logprobs=1) for seed in (1, 2, 1)]
    finally:
        server.terminate()
        server.wait()
    for answer in answers:
        choice = answer["choices"][0]
        print(f"{sum(choice['logprobs']['token_logprobs']):8.2f} nats: {choice['text']!r}")
    return answers


if __name__ == "__main__":
    main()
