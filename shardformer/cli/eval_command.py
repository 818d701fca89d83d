"""`eval`: the loss of a split under a checkpoint of a run."""

import dataclasses
import math
from typing import Literal

from shardformer.analysis.memory import predict_bytes
from shardformer.cli.arguments import parse_run_and_options, say
from shardformer.cli.loading import load_corpus
from shardformer.config import Config, parsing
from shardformer.config.keys import key
from shardformer.config.weight_keys import OF_A_RUN
from shardformer.data import Data
from shardformer.devices import processes, programs
from shardformer.errors import UsageError
from shardformer.layout import mesh
from shardformer.model.task import open_task, open_task_data
from shardformer.training.evaluation import Evaluator, format_losses
from shardformer.training.run_folder import Run
from shardformer.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """The data, the checkpoint and the devices of an evaluation."""

    data: str = key("", "what to evaluate on, as `train` takes it; empty means the text of the run")
    validation: str = key("", "with data=: another source for validation, or a share of the data; empty means 0.05")
    split: str = key("all", "train, validation, test, or all (validation and test)")
    mesh: str = key("auto", "devices as DPxMP (data parallel x model parallel), DPxMPxPP, or by name as dp2.cp2.mp2")
    step: int = key(0, "step of the checkpoint; 0 means the best by validation loss")
    ema: bool = key(False, "use the average of the weights, of a run that was trained with ema")
    reward: str = key("", "of a run with objective=grpo: FILE.py:FUNCTION, match or length:N, as `train` takes it")
    task: str = key("", "of a run with a task: FILE.py:NAME, as `train` takes it")
    weights: Literal["auto", "float", "int8", "int4", "nf4"] = key("auto", OF_A_RUN)

    def __post_init__(self):
        splits = ("train", "validation", "test", "all")
        if self.split not in splits:
            raise UsageError(f"split is one of {', '.join(splits)}; got {self.split!r}")
        if self.validation and not self.data:
            raise UsageError("validation does nothing without data; give data as well")


@processes.ending_all_on_failure()
def evaluate(arguments: list[str]) -> None:
    """Prints the loss of a split under a checkpoint of a run."""
    folder, options = parse_run_and_options(arguments, EvalOptions)
    run = Run.open(folder, {"task": options.task} if options.task else {})
    _check_reward(run.config, options.reward)
    corpus: Data | None = None  # of a task: its batches have the rows of this evaluation
    if not run.config.objective.is_language_model:
        open_task(run.config)
    elif options.data:
        corpus = load_corpus(run.config.replace(data=options.data, validation=options.validation), run.vocabulary)
    else:
        corpus = load_corpus(run.config, run.vocabulary)
        run.check_corpus(corpus)
    if options.reward:
        from shardformer.training.rollouts import try_first_row

        try_first_row(run, corpus, options.reward)  # type: ignore[arg-type]
    settings = for_evaluation(run.config.with_weights(options.weights), options.mesh)
    settings = mesh.start(settings, lambda c: predict_bytes(c).parameters, may_add_rows=True)
    corpus = corpus or open_task_data(settings)
    programs.keep_compiled_programs(settings, processes.gather_texts)
    if settings.preferences.needs_references:
        from shardformer.training.preference_references import read_references  # not imported without pairs

        corpus = read_references(run, corpus)  # type: ignore[arg-type]  # of text
    trainer = Trainer(settings, mesh.make(settings))
    if settings.preferences.learns_rewards:
        from shardformer.training.rollouts import for_evaluation as with_rewards  # not imported without rewards

        trainer = with_rewards(dataclasses.replace(run, config=settings), trainer, options.reward)
    step, params = run.restore_params(trainer.model, options.step, options.ema)
    splits = corpus.held_out if options.split == "all" else (options.split,)
    losses = Evaluator(trainer, corpus).evaluate_splits(splits, params)
    say(f"step {step}\n{format_losses(losses, settings)}")


def _check_reward(config: Config, reward: str) -> None:
    """Raises UsageError for a reward that is missing, wrong or without effect, before the data are read."""
    if config.preferences.learns_rewards:
        from shardformer.training.rewards import open_reward  # not imported without rewards

        open_reward(reward)
    elif reward:
        raise UsageError(f"reward does nothing with objective={config.objective.name}; leave it out")


def for_evaluation(settings: Config, shape: str) -> Config:
    """Returns the settings of an evaluation with the rows of a training microbatch, rounded up to a multiple of dp.

    Each pipeline stage has as many rows. With mesh=auto the rows are rounded once the mesh has a shape.
    """
    rows = settings.training.batch // max(
        settings.training.accum, 1
    )  # 0 is auto, of a run that was converted and never trained
    sizes = parsing.MeshSizes() if shape == "auto" else parsing.parse_mesh(shape)
    multiple = math.lcm(sizes.dp, settings.objective.answers_of_a_prompt)
    batch = -(-rows // multiple) * multiple * sizes.pp
    return settings.without_gradients().replace(mesh=shape, batch=batch, accum=sizes.pp)
