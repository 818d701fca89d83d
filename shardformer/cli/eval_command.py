"""`eval`: the loss of a split under a checkpoint of a run."""

import dataclasses
import math

from shardformer.analysis.memory import predict_bytes
from shardformer.cli.arguments import parse_run_and_options, say
from shardformer.cli.generation_options import EvalOptions
from shardformer.cli.loading import load_corpus
from shardformer.config import Config, parsing
from shardformer.data import Corpus
from shardformer.devices import processes, programs
from shardformer.errors import UsageError
from shardformer.layout import mesh
from shardformer.training.evaluation import Evaluator, format_losses
from shardformer.training.features_on_host import open_evaluation_features
from shardformer.training.run_folder import Run
from shardformer.training.trainer import Trainer


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
    settings = for_evaluation(run.config.with_weights(options.weights), options.mesh)
    for feature in features:
        feature.check(dataclasses.replace(run, config=settings), corpus)
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
    settings = settings.objective.without_training_layers()
    accum = max(settings.training.accum, 1)  # 0 is auto, of a run that was converted and never trained
    rows = settings.training.batch // accum
    sizes = parsing.MeshSizes() if shape == "auto" else parsing.parse_mesh(shape)
    multiple = math.lcm(sizes.dp, settings.objective.answers_of_a_prompt)
    batch = -(-rows // multiple) * multiple * sizes.pp
    return settings.without_gradients().replace(mesh=shape, batch=batch, accum=sizes.pp)
