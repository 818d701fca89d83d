"""`eval`: the loss of a split under a checkpoint of a run."""

import dataclasses
import math
from typing import Literal

from shardformer.analysis.memory import predict_bytes
from shardformer.cli.arguments import parse_run_and_options, say
from shardformer.cli.loading import load_corpus
from shardformer.config import Config, parsing
from shardformer.config.keys import key
from shardformer.data import Corpus
from shardformer.devices import processes, programs
from shardformer.errors import UsageError
from shardformer.layout import mesh
from shardformer.quantized.weight_keys import OF_A_RUN
from shardformer.training.evaluation import Evaluator, format_losses
from shardformer.training.features_on_host import open_evaluation_features
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
    if options.reward and not run.config.objective.takes_reward:
        raise UsageError(f"reward does nothing with objective={run.config.objective.name}; leave it out")
    run = dataclasses.replace(run, config=run.config.replace(reward=options.reward))
    features, corpus = open_evaluation_features(run.config), None
    for feature in features:
        corpus = feature.open_data(run.config, corpus)
    corpus = corpus or _load_corpus(run, options)
    for feature in features:
        feature.check(run, corpus)
    settings = for_evaluation(run.config.with_weights(options.weights), options.mesh)
    settings = mesh.start(settings, lambda c: predict_bytes(c).parameters, may_add_rows=True)
    programs.keep_compiled_programs(settings, processes.gather_texts)
    evaluator = Evaluator(Trainer(settings, mesh.make(settings)), corpus)
    for feature in features:
        feature.prepare_evaluation(dataclasses.replace(run, config=settings), evaluator)
    step, params = run.restore_params(evaluator.trainer.model, options.step, options.ema)
    splits = evaluator.corpus.held_out if options.split == "all" else (options.split,)
    losses = evaluator.evaluate_splits(splits, params)
    say(f"step {step}\n{format_losses(losses, settings)}")


def _load_corpus(run: Run, options: EvalOptions) -> Corpus:
    """Returns the data that are named, or those of the run, unchanged."""
    if options.data:
        return load_corpus(run.config.replace(data=options.data, validation=options.validation), run.vocabulary)
    corpus = load_corpus(run.config, run.vocabulary)
    run.check_corpus(corpus)
    return corpus


def for_evaluation(settings: Config, shape: str) -> Config:
    """Returns the settings of an evaluation with the rows of a training microbatch, rounded up to a multiple of dp.

    Each pipeline stage has as many rows. With mesh=auto the rows are rounded once the mesh has a shape.
    """
    accum = max(settings.training.accum, 1)  # 0 is auto, of a run that was converted and never trained
    rows = settings.training.batch // accum
    sizes = parsing.MeshSizes() if shape == "auto" else parsing.parse_mesh(shape)
    multiple = math.lcm(sizes.dp, settings.objective.answers_of_a_prompt)
    batch = -(-rows // multiple) * multiple * sizes.pp
    return settings.without_gradients().replace(mesh=shape, batch=batch, accum=sizes.pp)
