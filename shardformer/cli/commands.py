"""The table of commands: summary, usage, function and options of each. Imports no JAX."""

import dataclasses
import importlib
from typing import Any

from shardformer.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Command:
    """One command. `function` and `options` are imported only when it runs or prints its help."""

    function: str  # "module:function", called with the arguments after the command's name
    summary: str
    usage: tuple[str, ...]
    options: tuple[str, ...] = ()  # "module:dataclass", one for each group of keys
    notes: str = ""
    check: str = ""  # "module:function" without JAX: rejects wrong arguments before JAX is imported, which takes 2 s
    unlisted: tuple[str, ...] = ()  # further groups whose keys it takes; its help does not list them
    counts_epochs: bool = False  # it opens the data of a run, whose rows epochs= counts

    def check_arguments(self, arguments: list[str]) -> None:
        """Rejects wrong arguments without JAX, and `epochs=` where no data are read whose rows would be counted."""
        reads_steps = RUN_KEYS in self.options and not self.counts_epochs
        if reads_steps and any(word.startswith("epochs=") for word in arguments):
            raise UsageError("epochs= counts the rows of the data, which only train reads; give steps=")
        if self.check:
            load(self.check)(arguments)


def load(path: str) -> Any:
    """Imports the object of "module:name", a path within this package."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"shardformer.{module}"), name)


def run_command(name: str, /, *words: object, **keys: object) -> int:
    """Runs a command from Python, such as `run_command("serve", "checkpoints/tiny", port=8001)`.

    Returns its exit status: 0, or 1 if it found a difference. Raises UsageError for wrong arguments, RunError for a
    failure.

    >>> from shardformer import run_command
    >>> run_command("train", "tiny", mesh="3x2")
    Traceback (most recent call last):
    shardformer.errors.UsageError: ...

    Arguments:
      name: the command: `convert`, `serve`, `generate`, ...; `python -m shardformer --help` lists all.
      words: its arguments without a key, such as a preset or folders.
      keys: its other arguments; `COMMAND --help` lists them.
    """
    if name not in COMMANDS:
        raise UsageError(f"unknown command {name!r}; the commands are {', '.join(COMMANDS)}")
    command, arguments = COMMANDS[name], [*map(str, words), *(f"{key}={value}" for key, value in keys.items())]
    command.check_arguments(arguments)
    return load(command.function)(arguments) or 0


RUN_KEYS, DEPTH = "config:Config", "config.depth:DepthKeys"

COMMANDS = {
    "train": Command(
        "cli.train_command:train",
        "train a new run, or resume one",
        (
            "train PRESET [key=value ...]",
            "train depth=N data=... [key=value ...]",
            "train base=RUN|HF_FOLDER data=... [key=value ...]",
            "train --resume RUN [key=value ...]",
        ),
        (RUN_KEYS, DEPTH, "convert.convert_options:FromHf"),
        "PRESET is one of tiny, shakespeare_cpu, shakespeare_char, smollm2_135m, gpt2, gpt2_medium, gpt2_large, "
        "gpt2_xl, qwen3_0_6b, llama3_8b, gpt1, gptj_6b, gptj_6b_finetune, and sets many of the keys below; "
        "`show PRESET` prints them. RUN is the folder of a run; runs and data may be in a bucket "
        "(gs://, s3://). Ctrl-C or SIGTERM saves a checkpoint and stops.",
        check="cli.arguments:check_preset",
        counts_epochs=True,
    ),
    "sweep": Command(
        "cli.sweep_command:sweep",
        "train every combination of some keys' values, and compare",
        (
            "sweep PRESET lr=1e-3,3e-3 layers=2,4 [seeds=3] [halvings=2] [key=value ...]",
            "sweep base=RUN|HF_FOLDER data=... lr=1e-5,3e-5 [key=value ...]",
        ),
        ("cli.sweep_command:SweepOptions", RUN_KEYS),
        "Every run is an ordinary one, in a folder of `out`. The same command continues a sweep; processes that see "
        "the folder, such as the tasks of a SLURM array, share its runs. A table and sweep.png rank the combinations "
        "by the mean validation loss of their seeds.",
        check="cli.sweep_command:check",
        unlisted=("convert.convert_options:FromHf",),
    ),
    "eval": Command(
        "cli.eval_command:evaluate",
        "loss and accuracy of a checkpoint",
        ("eval RUN [key=value ...]",),
        ("cli.generation_options:EvalOptions",),
    ),
    "sample": Command(
        "cli.sample_command:sample",
        "text from a checkpoint",
        ("sample RUN [key=value ...]",),
        ("cli.text_options:SampleOptions",),
    ),
    "generate": Command(
        "cli.generate_command:generate",
        "continuations of a file of prompts, as JSON lines",
        ("generate RUN prompts=FILE [key=value ...]",),
        ("cli.generation_options:GenerateOptions",),
        'A line of FILE is a prompt, or a JSON object with one under "prompt". The continuation of a prompt depends '
        "neither on the other prompts nor on batch or mesh.",
    ),
    "score": Command(
        "cli.generate_command:score",
        "nats per token and per byte of a text",
        ("score RUN FILE [key=value ...]",),
        ("cli.generation_options:ScoreOptions",),
        'FILE is one document, or .jsonl with a document under "text" in each line.',
    ),
    "serve": Command(
        "cli.serve_command:serve",
        "an OpenAI-compatible endpoint of a run",
        ("serve RUN|HF [key=value ...]",),
        ("cli.generation_options:ServeOptions",),
        "Needs the extra `serve`. A request's tokens are those of `generate` with its seed, alone or among others.",
    ),
    "harness": Command(
        "cli.harness_command:harness",
        "tasks of lm-evaluation-harness",
        ("harness RUN tasks=NAME,... [include=FOLDER] [key=value ...]",),
        ("cli.generation_options:HarnessOptions",),
        "Needs the extra `eval`. With HF_DATASETS_OFFLINE=1 it reads downloaded data sets only.",
    ),
    "show": Command(
        "cli.show_command:show",
        "settings, parameters and memory of a run, without a device",
        ("show PRESET|RUN [key=value ...]", "show depth=N [key=value ...]"),
        (RUN_KEYS, DEPTH),
        "Prints every setting, the shape and the split of each parameter, and the bytes of each device.",
    ),
    "plan": Command(
        "cli.plan_command:run_plan",
        "bytes, collectives and speed on chips you do not have",
        (
            "plan PRESET|RUN|HF_FOLDER chip=v5e:4x4 [key=value ...]",
            "plan depth=N chip=v5e:4x4 [key=value ...]",
            "plan ... sweep=true [picture=plan.png]",
        ),
        ("cli.analysis_options:PlanOptions", RUN_KEYS, DEPTH),
        "Reports whether a step fits the chips and, if not, which settings would. Needs no accelerator; with the extra "
        "`aot` (libtpu) it compiles with the TPU's compiler.",
    ),
    "memory": Command(
        "cli.device_commands:run_memory",
        "bytes per device: predicted, compiled and live",
        ("memory PRESET|RUN [key=value ...]",),
        ("cli.analysis_options:MemoryOptions", RUN_KEYS),
        "Compiles one step on the devices of this machine and runs it once.",
    ),
    "verify": Command(
        "cli.device_commands:run_verify",
        "sharded against dense: loss, gradients, ten steps",
        ("verify PRESET|RUN mesh=4x2 [key=value ...]", "verify PRESET|RUN mesh=64x8 exact=true [key=value ...]"),
        ("cli.analysis_options:VerifyOptions", RUN_KEYS),
        "Run it on a new pod or with a new version of JAX. If the two differ, it names the worst leaf and exits with "
        "status 1. With exact=true, the program of any mesh runs in float64 on this machine, without devices; a sum "
        "over devices that is missing or doubled is named with its line. For your own shard functions: "
        "shardformer.verify_function, and the command `learn`.",
    ),
    "coordinates": Command(
        "cli.device_commands:run_coordinates",
        "how far the first steps move models of several sizes",
        ("coordinates PRESET widths=64,128,256 depths=2,4,8 [key=value ...]",),
        ("cli.analysis_options:CoordinateOptions", RUN_KEYS),
        "The coordinate check of muP: a rate carries over between sizes if the same steps change the logits as much. "
        "With scale=completep they do.",
    ),
    "explain": Command(
        "cli.explain_command:run_explain",
        "a tour of the ways to split a model",
        ("explain [pictures=FOLDER]",),
        ("cli.analysis_options:ExplainOptions",),
        "Runs dense, data parallel, tensor parallel, ZeRO and combined training on four CPU devices. Prints the memory "
        "and the collectives of each, and its difference from the dense result.",
    ),
    "learn": Command(
        "cli.learn_command:learn",
        "a course: write shard functions, and have them checked",
        (
            "learn                     list the lessons and your progress",
            "learn 3                   write lesson_3.py into the current folder",
            "learn check lesson_3.py   run it on eight CPU devices and name the mistake",
            "learn solution 3          print the solution",
            "learn glossary            the words of the course, with pictures",
            "learn notebooks FOLDER    write the lessons as notebooks",
        ),
        notes="Exit status of check: 1 if the function is wrong. The course needs no accelerator.",
    ),
    "plot": Command(
        "cli.plot_command:plot",
        "the curves of several runs on one sheet",
        ("plot RUN [RUN ...] [by=step|tokens|time] [out=runs.png]",),
        ("cli.analysis_options:PlotOptions",),
    ),
    "inspect": Command(
        "cli.inspect_command:inspect",
        "the arrays of a checkpoint, and whether it is intact",
        ("inspect RUN|CHECKPOINT|SHARDS|SAFETENSORS [norms=false]",),
        ("cli.analysis_options:InspectOptions",),
        "CHECKPOINT is a step_ folder; SHARDS contains GPT-J's shard_0/0.npz and so on. Needs no device.",
    ),
    "diff": Command(
        "cli.inspect_command:diff",
        "which arrays of two checkpoints differ, and by how much",
        ("diff A B [most=50]",),
        ("cli.analysis_options:DiffOptions",),
        "A and B are anything that `inspect` takes. Exit status 1 if something differs.",
    ),
    "data": Command(
        "cli.data_command:main",
        "prepare texts as token files; show and export them",
        (
            "data prepare SRC ... out=FOLDER [key=value ...]  texts, folders or globs to token files",
            "data show FOLDER                                 its sizes, sources, a sample and lengths",
            "data show CHATS tokenizer=HF_FOLDER              what of the first conversation is learned",
            "data export FOLDER out=FILE.tfrecords            to GPT-J's TFRecords",
            "data import INPUT.TXT                            tiny_shakespeare, without a download",
        ),
        ("cli.data_options:PrepareOptions", "cli.data_options:ShowOptions", "cli.data_options:ExportOptions"),
        "`train` prepares a text automatically, in a cache (SHARDFORMER_CACHE or ~/.cache/shardformer). INPUT.TXT is a "
        "copy of tiny_shakespeare's text, 1,115,394 bytes.",
    ),
    "convert": Command(
        "convert.command:convert",
        "GPT-J's and Hugging Face's models to runs and back; merge adapters",
        (
            "convert SHARDS DST [key=value ...]          GPT-J's shard_0/0.npz ... to a run",
            "convert RUN DST [key=value ...]             a run to GPT-J's shards",
            "convert HF_FOLDER DST [key=value ...]       of a family in convert/README.md to a run",
            "convert STREAM DST base_model=llama_7b      EasyLM's Llama to a run",
            "convert CHECKPOINT DST config=HF_FOLDER     MaxText's model to a run",
            "convert RUN DST format=hf [key=value ...]   a run to a Hugging Face folder",
            "convert RUN FILE.gguf [key=value ...]       a run to llama.cpp's format",
            "convert RUN DST merge_lora=true [ema=true]  a run with adapters to one without",
            "convert RUN DST weights=nf4                 its weights as int8, int4 or nf4 codes",
            "convert RUN DST format=peft [key=value ...] a run's adapters to a PEFT folder",
            "convert PEFT_FOLDER DST base=RUN            PEFT's adapters with a run's weights",
        ),
        (
            "convert.convert_options:FromGptj",
            "convert.convert_options:ToGptj",
            "convert.convert_options:FromHf",
            "convert.convert_options:ToHf",
            "convert.easylm_options:FromEasylm",
            "convert.convert_options:FromMaxtext",
            "convert.convert_options:ToGguf",
            "convert.convert_options:Merging",
            "convert.convert_options:Storing",
            "convert.convert_options:ToPeft",
            "convert.convert_options:FromPeft",
        ),
        "A conversion to a run takes every key of `train` as well.",
        unlisted=(RUN_KEYS,),
    ),
    "bench": Command(
        "bench.command_line:main",
        "measure time and memory on this machine",
        (
            "bench step [key=value ...]          a train step against other implementations",
            "bench race [key=value ...]          validation loss against CPU seconds, ours and others",
            "bench race recipe=NAME [seeds=N]    a recipe of the CPU speedrun, next to the recorded ones",
            "bench mesh [key=value ...]          meshes against each other",
            "bench scaling [key=value ...]       how time and memory grow with each size",
            "bench accumulation [key=value ...]  time and memory of microbatches",
            "bench zero [key=value ...]          bytes per device with ZeRO",
            "bench checkpoint [key=value ...]    saving and restoring",
            "bench generate [key=value ...]      generation, against transformers.generate",
            "bench kernel [key=value ...]        this device's attention against plain attention",
        ),
        ("bench.bench_options:Measuring", RUN_KEYS),
    ),
    "legacy": Command(
        "legacy.legacy_command:main",
        "run xmap-era code unedited, check it, or migrate it",
        (
            "legacy [--verbose] [--strict] [--legacy-random] SCRIPT.py ...  run a script",
            "legacy --check PATH ...                                        list removed names",
            "legacy --migrate PATH ...                                      print a patch",
        ),
        notes="Exit status: that of the script; of --check, 1 if a removed name is not covered; of --migrate, 1 if "
        "one stays; of both, 1 if a file cannot be read.",
    ),
}

GROUPS = {
    "Train and use a model": ("train", "sweep", "eval", "sample", "generate", "score", "serve", "harness"),
    "Plan and inspect": ("show", "plan", "memory", "verify", "coordinates", "explain", "learn", "bench"),
    "Compare runs and checkpoints": ("plot", "inspect", "diff"),
    "Data and checkpoints": ("data", "convert"),
    "xmap-era code": ("legacy",),
}
