"""The configuration of a run: one frozen dataclass, made of groups of keys.

Nothing here imports JAX, so a wrong command is rejected before any device is touched.
"""

import dataclasses
import json

from shardformer.config import key_rules
from shardformer.config.adapter_keys import AdapterKeys
from shardformer.config.bad_step_keys import BadStepKeys
from shardformer.config.data_keys import DataKeys
from shardformer.config.keys import KeyGroup, check_value, format_value, is_optional
from shardformer.config.model_keys import ModelKeys
from shardformer.config.monitor_keys import MonitorKeys
from shardformer.config.optimizer_keys import OptimizerKeys
from shardformer.config.parallel_keys import OLD_REMAT, ParallelKeys
from shardformer.config.parsing import MeshSizes, parse_mesh
from shardformer.config.run_keys import LaunchKeys, ProcessKeys, RunKeys
from shardformer.config.training_keys import TrainingKeys
from shardformer.errors import RunError, UsageError

# In the order of `--help` and config.json.
GROUPS: tuple[type[KeyGroup], ...] = (
    ModelKeys,
    ParallelKeys,
    DataKeys,
    TrainingKeys,
    AdapterKeys,
    OptimizerKeys,
    BadStepKeys,
    RunKeys,
    MonitorKeys,
    LaunchKeys,
    ProcessKeys,
)


@dataclasses.dataclass(frozen=True)
class Config(
    ProcessKeys,
    LaunchKeys,
    MonitorKeys,
    RunKeys,
    BadStepKeys,
    OptimizerKeys,
    AdapterKeys,
    TrainingKeys,
    DataKeys,
    ParallelKeys,
    ModelKeys,
):
    """One run. Sizes are global: those of the full mesh, whatever its shape."""

    def __post_init__(self):
        object.__setattr__(self, "remat", OLD_REMAT.get(self.remat, self.remat))
        for name, field in FIELDS.items():
            value = getattr(self, name)
            if is_optional(field.type) and value == 0 and not isinstance(value, bool):
                object.__setattr__(self, name, None)  # files of earlier versions have 0 where None is now
            check_value(field, getattr(self, name))
        for group in GROUPS:
            group.check(self)
        key_rules.check_rules(self)

    @property
    def stage_layers(self) -> int:
        """Layers that a pipeline stage computes in one round; all layers without stages."""
        return self.layers // (self.pp * self.pipeline_rounds) if self.pp > 1 else self.layers

    @property
    def shares_kv_heads(self) -> bool:
        """True if there are fewer key/value heads than shards of the model; mp / kv_heads shards then share each."""
        return self.key_value_heads < self.mp

    @property
    def architecture(self) -> "Config":
        """The model on one device: everything that its parameters depend on, beside the seed."""
        names = (*ARCHITECTURE, "lora_rank", "lora_targets", "lora_rank_pattern") if self.lora_rank else ARCHITECTURE
        return Config(**{name: getattr(self, name) for name in names}, mesh="1x1")

    def replace(self, **changes) -> "Config":
        return dataclasses.replace(self, **changes)

    def override(self, given: dict) -> "Config":
        """Returns this configuration with keys that a user gave; rejects a given key that has no effect."""
        changed = self.replace(**given)
        key_rules.check_given(changed, given)
        return changed

    def without_stages(self) -> "Config":
        """For sampling on the same devices: pipeline stages become more of dp, over which parameters stay split."""
        if self.pp == 1:
            return self
        dp = self.dp * self.pp
        return self.replace(mesh=str(MeshSizes(dp, self.mp, cp=self.cp)), batch=dp, accum=1, zero=3)

    def without_gradients(self) -> "Config":
        """For evaluation, scores and samples, perhaps on other devices: drops what only a backward pass needs."""
        zero = 0 if self.zero == 1 else self.zero  # zero=1 gathers once, so every device holds all parameters anyway
        attention = "auto" if self.attention == "fused" else self.attention  # these devices may have no kernel
        return self.replace(grad_metrics=False, zero=zero, attention=attention)

    def for_inference(self, shape: str) -> "Config":
        """Returns the configuration of scores and texts on a mesh of this shape."""
        sizes = parse_mesh(shape)
        changes = {"mesh": shape, "batch": sizes.dp * sizes.pp, "accum": sizes.pp, "sequence_parallel": False}
        return self.without_gradients().replace(**changes).without_stages()

    def shown(self, name: str) -> str:
        """Returns the value of a key as the command line takes it: 'auto', 'true', '0.001'."""
        return format_value(FIELDS[name], getattr(self, name))

    def describe_changes(self, before: "Config") -> str:
        """Returns the keys that differ from an earlier config: 'lr 0.003 -> 0.0001, mesh 4x2 -> 2x4'."""
        names = [name for name in FIELDS if name not in (*LAUNCH_ONLY_KEYS, "out")]
        changed = [name for name in names if getattr(before, name) != getattr(self, name)]
        return ", ".join(f"{name} {before.shown(name)} -> {self.shown(name)}" for name in changed)

    def to_json(self) -> str:
        lasting = {name: getattr(self, name) for name in FIELDS if name not in LAUNCH_ONLY_KEYS}
        return json.dumps(lasting, indent=2) + "\n"


def key_names(*groups: type[KeyGroup]) -> tuple[str, ...]:
    return tuple(field.name for group in groups for field in dataclasses.fields(group))  # type: ignore[arg-type]


FIELDS = {name: Config.__dataclass_fields__[name] for name in key_names(*GROUPS)}
ARCHITECTURE = key_names(ModelKeys)
LAUNCH_ONLY_KEYS = key_names(LaunchKeys, ProcessKeys)
# A checkpoint's arrays, its batches and its place in the schedule are valid only under these.
FIXED_ON_RESUME = (*ARCHITECTURE, *(name for name, field in FIELDS.items() if field.metadata["fixed"]))


def is_hugging_face(text: str | bytes) -> bool:
    """Returns True for the text of a Hugging Face config.json; a run's has no model_type."""
    try:
        theirs = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(theirs, dict) and "model_type" in theirs


def parse_config(text: str | bytes, path) -> Config:
    """Returns the configuration that a config.json holds; `path` is for messages."""
    try:
        stored = {"windows": "random"} | json.loads(text)  # runs from before the key existed read random windows
        config = Config(**{name: value for name, value in stored.items() if name not in LAUNCH_ONLY_KEYS})
        if not config.vocab:
            raise UsageError("vocab must be at least 1 in a run")
        return config
    except (ValueError, TypeError, RecursionError, UsageError) as error:
        raise RunError(f"{path} is damaged ({error}); every step_ folder of a run holds a copy") from None


def override_on_resume(config: Config, overrides: dict) -> Config:
    """Returns a run's config with the overrides of `--resume RUN key=value`; rejects keys that are fixed on resume."""
    for name in FIXED_ON_RESUME:
        if name in overrides and overrides[name] != getattr(config, name):
            raise UsageError(
                f"{name} cannot change on resume: the run has {config.shown(name)}, got "
                f"{format_value(FIELDS[name], overrides[name])}; "
                "start a new run with another out="
            )
    return config.replace(**overrides)
