"""Keys of the run folder, of one start of a run, and of the processes that train together."""

import dataclasses
from typing import Literal

from shardformer.config.keys import KeyGroup, key, require
from shardformer.config.parsing import parse_steps_range, shorten

TRACKERS = ("wandb", "mlflow", "aim", "tensorboard")


@dataclasses.dataclass(frozen=True)
class RunKeys(KeyGroup):
    """The run folder"""

    out: str = key("", "run folder, or gs://BUCKET/RUN, s3://BUCKET/RUN; empty: checkpoints/PRESET")
    log_every: int = key(10, "steps between logged metrics", least=1)
    eval_every: int = key(250, "steps between evaluations on the validation split", least=1)
    eval_batches: int | None = key(
        200, "batches of each such evaluation at most; all: the full validation split", least=1, none="all"
    )
    save_every: int = key(500, "steps between checkpoints; 0: by save_minutes only (a run saves when it ends)", least=0)
    save_minutes: float = key(0.0, "minutes after which a checkpoint is due as well; 0: never by time", least=0)
    keep: int = key(2, "newest checkpoints to keep, besides the best by validation loss", least=1)
    keep_every: int = key(0, "also save at multiples of this many steps and keep those forever; 0: none", least=0)
    on_save_error: Literal["stop", "continue"] = key(
        "stop", "reaction of training to a failed save, e.g. on a full disk"
    )


@dataclasses.dataclass(frozen=True)
class LaunchKeys(KeyGroup):
    """This start of the run (never written to config.json)"""

    # A config.json from elsewhere must not run code, as trackers, tasks and rewards do, or copy a file (eval_prompts).
    program_cache: str = key(
        "auto",
        "folder of compiled programs, for the next start; none: no folder; auto: in ~/.cache, or with several "
        "processes and a run in a bucket .programs beside it; it holds code: let nobody else write there",
    )
    tracker: str = key(
        "",
        f"{', '.join(TRACKERS[:-1])}: by the package of that name; {TRACKERS[-1]}: its events are always written; "
        "module:function: yours, called with the settings, gives an object with write(row) and close()",
    )
    eval_tasks: str = key(
        "",
        "tasks of lm-evaluation-harness, separated by commas, scored into scores.jsonl at each evaluation; "
        "FOLDER/NAME: your own (YAML)",
    )
    eval_limit: float = key(0.0, "examples of each task, or below 1 their share; 0: all", least=0, needs="eval_tasks")
    eval_prompts: str = key("", "file with a prompt per line, continued by 64 greedy tokens into texts.jsonl")
    reward: str = key(
        "",
        "reward of objective=grpo: FILE.py:FUNCTION, called with (prompt, answer, expected) as text; match: 1 if the "
        "answer is the record's, else 0; length:N: 1 for N characters, less by 1/N for each that differs; RUN: the "
        "number that a run with objective=reward gives",
    )
    task: object = key(
        "",
        "FILE.py:NAME, a `shardformer.Task` of yours that is trained instead of the language model; from Python the "
        "object",
    )
    profile: str = key("", "FROM:TO, the steps whose trace JAX's profiler writes into the run folder")

    def check(self) -> None:
        parse_steps_range("profile", self.profile)
        require(
            not self.tracker or self.tracker in TRACKERS or all(self.tracker.partition(":")),
            f"tracker takes {', '.join(TRACKERS)} or module:function, got {shorten(self.tracker)}",
        )


@dataclasses.dataclass(frozen=True)
class ProcessKeys(KeyGroup):
    """Two or more processes that train together (unless the environment names them; never written to config.json)"""

    coordinator: str = key("", "HOST:PORT of process 0")
    count: int = key(0, "number of processes", least=0, flat="processes")
    process_id: int = key(0, "number of this process, from 0", least=0)
    start_timeout: int = key(
        300,
        "seconds that a process waits at the start for the others; one that is silent for a fifth of it later counts "
        "as dead, and the others stop",
        least=1,
    )

    @property
    def silence(self) -> float:
        """Seconds without a sign of life after which a process counts as dead."""
        return self.start_timeout / 5

    def check(self) -> None:
        if self.coordinator or self.count or self.process_id:
            require(
                is_address(self.coordinator) and self.process_id < self.count,
                "several processes take coordinator=HOST:PORT of process 0 (port 1 to 65535), processes=N and "
                f"process_id=0 to N-1; got coordinator={shorten(self.coordinator)}, processes={self.count}, "
                f"process_id={self.process_id}",
            )


def is_address(text: str) -> bool:
    """Returns True for HOST:PORT with a port from 1 to 65535."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536
