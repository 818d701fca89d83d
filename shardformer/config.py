"""What a run is: one frozen dataclass, presets as functions, `key=value`, and every check.

Nothing here imports JAX, so a wrong command is refused before any device is touched.
"""

import dataclasses
import json
from pathlib import Path

from shardformer import checks, parsing
from shardformer.errors import RunError, UsageError
from shardformer.parsing import key


@dataclasses.dataclass(frozen=True)
class Config:
    """One run. Sizes are global: what the whole mesh sees, whatever its shape."""

    # The model. On resume none of these may change (see ARCHITECTURE).
    layers: int = key(4, "transformer layers")
    d_model: int = key(128, "width of the residual stream")
    heads: int = key(4, "attention heads")
    d_ff: int = key(0, "feed-forward width; 0 means 4 * d_model")
    seq: int = key(64, "tokens of context")
    vocab: int = key(0, "predictable tokens; 0 means as many as the data has")
    vocab_multiple: int = key(8, "the table is padded to this, never to mp: that would tie the model to the mesh")
    block: str = key("parallel", "parallel: GPT-J, one all-reduce a layer; sequential: GPT-2, two")
    norm: str = key("layernorm", "layernorm or rmsnorm")
    bias: str = key("ff", "none; ff: feed-forward, norms and head, as GPT-J; all: attention projections as well")
    positions: str = key("rotary", "learned, rotary, t5 (relative bias) or none")
    rotary_dims: int = key(0, "leading dimensions of a head that rotate; 0 means all of them")
    t5_buckets: int = key(32, "distance buckets of the T5 relative bias")
    embed_bias: bool = key(False, "beside the token table, as GPT-J has one")
    tied: bool = key(False, "the head reads the embedding's table")
    init_std: float = key(0.02, "of every weight; 0 means 1 / sqrt(fan in)")

    # How it is computed: the numbers agree to rounding, whatever is chosen.
    mesh: str = key("auto", "AxB is dp x mp; auto puts every device on dp as far as the batch allows")
    embed_split: str = key("vocab", "vocab: masked lookup and psum; width: lookup and all_gather")
    dtype: str = key("float32", "of the matrix products; parameters, softmax, norms and loss stay float32")
    scan: bool = key(True, "layers in one lax.scan (compiles in constant time) or unrolled (runs faster)")
    remat: bool = key(False, "recompute each layer in the backward pass instead of keeping its activations")

    # The training.
    data: str = key("auto", "auto, tiny_shakespeare, builtin, or the path of a UTF-8 text file")
    batch: int = key(12, "sequences per step, over the whole mesh")
    steps: int = key(2000, "optimizer steps of the whole run")
    seed: int = key(0, "of the parameters, the batches and the dropout masks")
    dropout: float = key(0.0, "on the embedding, the attention weights and each residual branch")
    z_loss: float = key(0.0, "times the squared log-partition per token; GPT-J used 1e-4")
    optimizer: str = key(
        "adamw", "muon: for the layers' matrices; lbfgs: its line search finds the rate, lr plays no part"
    )
    lr: float = key(1e-3, "the highest learning rate")
    lr_min: float = key(1e-4, "where the cosine ends; never above lr")
    warmup: int = key(100, "steps of linear warm-up")
    decay_steps: int = key(0, "where the cosine reaches lr_min; 0 means at the last step")
    lr_rules: str = key(
        "", "'*bias=10x,embed=0.1x,layers/up=frozen': rates by parts of names; the first that matches, others 1x"
    )
    accum: int = key(1, "microbatches that a batch is cut into: activations take 1/accum of the memory")
    accum_mode: str = key("scan", "scan: in one compiled step; multisteps: optax.MultiSteps; manual: two functions")
    grad_metrics: bool = key(False, "at logged steps: norms of single examples' gradients, and the gradient's noise")
    zero: int = key(0, "split over dp: 0 nothing, 1 the optimizer's state and the gradients, 3 the parameters as well")
    ema: float = key(0.0, "decay of an average of the weights that eval and sample can use; 0 means none")
    ema_names: str = key(
        "*", "the parameters that it averages: 'embed', 'layers/up', '*_bias' match whole parts of their names"
    )
    lora_rank: int = key(0, "train adapters of this rank alone, beside frozen weights; 0 means train the weights")
    lora_targets: str = key("q,v", "which of q, k, v, o, up, down have adapters")
    lora_alpha: float = key(16.0, "adapters count alpha / rank times")
    base: str = key("", "the run whose best weights this one starts from; '' means from the seed")
    beta1: float = key(0.9, "decay of adam's first moment")
    beta2: float = key(0.99, "decay of adam's second moment")
    weight_decay: float = key(0.1, "on matrices only; never on norms, biases, positions")
    clip: float = key(1.0, "of the true global gradient norm; 0 means never")

    # The run folder.
    out: str = key("", "'' means checkpoints/PRESET")
    log_every: int = key(10, "steps")
    eval_every: int = key(250, "steps")
    eval_batches: int = key(0, "of validation at each interval; 0 means all of it")
    save_every: int = key(500, "steps; 0 means by the clock alone, and as always at the end and when it is stopped")
    save_minutes: float = key(0.0, "and when so long has gone by since the last; 0 means never")
    keep: int = key(2, "newest checkpoints kept, besides the best by validation")
    keep_every: int = key(0, "steps: saves at every multiple, and keeps those for good; 0 means none")
    on_save_error: str = key("stop", "stop or continue: what a full disk does to training")

    # Several processes that train as one, where no environment names them; never written to config.json.
    coordinator: str = key("", "host:port of process 0")
    processes: int = key(0, "how many")
    process_id: int = key(0, "which of them this is")
    heartbeat: int = key(60, "seconds without a sign of life after which a process is dead, and the others end")

    def __post_init__(self):
        checks.check(self)

    @property
    def dp(self) -> int:
        return self.mesh_shape[0]

    @property
    def mp(self) -> int:
        return self.mesh_shape[1]

    @property
    def mesh_shape(self) -> tuple[int, int]:
        if self.mesh == "auto":
            raise ValueError("mesh=auto has no shape yet; call mesh.resolve(config) first")
        return parsing.mesh(self.mesh)

    @property
    def head_size(self) -> int:
        return self.d_model // self.heads

    @property
    def ff_size(self) -> int:
        return self.d_ff or 4 * self.d_model

    @property
    def rotary_size(self) -> int:
        return self.rotary_dims or self.head_size

    @property
    def lora_names(self) -> tuple[str, ...]:
        return tuple(self.lora_targets.split(","))

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    def replace(self, **changes) -> "Config":
        return dataclasses.replace(self, **changes)

    def changes_of(self, before: "Config") -> str:
        """What is computed in another way than before: 'lr 0.003 -> 0.0001, mesh 4x2 -> 2x4'."""
        names = [name for name in FIELDS if name not in (*OF_ONE_START, "out")]
        values = [(name, getattr(before, name), getattr(self, name)) for name in names]
        return ", ".join(f"{name} {old} -> {new}" for name, old, new in values if old != new)

    def to_json(self) -> str:
        lasting = {name: value for name, value in dataclasses.asdict(self).items() if name not in OF_ONE_START}
        return json.dumps(lasting, indent=2) + "\n"


FIELDS = {field.name: field for field in dataclasses.fields(Config)}
# A checkpoint's arrays, its batches and its place in the schedule mean something only under these.
ARCHITECTURE = tuple(FIELDS)[: tuple(FIELDS).index("mesh")]
OF_ONE_START = ("coordinator", "processes", "process_id", "heartbeat")
# What else says how a state looks.
LEARNED = ("optimizer", "lr_rules", "accum_mode", "base", "ema", "ema_names", "lora_rank", "lora_targets", "lora_alpha")
FIXED_ON_RESUME = (*ARCHITECTURE, *LEARNED, "batch", "seed")  # data may move: a run knows its text by its fingerprint


def read(folder: Path) -> Config:
    """The config.json that lies in every run and checkpoint folder."""
    path = Path(folder) / "config.json"
    try:
        return Config(**json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{folder} is not a run: it has no config.json") from None
    except (ValueError, TypeError, RecursionError, UsageError) as error:
        raise RunError(f"{path} is damaged ({error}); every step_ folder of a run holds a copy") from None


def resumed(config: Config, overrides: dict) -> Config:
    """A run's own config with what `--resume RUN key=value` may change."""
    for name in FIXED_ON_RESUME:
        if name in overrides and overrides[name] != getattr(config, name):
            raise UsageError(
                f"{name} cannot change on resume: the run has {getattr(config, name)!r}, got {overrides[name]!r}; "
                "start a new run with another out="
            )
    return config.replace(**overrides)
