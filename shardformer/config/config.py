"""The configuration of a run: groups of keys, each a frozen dataclass with its rules.

`config.model.layers`, `config.optimizer.lr`. On the command line and in config.json all keys stand side by side, by
their flat names. Nothing here imports JAX, so a wrong command is rejected before any device is touched.
"""

import dataclasses
import functools
import json

from shardformer.adapters.adapter_keys import AdapterKeys
from shardformer.config import key_rules
from shardformer.config.data_keys import DataKeys
from shardformer.config.keys import KeyGroup, compute_derived, format_value, keys_of
from shardformer.config.model_keys import ModelKeys
from shardformer.config.optimizer_keys import OptimizerKeys
from shardformer.config.parallel_keys import ParallelKeys
from shardformer.config.parsing import MeshSizes, parse_mesh
from shardformer.config.registries import without_code
from shardformer.config.run_keys import LaunchKeys, ProcessKeys, RunKeys
from shardformer.config.training_keys import BadStepKeys, TrainingKeys
from shardformer.errors import RunError, UsageError
from shardformer.experts.expert_keys import ExpertKeys, Mixture
from shardformer.objectives.objective import Objective, choose_objective
from shardformer.objectives.objective_keys import ObjectiveKeys
from shardformer.quantized.weight_keys import WeightKeys


@dataclasses.dataclass(frozen=True)
class Config:
    """The keys of one run. Sizes are global: those of the full mesh, whatever its shape.

    >>> from shardformer import Config
    >>> config = Config.of(layers=2, mesh="4x2", lr=0.01)
    >>> config.model.layers, config.optimizer.lr, config.get("lr")
    (2, 0.01, 0.01)
    >>> config.replace(layers=3).model.layers
    3
    """

    # In the order of `--help` and config.json.
    model: ModelKeys = dataclasses.field(default_factory=ModelKeys)
    experts: ExpertKeys = dataclasses.field(default_factory=ExpertKeys)
    parallel: ParallelKeys = dataclasses.field(default_factory=ParallelKeys)
    data: DataKeys = dataclasses.field(default_factory=DataKeys)
    training: TrainingKeys = dataclasses.field(default_factory=TrainingKeys)
    preferences: ObjectiveKeys = dataclasses.field(default_factory=ObjectiveKeys)
    lora: AdapterKeys = dataclasses.field(default_factory=AdapterKeys)
    optimizer: OptimizerKeys = dataclasses.field(default_factory=OptimizerKeys)
    bad_steps: BadStepKeys = dataclasses.field(default_factory=BadStepKeys)
    run: RunKeys = dataclasses.field(default_factory=RunKeys)
    stored: WeightKeys = dataclasses.field(default_factory=WeightKeys)
    start: LaunchKeys = dataclasses.field(default_factory=LaunchKeys)
    processes: ProcessKeys = dataclasses.field(default_factory=ProcessKeys)

    def __post_init__(self):
        key_rules.check_rules(self)
        if self.parallel.mesh != "auto":
            compute_derived(self)

    @staticmethod
    def of(**keys) -> "Config":
        """Returns the configuration with these keys, by their flat names; the rest have their defaults."""
        return Config().replace(**keys) if keys else Config()

    def replace(self, **changes) -> "Config":
        """Returns the configuration with other values of these keys, by their flat names."""
        if changes.get("task"):
            changes = {"objective": "task", "vocab": 1} | changes  # vocab: a row has no tokens
        by_group: dict[str, dict] = {}
        for name, value in changes.items():
            if name not in FIELDS:
                raise TypeError(f"{name} is not a key of a run")
            by_group.setdefault(GROUP_OF[name], {})[FIELDS[name].name] = value
        groups = {group: dataclasses.replace(getattr(self, group), **values) for group, values in by_group.items()}
        return dataclasses.replace(self, **groups)

    def get(self, name: str):
        """Returns the value of a key by its flat name."""
        return getattr(self.group(name), FIELDS[name].name)

    def group(self, name: str) -> KeyGroup:
        """Returns the group that has a key of this flat name."""
        return getattr(self, GROUP_OF[name])

    @functools.cached_property
    def objective(self) -> Objective:
        """The objective, which answers all questions about what the run trains."""
        return choose_objective(self.preferences.objective)(self)

    @functools.cached_property
    def mixture(self) -> Mixture:
        """The mixture of experts, which answers all questions about the layers that have them."""
        return Mixture(self)

    @property
    def model_rows(self) -> int:
        """Rows of a global batch that the model computes; a row of pairs has two sides."""
        return self.training.batch * self.objective.sides

    @property
    def tokens_per_step(self) -> int:
        """Positions in the rows of a global batch."""
        return self.model_rows * self.objective.row_tokens

    @property
    def data_rows(self) -> int:
        """Rows of the data that a batch is made from; sampled answers are made from prompts."""
        return self.training.batch // self.objective.answers_of_a_prompt

    @functools.cached_property
    def stage_layers(self) -> int:
        """Layers that a pipeline stage computes in one round; all layers without stages."""
        pp = self.parallel.pp
        return self.model.layers // (pp * self.parallel.pipeline_rounds) if pp > 1 else self.model.layers

    @functools.cached_property
    def microbatch_rows(self) -> int:
        """Rows of a microbatch on one device; those of a step with accum=auto."""
        return self.training.batch // (self.parallel.dp * max(self.training.accum, 1))

    @functools.cached_property
    def shares_kv_heads(self) -> bool:
        """True if there are fewer key/value heads than shards of the model; mp / kv_heads shards then share each."""
        return self.model.key_value_heads < self.parallel.mp

    def split_inputs(self, matrix: str) -> int:
        """Returns the inputs of a layer's matrix whose rows mp may split; 0 for other matrices."""
        return ({"o": self.model.attention_size} | self.mixture.split_inputs).get(matrix, 0)

    @property
    def architecture(self) -> "Config":
        """The model on one device: everything that its parameters depend on, besides the seed."""
        lora = {name: self.get(name) for name in ("lora_rank", "lora_targets")}
        return Config(model=self.model, experts=self.experts).replace(mesh="1x1", **lora if self.lora.lora_rank else {})

    def override(self, given: dict) -> "Config":
        """Returns this configuration with keys that a user gave; rejects a given key that has no effect."""
        changed = self.replace(**given)
        key_rules.check_given(changed, given)
        return changed

    def without_stages(self) -> "Config":
        """For sampling on the same devices: pipeline stages become more of dp, over which parameters stay split."""
        sizes = self.parallel
        if sizes.pp == 1:
            return self
        dp = sizes.dp * sizes.pp
        return self.replace(mesh=str(MeshSizes(dp, sizes.mp, cp=sizes.cp)), batch=dp, accum=1, zero=3)

    def without_gradients(self) -> "Config":
        """For evaluation, scores and samples, perhaps on other devices: drops what only a backward pass needs."""
        zero, attention = self.parallel.zero, self.parallel.attention
        zero = 0 if zero == 1 else zero  # zero=1 gathers once, so every device has all parameters anyway
        attention = "auto" if attention == "fused" else attention  # these devices may have no kernel
        return self.without_own_optimizer().replace(grad_metrics=False, zero=zero, attention=attention)

    def without_own_optimizer(self) -> "Config":
        """Returns the configuration for a command that takes no step: the user's optimizer need not be named."""
        return self.replace(optimizer="adamw") if self.optimizer.is_code else self

    def for_inference(self, shape: str) -> "Config":
        """Returns the configuration of scores and samples on a mesh of this shape."""
        sizes = parse_mesh(shape)
        changes = {"mesh": shape, "batch": sizes.dp * sizes.pp, "accum": sizes.pp, "sequence_parallel": False}
        return self.objective.as_language_model().without_gradients().replace(**changes).without_stages()

    def with_factors(self) -> "Config":
        """Returns the configuration of the same outputs without `scale`, for formats that have no such key."""
        model = self.model
        return self.replace(scale="", residual_scale=model.branch_scale, logits_scale=model.head_scale)

    def with_weights(self, form: str) -> "Config":
        """Returns the configuration of a run with weights stored in this form; auto: as the run stores them."""
        if form in ("auto", self.stored.weights):
            return self
        if self.stored.quantized:
            raise UsageError(
                f"{self.run.out} stores weights={self.stored.weights}, got weights={form}; leave weights out, or "
                "convert the run with weights=float first"
            )
        return self.replace(weights=form, quantize_aware="none")

    def shown(self, name: str) -> str:
        """Returns the value of a key as the command line accepts it: 'auto', 'true', '0.001'."""
        return format_value(FIELDS[name], self.get(name))

    def describe_changes(self, before: "Config") -> str:
        """Returns the keys that differ from an earlier config: 'lr 0.003 -> 0.0001, mesh 4x2 -> 2x4'."""
        names = [name for name in FIELDS if name not in (*LAUNCH_ONLY_KEYS, "out")]
        changed = [name for name in names if before.get_stored(name) != self.get_stored(name)]
        return ", ".join(f"{name} {before.shown(name)} -> {self.shown(name)}" for name in changed)

    def get_stored(self, name: str):
        """Returns the value of a key as config.json has it: without the user's code."""
        return without_code(self.get(name))

    def to_json(self) -> str:
        """Returns the text of config.json: every key but those of one start."""
        lasting = {name: self.get_stored(name) for name in FIELDS if name not in LAUNCH_ONLY_KEYS}
        return json.dumps(lasting, indent=2) + "\n"


def key_names(*groups: type[KeyGroup]) -> tuple[str, ...]:
    """Returns the flat names of the keys of some groups."""
    return tuple(name for group in groups for name in keys_of(group))


_GROUPS: dict[str, type[KeyGroup]] = {field.name: field.default_factory for field in dataclasses.fields(Config)}  # type: ignore[misc]
GROUPS = tuple(_GROUPS.values())
FIELDS = {name: field for group in GROUPS for name, field in keys_of(group).items()}
GROUP_OF = {name: attribute for attribute, group in _GROUPS.items() for name in keys_of(group)}
ARCHITECTURE = (
    *key_names(ModelKeys),
    *(name for name, field in keys_of(ExpertKeys).items() if field.metadata["fixed"]),
)
LAUNCH_ONLY_KEYS = key_names(LaunchKeys, ProcessKeys)
# A checkpoint's arrays, its batches and its position in the schedule are valid only under these.
FIXED_ON_RESUME = tuple(dict.fromkeys([*ARCHITECTURE, *(n for n, field in FIELDS.items() if field.metadata["fixed"])]))


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
        stored = dict(json.loads(text))
        config = Config.of(**{name: value for name, value in stored.items() if name not in LAUNCH_ONLY_KEYS})
        if not config.model.vocab:
            raise UsageError("vocab must be at least 1 in a run")
        for name in FIELDS:
            if config.get(name) != config.get_stored(name):
                raise UsageError(f"{name}={config.get(name):.100} names code, which only a start may")
        return config
    except (ValueError, TypeError, RecursionError, UsageError) as error:
        raise RunError(f"{path} is damaged ({error}); every step_ folder of a run holds a copy") from None


def override_on_resume(config: Config, overrides: dict) -> Config:
    """Returns a run's config with the overrides of `--resume RUN key=value`; rejects keys that are fixed on resume."""
    for name in FIXED_ON_RESUME:
        if name in overrides and without_code(overrides[name]) != config.get_stored(name):
            raise UsageError(
                f"{name} cannot change on resume: the run has {config.shown(name)}, got "
                f"{format_value(FIELDS[name], overrides[name])}; "
                "start a new run with another out="
            )
    if overrides.get("task") and config.objective.reads_tokens:
        raise UsageError(
            f"this run trains {config.objective.trained}, which task= cannot replace; start a new run of the task"
        )
    return config.replace(**overrides)
