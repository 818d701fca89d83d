"""`serve`: an OpenAI-compatible endpoint of a run, whose answers are those of `generate`."""

import asyncio
import contextlib
import dataclasses
import importlib.util
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax

from shardformer import checkpoint
from shardformer.cli.arguments import parse_run_and_options, run_folder, say
from shardformer.cli.generation_options import LOOPBACK, ServeOptions
from shardformer.cli.interrupts import leaving_at_once
from shardformer.cli.sample_command import choose_chat_vocabulary, load_model, make_model, open_codec
from shardformer.cli.served_runs import ServedRun, check_other, open_served
from shardformer.data.chat.chat_format import read_format
from shardformer.data.stored_vocabulary import TOKENIZER_FOLDER
from shardformer.errors import UsageError
from shardformer.inference.chat_codec import ChatCodec
from shardformer.inference.text_codec import TextCodec
from shardformer.model import Model
from shardformer.training.checkpoint_progress import read_progress
from shardformer.training.run_folder import Run

if TYPE_CHECKING:
    from shardformer.inference.serve.service import Service

STOP_SECONDS = 5  # of requests that run when the server stops
STOPPING = (signal.SIGINT, signal.SIGTERM)


def serve(arguments: list[str]) -> None:
    """Serves a run, or a folder of Hugging Face, until Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder, options = parse_run_and_options(arguments, ServeOptions)
    if missing := [name for name in ("starlette", "uvicorn") if not importlib.util.find_spec(name)]:
        raise UsageError(f"serve needs the package {missing[0]}; install it: pip install 'shardformer[serve]'")
    with _listen(options) as listener:
        from shardformer.inference.serve.app import make_app

        service, models = _open_service(str(folder), options)
        if jax.process_count() > 1:
            raise UsageError(f"serve runs in one process, got {jax.process_count()}; start it on one host")
        service.thread.start()
        if options.reload == "auto":
            threading.Thread(target=models[0].follow, name="reload", daemon=True).start()
        _announce(listener, options, service)
        _run_server(make_app(service), service, listener)
        service.close()


def _open_service(folder: str, options: ServeOptions) -> tuple["Service", list["ServedRun"]]:
    """Builds the service; what is converted for it is deleted when the weights are on the devices."""
    with tempfile.TemporaryDirectory(prefix="shardformer-serve-") as scratch:
        run = open_served(folder, Path(scratch))
        if options.reload == "auto" and Path(scratch) in Path(str(run.out)).parents:
            raise UsageError(f"reload=auto is for a run in training, and {folder} is none; leave it out")
        others = _open_others(run, options, Path(scratch))
        # A conversion ends with its own process; from here on JAX may swallow the exception of a signal.
        with leaving_at_once(STOPPING, lambda: shutil.rmtree(scratch, ignore_errors=True)):
            return build_service(run, options, others)


def build_service(
    run: Run, options: ServeOptions, others: Mapping[str, Run] = MappingProxyType({})
) -> tuple["Service", list["ServedRun"]]:
    """Returns the service of a run, whose engine has compiled, and the runs that it serves, others by their names."""
    from shardformer.inference.serve.bodies import Limits
    from shardformer.inference.serve.engine import Engine
    from shardformer.inference.serve.engine_thread import EngineThread
    from shardformer.inference.serve.jobs import Job
    from shardformer.inference.serve.server_metrics import ServerMetrics
    from shardformer.inference.serve.service import Service

    codec, step = open_codec(run, options), options.step
    chat = _open_chat(run, codec, options)
    if options.reload == "auto":
        step = _find_newest(run)
    model, params = load_model(run, dataclasses.replace(options, reload="none", step=step))
    engine = Engine(model, options.batch, len(run.vocabulary), options.prefix_cache * 2**20)
    step = run.choose_step(step, options.ema)
    thread = EngineThread(engine, ServerMetrics(), options.queue)
    first = ServedRun.load(run, options.name or run.out.name, thread, model, params, step, options.ema)
    del params
    list(engine.run([Job(0, [codec.prefix], 0, weights=first.served.weights)]))  # compiles
    served = [first, *(first.add(name, other, _choose_model(first, other, options)) for name, other in others.items())]
    limits = Limits(seconds=options.timeout)
    models = [one.served for one in served]
    service = Service(thread, models, codec, chat, options.api_key, limits, _choose_hosts(options))
    return service, served


def _choose_hosts(options: ServeOptions) -> frozenset[str] | None:
    """Returns the names that requests may give as their Host; None for any, as a web page does not know the key."""
    from shardformer.inference.serve.screen import read_name

    named = [read_name(name) for name in options.allowed_hosts.split(",") if name]
    return None if options.api_key and not named else frozenset([*LOOPBACK, options.host.lower(), *named])


def _find_newest(run: Run) -> int:
    """Returns the newest checkpoint whose manifest and documents can be read; 0 if there is none."""
    for step in reversed(checkpoint.list_steps(run.out)):
        try:
            read_progress(checkpoint.step_folder(run.out, step))
            return step
        except checkpoint.Damaged as error:
            print(f"{error}; an older checkpoint is served", file=sys.stderr, flush=True)
    return 0


def _open_chat(run: Run, codec: TextCodec, options: ServeOptions) -> ChatCodec | None:
    """Returns the codec of the run's chat template; None without one."""
    format = run.vocabulary.chat or read_format(Path(run.stored) / TOKENIZER_FOLDER)
    return ChatCodec(choose_chat_vocabulary(run, options), format, sorted(codec.ends)) if format else None


def _open_others(run: Run, options: ServeOptions, scratch: Path) -> dict[str, Run]:
    """Returns the runs of models= by their names; raises UsageError for an equal name or another architecture.

    scratch: a folder for the runs that folders of other formats are converted to.
    """
    first, others = options.name or run.out.name, dict[str, Run]()
    for word in filter(None, options.models.split(",")):
        name, _, folder = word.rpartition("=")
        name = name or run_folder(folder).name
        if name in (first, *others):
            raise UsageError(f"models={word}: another model has the name {name}; give one of them another: NAME=RUN")
        others[name] = open_served(folder, scratch, name, run)
        check_other(folder, others[name], run)
    return others


def _choose_model(first: ServedRun, other: Run, options: ServeOptions) -> Model:
    """Returns the first run's model if the other's programs are the same, else a model of the other run."""
    if (other.config.lora, other.config.stored) == (first.run.config.lora, first.run.config.stored):
        return first.model
    return make_model(other, options)


def _listen(options: ServeOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server((options.host, options.port), family=family, backlog=2048)
    except OSError as error:
        number = error.errno or 0
        is_address = number > 0  # errors of the resolver are negative
        reason = os.strerror(number) if is_address else "no address has this name"
        fix = "another port=" if is_address else "an address of this machine: host=127.0.0.1"
        raise UsageError(
            f"host={options.host} port={options.port} cannot be listened on ({reason}); give {fix}"
        ) from None


def _announce(listener: socket.socket, options: ServeOptions, service: "Service") -> None:
    """Prints the address and how to call it."""
    host = f"[{options.host}]" if ":" in options.host else options.host
    address = f"http://{host}:{listener.getsockname()[1]}"
    key_header = "-H 'Authorization: Bearer KEY' " if options.api_key else ""
    path, field = "completions", '"prompt": "The"'
    if service.chat:
        path, field = "chat/completions", '"messages": [{"role": "user", "content": "Hello"}]'
    say(f"{', '.join(service.models)} at {address}; a page to try it at {address}/")
    body = f"-H 'Content-Type: application/json' -d '{{{field}, \"max_tokens\": {min(20, service.seq // 2)}}}'"
    say(f"curl {address}/v1/{path} {key_header}{body}")


def _run_server(app: Any, service: "Service", listener: socket.socket) -> None:
    """Runs until a signal; then requests that run have a few seconds to end."""
    import uvicorn

    from shardformer.inference.serve.connections import make_config

    log = logging.getLogger("uvicorn.error")

    class Server(uvicorn.Server):
        async def shutdown(self, sockets=None) -> None:
            if count := len(service.exchanges):
                say(f"\nstopping; requests in progress, {count}, have {STOP_SECONDS} s to end; Ctrl-C stops at once")
            log.setLevel(logging.CRITICAL)  # it would print a traceback for each connection that it cuts off
            asyncio.get_running_loop().call_later(STOP_SECONDS, service.end_all)
            await super().shutdown(sockets)

    config = make_config(app, service.limits, timeout_graceful_shutdown=STOP_SECONDS + 1)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal that ended it once more
        Server(config).run(sockets=[listener])
