"""`harness`: the tasks of lm-evaluation-harness on a run."""

import dataclasses
import json
from pathlib import Path

from shardformer import storage
from shardformer.cli.arguments import parse_run_and_options, say
from shardformer.cli.sample_command import WeightsOptions, check_batch, load_model
from shardformer.cli.text_options import TextOptions, open_codec
from shardformer.config.keys import key
from shardformer.devices import processes
from shardformer.errors import UsageError
from shardformer.files import expand_home, replacing
from shardformer.inference.lm_eval_answers import check_installed
from shardformer.training.run_folder import Run


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


@processes.ending_all_on_failure()
def harness(arguments: list[str]) -> None:
    """Prints the harness's table of results."""
    folder, options = parse_run_and_options(arguments, HarnessOptions)
    check_installed("harness")
    run = Run.open(folder)
    if options.special_tokens == "auto":  # `hf` recognises them in every text
        options = dataclasses.replace(options, special_tokens="true")
    codec = open_codec(run, options)
    from shardformer.inference import lm_eval_adapter
    from shardformer.inference.lm_eval_answers import Answers

    names = [name.strip() for name in options.tasks.split(",") if name.strip()]
    manager = lm_eval_adapter.find_tasks(names, [expand_home(options.include)] if options.include else [])
    model, params = load_model(run, options)
    results = lm_eval_adapter.evaluate(
        Answers(model, params, codec, options.batch, options.seed),
        manager,
        names,
        num_fewshot=None if options.num_fewshot < 0 else options.num_fewshot,
        limit=options.limit or None,
        gen_kwargs=options.gen_kwargs or None,
        log_samples=options.log_samples,
        random_seed=options.seed,
        fewshot_random_seed=options.seed,
    )
    say(lm_eval_adapter.format_results(results))
    if options.out:
        with replacing(storage.on_disk(options.out, "out")) as temporary:
            temporary.write_text(json.dumps(results, indent=2, default=str) + "\n", "utf-8")
