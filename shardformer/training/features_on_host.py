"""The choice of a run's features on the host, to which `train` adds its end. A feature that is off is not imported."""

from shardformer import optim
from shardformer.config import Config
from shardformer.objectives.objective import import_class
from shardformer.training.host_feature import HostFeature


def open_features(config: Config) -> tuple[HostFeature, ...]:
    """Returns the features of a run in their order; raises UsageError for code, tasks or prompts that do not open.

    Called before the data are read, which may take hours.
    """
    if config.start.tracker:
        from shardformer.logs.trackers import check_tracker, starts_here  # not imported without a tracker

        if starts_here(config):
            check_tracker(config.start.tracker)
    if config.optimizer.is_code:
        optim.make_optimizer(config)
    skips = config.bad_steps.skip_steps
    return open_evaluation_features(config) + _open(
        config,
        ("training.monitor:Monitor", config.start.eval_tasks or config.start.eval_prompts),
        ("training.example_gradients:ExampleGradients", config.training.grad_metrics),
        ("experts.expert_load:ExpertLoad", config.experts.experts),
        ("training.rollback:SkippedSteps", skips),
        ("training.host_feature:EndAtNonFinite", not skips),
    )


def open_evaluation_features(config: Config) -> tuple[HostFeature, ...]:
    """Returns the features that an evaluation without training has too: what the objective does on the host."""
    path = config.objective.host_feature
    return (import_class(path)(config),) if path else ()


def _open(config: Config, *features: tuple[str, object]) -> tuple[HostFeature, ...]:
    """Returns the features of this package that are on, in their order, from pairs of (FILE:CLASS, is on)."""
    return tuple(import_class(f"shardformer.{path}")(config) for path, is_on in features if is_on)
