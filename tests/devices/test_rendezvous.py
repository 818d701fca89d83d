"""Processes, here threads, find each other and notice a death; each prints the right line in time."""

import contextlib
import itertools
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from shardformer.devices import rendezvous
from shardformer.devices.rendezvous import describe_software
from shardformer.errors import RunError, UsageError
from tests.launch import SECONDS, connect_pair, free_port
from tests.surroundings import before_call
from tests.waiting import PATIENCE, wait_for


class Clock:
    """A clock that a test sets. The pauses of the program do not move it."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        time.sleep(0.01)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(rendezvous, "time", clock)
    return clock


@pytest.fixture
def missing(monkeypatch):
    """Returns a list that gets the missing processes each time that one waits for them."""
    seen: list[list[int]] = []
    before_call(monkeypatch, rendezvous._Waiting, "check", lambda self, missing, where="": seen.append(missing))
    return seen


def connect_all(port: int, *members: tuple[int, int], timeout: float = PATIENCE):
    """Returns the links or the error of each (count, index)."""

    def attempt(member):
        try:
            return rendezvous.connect(f"localhost:{port}", *member, timeout)
        except (RunError, UsageError) as error:
            return error

    with ThreadPoolExecutor() as pool:
        return list(pool.map(attempt, members))


def test_all_find_each_other_in_any_order():
    found = connect_all(free_port(), (3, 2), (3, 1), (3, 0))
    assert [sorted(links) for links in found] == [[0], [0], [1, 2]]


def test_a_partner_that_never_starts_is_named(said, clock, missing):
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(connect_all, free_port(), (3, 0), (3, 2), timeout=3)
        try:
            wait_for(lambda: [1] in missing)  # process 2 has come
            clock.now = 1.5
            wait_for(lambda: said)
        finally:
            clock.now = 3.5
        found = waiting.result(PATIENCE)
    for error in found:
        assert str(error).startswith("process 1 of 3 did not answer within 3 s (start_timeout); start the same command")
    assert "waiting for process 1 of 3, for at most 2 s more" in "".join(said)


def test_a_missing_first_process_is_named_with_its_address(said, monkeypatch):
    readings = itertools.count(0.0, 0.1)  # a clock that goes on with each reading
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: next(readings), sleep=lambda _: None))
    port = free_port()
    (error,) = connect_all(port, (2, 1), timeout=2)
    assert str(error).startswith(f"process 0 of 2 at localhost:{port} did not answer within 2 s")
    assert said[0].startswith(f"waiting for process 0 of 2 at localhost:{port}, for at most ")


def test_a_wrong_host_is_named():
    with pytest.raises(RunError, match=r"no\.such\.host\.invalid:1 \(this host name cannot be found: "):
        rendezvous.connect("no.such.host.invalid:1", 2, 1, 1)


def test_a_port_in_use_is_named_on_both_sides():
    with socket.create_server(("", free_port())) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} of coordinator= is in use on this machine"):
            rendezvous.connect(f"localhost:{port}", 2, 0, 5)

        def answer():
            for _ in range(2):  # process 0 has asked for the owner of the port before
                with contextlib.suppress(OSError):
                    taken.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(RunError, match=f"localhost:{port} belongs to another program"):
            rendezvous.connect(f"localhost:{port}", 2, 1, PATIENCE)


def connect_when_listening(port: int) -> socket.socket:
    found = []

    def connect() -> bool:
        with contextlib.suppress(OSError):
            found.append(socket.create_connection(("localhost", port)))
        return bool(found)

    wait_for(connect)
    return found[0]


def test_a_stranger_who_connects_is_not_counted():
    port = free_port()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(rendezvous.connect, f"localhost:{port}", 2, 0, PATIENCE)
        stranger = connect_when_listening(port)
        stranger.sendall(b"GET / HTTP/1.1\n")
        second = pool.submit(rendezvous.connect, f"localhost:{port}", 2, 1, PATIENCE)
        assert list(first.result()) == [1]
        assert list(second.result()) == [0]


def test_two_processes_with_one_number_are_rejected():
    found = connect_all(free_port(), (3, 0), (3, 1), (3, 1))
    assert str(found[0]) == "two processes were started with process_id=1; give each its own"


@pytest.mark.parametrize("other", [(3, 1), (3, 2), (4, 1)])
def test_different_counts_end_both_processes(other):
    found = connect_all(free_port(), (2, 0), other)
    count, index = other
    expected = f"process 0 was given processes=2, process {index} processes={count}; give all the same"
    assert [str(error) for error in found] == [expected] * 2


def test_different_counts_end_the_other_waiting_processes(missing):
    port = free_port()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(connect_all, port, (3, 0), (3, 2))
        wait_for(lambda: [1] in missing)  # process 2 has come
        connect_all(port, (4, 1))
        found = waiting.result(PATIENCE)
    assert all("process 0 was given processes=3, process 1 processes=4" in str(error) for error in found)


def test_a_second_process_0_is_rejected_and_the_first_goes_on(said, monkeypatch):
    monkeypatch.setattr(rendezvous, "OWNER_SECONDS", PATIENCE)
    port = free_port()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(connect_all, port, (2, 0))
        connect_when_listening(port).close()
        (second,) = connect_all(port, (2, 0))
        connect_all(port, (2, 1))
        (links,) = first.result(PATIENCE)
    expected = "two processes were started with process_id=0 and this port; give each process its own process_id"
    assert isinstance(second, UsageError)
    assert str(second) == f"{expected}, or another run another port of coordinator="
    assert f"{expected}; the second one was rejected" in said
    assert list(links) == [1]


def say_hello(port: int, line: bytes) -> bytes:
    """Returns what process 0 answers to a line."""
    with connect_when_listening(port) as connection:
        connection.settimeout(PATIENCE)
        connection.sendall(line)
        return connection.recv(4096)


@pytest.mark.parametrize(("theirs", "named"), [(b" shardformer 9 (code 1), jax 1", "shardformer 9 (code 1), jax 1"),
                                               (b"", "an older shardformer")])  # fmt: skip
def test_processes_with_different_code_are_rejected(theirs, named):
    port = free_port()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(connect_all, port, (2, 0))
        answer = say_hello(port, b"shardformer 1 2" + theirs + b"\n")
        (error,) = first.result(PATIENCE)
    assert isinstance(error, UsageError)
    ours = describe_software()
    assert str(error) == f"process 0 runs {ours}, process 1 runs {named}; install and set the same on all machines"
    assert answer == b"refused " + str(error).encode() + b"\n"


def test_settings_of_jax_belong_to_the_software():
    """One process with another precision would train one model by two rules."""
    usual = describe_software()
    with jax.default_matmul_precision("bfloat16"):
        changed = describe_software()
    assert rendezvous.describe_difference(0, usual, 1, changed) == (
        "process 0 runs jax_default_matmul_precision=None, process 1 runs jax_default_matmul_precision=bfloat16; "
        "install and set the same on all machines"
    )


def test_versions_of_libraries_belong_to_the_software(tmp_path, monkeypatch):
    (tmp_path / "optax-0.0.1.dist-info").mkdir()
    (tmp_path / "optax-0.0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: optax\nVersion: 0.0.1\n")
    assert "optax 0.0.1" not in describe_software()
    monkeypatch.syspath_prepend(tmp_path)
    assert "optax 0.0.1" in rendezvous._describe_versions.__wrapped__()


@pytest.mark.multiprocess
def test_two_checkouts_do_not_train_together(tmp_path):
    """The second one has one more comment."""
    package = Path(rendezvous.__file__).parents[1]
    copy = shutil.copytree(package, tmp_path / "shardformer", ignore=shutil.ignore_patterns("__pycache__"))
    port, code = free_port(), "from shardformer.devices import rendezvous; import sys; "
    code += f"rendezvous.connect('localhost:{port}', 2, int(sys.argv[1]), {SECONDS})"

    def start(index: int, root) -> subprocess.Popen:
        environment = os.environ | {"PYTHONPATH": str(root)}
        return subprocess.Popen(
            [sys.executable, "-c", code, str(index)], env=environment, cwd=root, stderr=subprocess.PIPE
        )

    def finish(process) -> tuple[int, bytes]:
        """Returns its status and its errors; one that starts first prints that it waits for the other."""
        lines = process.communicate(timeout=SECONDS)[1].splitlines()
        return process.returncode, b"".join(line for line in lines if not line.startswith(b"waiting for process"))

    def run_both() -> list[tuple[int, bytes]]:
        return [finish(process) for process in [start(0, package.parent), start(1, tmp_path)]]

    assert run_both() == [(0, b""), (0, b"")]
    with (copy / "files.py").open("a") as file:
        file.write("# changed\n")
    for status, printed in run_both():
        assert status == 1
        assert printed.count(b"shardformer 0") == 2
        assert b"install and set the same on all machines" in printed


def test_a_client_that_drips_does_not_outlast_the_deadline(monkeypatch):
    port, ended = free_port(), threading.Event()

    def drip():
        while not ended.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("localhost", port)) as connection:
                while not ended.wait(0.2):
                    connection.sendall(b"s")

    threading.Thread(target=drip, daemon=True).start()
    begin = time.monotonic()
    (error,) = connect_all(port, (2, 0), timeout=2)
    ended.set()
    assert "did not answer within 2 s" in str(error)
    assert time.monotonic() - begin < PATIENCE  # it drips for ever


@pytest.mark.slow
def test_a_first_process_that_drips_meets_the_deadline():
    ended = threading.Event()
    with socket.create_server(("", free_port())) as server:

        def drip():
            connection = server.accept()[0]
            with contextlib.suppress(OSError):
                while not ended.wait(0.2):
                    connection.sendall(b"g")

        threading.Thread(target=drip, daemon=True).start()
        begin = time.monotonic()
        (error,) = connect_all(server.getsockname()[1], (2, 1), timeout=1)
        ended.set()
    assert "did not answer within 1 s" in str(error)
    assert time.monotonic() - begin < PATIENCE


def test_an_answer_that_is_not_utf_8_is_one_line():
    with socket.create_server(("", free_port())) as server:

        def answer():
            server.accept()[0].sendall(b"refused \xff\xfe\n")

        threading.Thread(target=answer, daemon=True).start()
        (error,) = connect_all(server.getsockname()[1], (2, 1))
    assert str(error) == "\N{REPLACEMENT CHARACTER}" * 2


def test_a_loss_that_is_not_utf_8_is_reported(watched):
    _, (other, _), told = watched
    other.send(rendezvous.LOST + b" \xff\x1b[2J")
    assert told().startswith("process \N{REPLACEMENT CHARACTER}\\x1b[2J; see what it printed")


@pytest.fixture
def silence():
    """Returns the seconds without a sign of life that a watch accepts: more than a busy machine stops a thread for."""
    return 600


@pytest.fixture
def watched(silence):
    """Returns the watch of process 0 of 3, the links of the two others to it, and a function for its reason to end."""
    reasons = queue.Queue()

    def end(reason):
        reasons.put(reason)
        watch.links.clear()  # and so the thread ends, where the process would

    pairs = [connect_pair() for _ in range(2)]
    watch = rendezvous.Watch({i: rendezvous.Link(own) for i, (own, _) in enumerate(pairs, start=1)}, 3, silence, end)
    yield watch, [rendezvous.Link(other) for _, other in pairs], lambda: reasons.get(timeout=PATIENCE)
    for own, other in pairs:
        own.close()
        other.close()
    watch.join(PATIENCE)


def test_a_death_is_reported_to_all(watched):
    _, (dying, other), told = watched
    dying.connection.close()
    assert told().startswith("process 1 of 3 has died; ")
    lines = []
    while b"lost 1 of 3 has died" not in lines:
        lines += other.receive()


@pytest.mark.multiprocess
@pytest.mark.parametrize("silence", [2])
def test_silence_ends_a_process_and_a_sign_of_life_prevents_it(watched):
    _, (silent, alive), told = watched
    for _ in range(8):
        alive.send(rendezvous.ALIVE)
        time.sleep(0.5)
    assert told().startswith("process 1 of 3 has given no sign of life for 2 s (start_timeout / 5)")
    silent.connection.close()


@pytest.mark.slow
def test_nothing_is_printed_after_the_last_line():
    code = (
        "import os, threading, time; from shardformer.devices import rendezvous\n"
        "def complain():\n"
        "    while True:\n"
        "        os.write(2, b'Socket closed\\n')\n"
        "        time.sleep(0.005)\n"  # most of the time it is not within a write, which would end after ours
        "threading.Thread(target=complain, daemon=True).start()\n"
        "end = os._exit\n"
        "os._exit = lambda status: (time.sleep(0.1), end(status))\n"
        "rendezvous.end_process('process 1 of 3 has died')"
    )
    for closed, said in ((False, "shardformer: failed: process 1 of 3 has died"), (True, "")):
        words = [sys.executable, "-c", f"import os; os.close(2)\n{code}" if closed else code]
        ended = subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=SECONDS)
        assert (ended.returncode, ended.stderr.rstrip("\n").rpartition("\n")[2]) == (1, said)


def test_an_orderly_end_is_no_death(watched):
    watch, others, _ = watched
    for other in others:
        other.send(rendezvous.GOODBYE)
        other.connection.close()
    watch.join(PATIENCE)
    assert not watch.is_alive()
    assert not watch.ending.is_set()


def test_a_long_wait_for_the_last_process_is_no_silence():
    reasons = queue.Queue()
    pairs = [connect_pair() for _ in range(2)]
    links = {index: rendezvous.Link(own) for index, (own, _) in enumerate(pairs, start=1)}
    others = [rendezvous.Link(other) for _, other in pairs]
    links[1].heard -= 100  # it said hello long before process 2
    others[1].send(rendezvous.ALIVE)  # which is heard first
    watch = rendezvous.Watch(links, 3, 60, reasons.put)
    with pytest.raises(queue.Empty):
        reasons.get(timeout=0.5)
    for other in others:
        other.send(rendezvous.GOODBYE)
    watch.join(PATIENCE)


def test_a_process_that_was_started_again_takes_its_own_place():
    port = free_port()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(connect_all, port, (3, 0))
        died = connect_when_listening(port)
        died.sendall(f"shardformer 1 3 {describe_software()}\n".encode())
        time.sleep(0.3)
        died.close()
        connect_all(port, (3, 1), (3, 2))
        (links,) = first.result()
    assert sorted(links) == [1, 2]
