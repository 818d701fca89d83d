"""`python -m shardformer`: parse, dispatch, and turn failures into one line and an exit status."""

import itertools
import os
import signal
import sys
from typing import NoReturn

from shardformer.errors import RunError, UsageError

USAGE = """\
usage: python -m shardformer COMMAND ...

  train PRESET [key=value ...]      a new run; presets: tiny, shakespeare_cpu, shakespeare_char, gpt1, gptj_6b
  train --resume RUN [key=value ...]    go on where a run stopped
  eval RUN [split=test] [key=value ...]    loss of a split: validation, test, train or all (validation + test)
  sample RUN [prompt=... tokens=... temperature=... top_k=... top_p=... samples=... seed=...]
  data import INPUT.TXT             prepare tiny_shakespeare from a local copy of its text
  show PRESET|RUN [key=value ...]   every setting, and every parameter with its split; touches no device
  bench step | mesh [key=value ...]    time the step: against plain Haiku + optax, or mesh against mesh
  bench accumulation | zero | checkpoint [key=value ...]    what microbatches, ZeRO and saving cost
  convert SRC DST [key=value ...]   GPT-J's shard_0/0.npz ... to a run, or a run to those: shards=8 dtype=bfloat16 ...
  convert RUN DST merge_lora=true   a run with adapters to one without; ema=true: with the average of the weights
  legacy [--strict] [--legacy-random] SCRIPT.py ...    run a script of xmap's time, unedited, with its arguments
  legacy --check PATH ...           which removed names of jax and optax it uses, and whether each is covered

RUN is a run's folder. Every key and what it means stands in shardformer/config.py; `show` prints their values.
Exit status: 0 done, or stopped by Ctrl-C or SIGTERM and saved; 1 the run failed; 2 the command was wrong;
legacy SCRIPT.py: the script's own; legacy --check: 1 if something is not covered."""


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if not words or words[0] == "help" or {"-h", "--help"} & set(_our_own(words)):
        print(USAGE)
        return 0 if words else 2
    try:
        commands = _commands()
        command = commands.COMMANDS.get(words[0])
        if command is None:
            raise UsageError(f"unknown command {words[0]!r}; there are {', '.join(commands.COMMANDS)} (see --help)")
        return command(words[1:]) or 0
    except UsageError as error:
        status, message = 2, f"error: {error}"
    except ModuleNotFoundError as error:
        status = 2
        message = f"error: {error.name} is not installed for {sys.executable}; try: source .venv/bin/activate"
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except (RunError, OSError) as error:
        status, message = 1, f"failed: {error}"
    except KeyboardInterrupt:
        _leave()
    except (MemoryError, RuntimeError) as error:  # JAX tells of a full device by a RuntimeError
        if not (isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)):
            raise
        status, message = 1, f"failed: out of memory ({error}); a smaller batch or seq, remat=true or more mp may help"
    print(f"shardformer: {message}", file=sys.stderr)
    return status


def _commands():
    """Imported late: JAX takes a second, and --help should not. Meanwhile JAX's callbacks would swallow a Ctrl-C."""
    before = signal.signal(signal.SIGINT, _leave)
    try:
        from shardformer.cli import commands
    finally:
        signal.signal(signal.SIGINT, before)
    return commands


def _leave(*_) -> NoReturn:
    """Ends at once: an orderly exit would pull the interpreter away from under threads of XLA that still compile."""
    print("shardformer: interrupted", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _our_own(words: list[str]) -> list[str]:
    """What follows the name of a legacy script is the script's, its --help too."""
    if words[0] != "legacy":
        return words
    return list(itertools.takewhile(lambda word: word.startswith("-"), words[1:]))


if __name__ == "__main__":
    sys.exit(main())
