"""`harness`: the tasks of lm-evaluation-harness on a run."""

import dataclasses
import json

from shardformer import storage
from shardformer.cli.arguments import parse_run_and_options, say
from shardformer.cli.generation_options import HarnessOptions
from shardformer.cli.sample_command import load_model, open_codec
from shardformer.devices import processes
from shardformer.files import expand_home, replacing
from shardformer.inference.lm_eval_answers import check_installed
from shardformer.training.run_folder import Run


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
