"""The choice of the features that a run has on the host."""

from shardformer import optim
from shardformer.config import Config
from shardformer.logs import observers
from shardformer.objectives.objective import import_class
from shardformer.training.host_feature import EndAtNonFinite, HostFeature


def open_features(config: Config) -> tuple[HostFeature, ...]:
    """Returns the features of a run in their order; raises UsageError for code, tasks or prompts that do not open.

    Called before the data are read, which may take hours.
    """
    observers.check_trackers(config)
    if config.optimizer.is_code:
        optim.make_optimizer(config)
    features = list(open_evaluation_features(config))
    if config.start.eval_tasks or config.start.eval_prompts:
        from shardformer.training.monitor import Monitor  # not imported without scores or texts

        features.append(Monitor(config))
    if config.training.grad_metrics:
        from shardformer.training.example_gradients import ExampleGradients  # not imported without grad_metrics

        features.append(ExampleGradients(config))
    if config.experts.experts:
        from shardformer.training.expert_load import ExpertLoad  # not imported without experts

        features.append(ExpertLoad(config))
    if not config.bad_steps.skip_steps:
        return (*features, EndAtNonFinite(config))
    from shardformer.training.rollback import SkippedSteps  # not imported without skip_steps

    return (*features, SkippedSteps(config))


def open_evaluation_features(config: Config) -> tuple[HostFeature, ...]:
    """Returns the features that an evaluation without training has too: what the objective does on the host."""
    path = config.objective.host_feature
    return (import_class(path)(config),) if path else ()
