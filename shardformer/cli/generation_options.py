"""The keys of the commands that generate, score and evaluate, besides `sample`. Imports no JAX."""

import dataclasses
import json
from pathlib import Path
from typing import Literal

from shardformer import storage
from shardformer.cli.text_options import ChatOptions, TextOptions, WeightsOptions, check_batch
from shardformer.config import parsing
from shardformer.config.keys import check_value, key
from shardformer.config.sampling_keys import Sampling
from shardformer.errors import UsageError
from shardformer.files import expand_home
from shardformer.quantized.weight_keys import OF_A_RUN

MOST_ROWS = 16  # that are computed together, unless batch= asks for another number
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclasses.dataclass(frozen=True)
class GenerateOptions(ChatOptions, WeightsOptions, Sampling):
    """The prompts and the checkpoint."""

    prompts: str = key("-", "file with a prompt per line, as text or as JSON with a prompt; - reads standard input")
    stop: str = key("", 'end a text before this string; several as a JSON list, such as \'["\\n\\n", "Q:"]\'')
    logprobs: bool = key(False, "write each token's log-probability in nats")
    batch: int = key(0, "rows that are computed together; 0: one for each text, from 2 to 16, which round alike on a "
                        "CPU; on other devices give the batch of `serve` for its bits")  # fmt: skip
    out: str = key("", "file to write instead of standard output; the same command continues a file that is not "
                       "complete")  # fmt: skip

    def __post_init__(self):
        super().__post_init__()
        self.check_text_options()
        self.check_chat_options()
        check_batch(self.batch or MOST_ROWS)
        parse_stops(self.stop)


def parse_stops(text: str) -> list[str]:
    """Returns the strings of the key `stop`."""
    if not text.startswith("["):
        return [text] if text else []
    try:
        stops = json.loads(text)
    except (ValueError, RecursionError):
        stops = None
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise UsageError(f"stop takes a string or a JSON list of strings, got {parsing.shorten(text)}")
    return stops


@dataclasses.dataclass(frozen=True)
class ScoreOptions(TextOptions, WeightsOptions):
    """The checkpoint."""

    batch: int = key(8, "rows that are computed together")

    def __post_init__(self):
        self.check_text_options()
        check_batch(self.batch)


@dataclasses.dataclass(frozen=True)
class ServeOptions(TextOptions, WeightsOptions):
    """The server and the checkpoint."""

    host: str = key("127.0.0.1", "address to listen on; 0.0.0.0 admits other machines")
    port: int = key(8000, "port to listen on; 0 takes a free one")
    api_key: str = key("", "key that requests must send, as Authorization: Bearer KEY; a server on another address "
                           "than this machine's own needs one")  # fmt: skip
    allowed_hosts: str = key(
        "",
        "further names as NAME,... that requests may give as their Host, such as that of a proxy; without a key, "
        "others are rejected, as a web page could give its own name this machine's address",
    )
    batch: int = key(16, "rows that are computed together; with the same batch, `generate` gives the same bits")
    prefix_cache: int = key(
        1024, "MiB of each device for the beginnings of prompts, which later requests need not read again; 0: none"
    )
    queue: int = key(256, "continuations that may wait for a row; more are rejected with status 429")
    timeout: float = key(600.0, "seconds of one request, after which it ends with status 504")
    models: str = key(
        "",
        "further runs as NAME=RUN,..., which requests choose by the field model; each has the model keys of RUN, such "
        "as adapters of one base, with any ranks; equal arrays are stored once. A folder of Hugging Face or of PEFT's "
        "adapters is converted first",
    )
    name: str = key("", "name of the model in requests; by default that of the folder")
    reload: Literal["none", "auto"] = key(
        "none", "auto: serve the newest checkpoint of a run, and take each newer one without dropping a request"
    )

    def __post_init__(self):
        self.check_text_options()
        check_batch(self.batch)
        for field in dataclasses.fields(ServeOptions):
            if field.name == "reload":
                check_value(field, self.reload)
        if not 0 <= self.port < 65536:
            raise UsageError(f"port must be in 0..65535, got {self.port}")
        if self.prefix_cache < 0:
            raise UsageError(f"prefix_cache must be 0 or more, got {self.prefix_cache}")
        if self.queue < 0 or not 0 < self.timeout < float("inf"):
            raise UsageError(f"queue must be 0 or more and timeout above 0, got {self.queue} and {self.timeout}")
        if self.reload == "auto" and self.step:
            raise UsageError(f"reload=auto serves the newest checkpoint, but step={self.step} names one; leave one out")
        if self.host not in LOOPBACK and not self.api_key:
            raise UsageError(f"host={self.host} admits other machines and needs a key; give api_key=KEY")
        if wrong := [name for name in self.allowed_hosts.split(",") if "/" in name]:
            raise UsageError(f"allowed_hosts={wrong[0]} is no name of a machine; give it without http:// and a path")


@dataclasses.dataclass(frozen=True)
class HarnessOptions(TextOptions, WeightsOptions):
    """The tasks and the checkpoint."""

    tasks: str = key("", "names of tasks, groups or tags of lm-evaluation-harness, separated by commas")
    include: str = key("", "folder of your own tasks (YAML); the harness reads its own only if a task is not there")
    num_fewshot: int = key(-1, "solved examples before each question; -1: the task's own number")
    limit: float = key(0.0, "examples of each task, or below 1 their share; 0: all")
    gen_kwargs: str = key("", "settings for tasks that generate, such as max_gen_toks=64,temperature=0.5")
    batch: int = key(8, "rows that are computed together")
    out: str = key("", "file for the results as JSON")
    log_samples: bool = key(False, "also write every question with its answer into the file")
    seed: int = key(0, "seed of the solved examples and of random draws")

    def __post_init__(self):
        self.check_text_options()
        if not self.tasks.strip(", "):
            raise UsageError("tasks= names no task; give some, such as tasks=hellaswag,lambada_openai")
        check_batch(self.batch)
        if self.num_fewshot < -1 or not 0 <= self.limit < float("inf"):
            raise UsageError(
                f"limit must not be negative and num_fewshot be at least -1, got {self.limit:g} and {self.num_fewshot}"
            )
        if not 0 <= self.seed < 2**31:
            raise UsageError(f"seed must be in 0..2**31 - 1, got {self.seed}")
        if self.include and not Path(expand_home(self.include)).is_dir():
            raise UsageError(f"include={self.include} is not a folder")
        storage.new_file_on_disk(self.out, "out")
        if self.log_samples and not self.out:
            raise UsageError("log_samples does nothing without out; give out=FILE.json as well")


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """The data, the checkpoint and the devices of an evaluation."""

    data: str = key("", "what to evaluate on, as `train` takes it; empty means the text of the run")
    validation: str = key("", "with data=: another source for validation, or a share of the data; empty means 0.05")
    split: str = key("all", "train, validation, test, or all (validation and test)")
    mesh: str = key("auto", "devices as DPxMP (data parallel x model parallel), DPxMPxPP, or by name as dp2.cp2.mp2")
    step: int = key(0, "step of the checkpoint; 0 means the best by validation loss")
    ema: bool = key(False, "use the average of the weights, of a run that was trained with ema")
    reward: str = key("", "of a run with objective=grpo: FILE.py:FUNCTION, match, length:N or RUN, as `train` takes it")
    task: str = key("", "of a run with a task: FILE.py:NAME, as `train` takes it")
    weights: Literal["auto", "float", "int8", "int4", "nf4"] = key("auto", OF_A_RUN)

    def __post_init__(self):
        splits = ("train", "validation", "test", "all")
        if self.split not in splits:
            raise UsageError(f"split is one of {', '.join(splits)}; got {self.split!r}")
        if self.validation and not self.data:
            raise UsageError("validation does nothing without data; give data as well")
