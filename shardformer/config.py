"""What a run is: one frozen dataclass, presets as functions, `key=value`, and every check.

Nothing here imports JAX, so a wrong command is refused before any device is touched.
"""

import dataclasses
import json
import math
from pathlib import Path

from shardformer import parsing
from shardformer.errors import RunError, UsageError

CHOICES = {
    "block": ("parallel", "sequential"),
    "norm": ("layernorm", "rmsnorm"),
    "positions": ("learned", "rotary", "t5", "none"),
    "embed_split": ("vocab", "width"),
    "bias": ("none", "ff", "all"),
    "dtype": ("float32", "bfloat16"),
    "optimizer": ("adamw", "lbfgs", "muon"),
    "accum_mode": ("scan", "multisteps", "manual"),
    "zero": (0, 1, 3),
    "on_save_error": ("stop", "continue"),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """One run. Sizes are global: what the whole mesh sees, whatever its shape."""

    # The model. On resume none of these may change (see ARCHITECTURE).
    layers: int = 4
    d_model: int = 128
    heads: int = 4
    d_ff: int = 0  # feed-forward width; 0 means 4 * d_model
    seq: int = 64  # tokens of context
    vocab: int = 0  # predictable tokens; 0 means as many as the data has
    vocab_multiple: int = 8  # the table is padded to this, never to mp: that would tie the model to the mesh
    block: str = "parallel"  # parallel: GPT-J, one all-reduce a layer; sequential: GPT-2, two
    norm: str = "layernorm"
    bias: str = "ff"  # none; ff: feed-forward, norms and head, as GPT-J; all: attention projections as well
    positions: str = "rotary"
    rotary_dims: int = 0  # leading dimensions of a head that rotate; 0 means all of them
    t5_buckets: int = 32  # distance buckets of the T5 relative bias
    embed_bias: bool = False  # beside the token table, as GPT-J has one
    tied: bool = False  # the head reads the embedding's table
    init_std: float = 0.02  # of every weight; 0 means 1 / sqrt(fan in)

    # How it is computed: the numbers agree to rounding, whatever is chosen.
    mesh: str = "auto"  # AxB is dp x mp; auto puts every device on dp as far as the batch allows
    embed_split: str = "vocab"  # vocab: masked lookup and psum; width: lookup and all_gather
    dtype: str = "float32"  # of the matrix products; parameters, softmax, norms and loss stay float32
    scan: bool = True  # layers in one lax.scan (compiles in constant time) or unrolled (runs faster)
    remat: bool = False  # recompute each layer in the backward pass instead of keeping its activations

    # The training.
    data: str = "auto"  # auto, tiny_shakespeare, builtin, or the path of a UTF-8 text file
    batch: int = 12  # sequences per step, over the whole mesh
    steps: int = 2000
    seed: int = 0  # of the parameters, the batches and the dropout masks
    dropout: float = 0.0  # on the embedding, the attention weights and each residual branch
    z_loss: float = 0.0  # times the squared log-partition per token; GPT-J used 1e-4
    optimizer: str = "adamw"  # muon: for the layers' matrices; lbfgs: its line search finds the rate, lr plays no part
    lr: float = 1e-3
    lr_min: float = 1e-4  # where the cosine ends; never above lr
    warmup: int = 100  # steps of linear warm-up
    decay_steps: int = 0  # where the cosine reaches lr_min; 0 means at the last step
    lr_rules: str = ""  # "bias=10x,*/embed/*=0.1x,norm=frozen": rates by name; the first that matches, others 1x
    accum: int = 1  # microbatches that a batch is cut into: activations take 1/accum of the memory
    accum_mode: str = "scan"  # scan: in one compiled step; multisteps: optax.MultiSteps; manual: two functions
    grad_metrics: bool = False  # at logged steps: norms of single examples' gradients, and the gradient's noise
    zero: int = 0  # split over dp: 0 nothing, 1 the optimizer's state and the gradients, 3 the parameters as well
    ema: float = 0.0  # decay of an average of the weights that eval and sample can use; 0 means none
    ema_names: str = "*"  # the parameters that it averages, as a pattern of their names
    lora_rank: int = 0  # train adapters of this rank alone, beside frozen weights; 0 means train the weights
    lora_targets: str = "q,v"  # which of q, k, v, o, up, down have adapters
    lora_alpha: float = 16.0  # adapters count alpha / rank times
    base: str = ""  # the run whose best weights this one starts from; "" means from the seed
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.1  # on matrices only; never on norms, biases, positions
    clip: float = 1.0  # of the true global gradient norm; 0 means never

    # The run folder.
    out: str = ""  # "" means checkpoints/PRESET
    log_every: int = 10  # steps
    eval_every: int = 250  # steps
    eval_batches: int = 0  # of validation at each interval; 0 means all of it
    save_every: int = 500  # steps; 0 means by the clock alone, and as always at the end and when it is stopped
    save_minutes: float = 0.0  # and when so long has gone by since the last; 0 means never
    keep: int = 2  # newest checkpoints kept, besides the best by validation
    keep_every: int = 0  # steps: saves at every multiple, and keeps those for good; 0 means none
    on_save_error: str = "stop"  # stop or continue: what a full disk does to training

    # Several processes that train as one, where no environment names them; never written to config.json.
    coordinator: str = ""  # host:port of process 0
    processes: int = 0  # how many
    process_id: int = 0  # which of them this is
    heartbeat: int = 60  # seconds without a sign of life after which a process is dead, and the others end

    def __post_init__(self):
        _check(self)

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
MATRICES = ("q", "k", "v", "o", "up", "down")  # of a layer
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
    for key in FIXED_ON_RESUME:
        if key in overrides and overrides[key] != getattr(config, key):
            raise UsageError(
                f"{key} cannot change on resume: the run has {getattr(config, key)!r}, got {overrides[key]!r}; "
                "start a new run with another out="
            )
    return config.replace(**overrides)


def _check(c: Config) -> None:
    """Every rule, each with its fix. Those about the mesh or the data wait until they are known."""
    _check_values(c)
    _check_model(c)
    _check_training(c)
    _check_optimizer(c)
    _check_processes(c)
    if c.mesh != "auto":
        _check_mesh(c)


def need(holds: bool, message: str) -> None:
    if not holds:
        raise UsageError(message)


def _check_values(c: Config) -> None:
    """Each by itself."""
    for name, field in FIELDS.items():
        value = getattr(c, name)
        fits = isinstance(value, field.type) and not (field.type is int and isinstance(value, bool))
        fits = fits or (field.type is float and isinstance(value, int) and not isinstance(value, bool))
        need(fits, f"{name} takes {field.type.__name__}, got {value!r}")
        if field.type is int:
            need(abs(value) < 2**31, f"{name} must be below 2**31, got {value}")
        if field.type is float:
            need(math.isfinite(value), f"{name} must be a finite number, got {value}")
    for name, choices in CHOICES.items():
        value = getattr(c, name)
        closest = parsing.closest(str(value), map(str, choices))
        need(value in choices, f"{name} is one of {', '.join(map(str, choices))}; got {value!r}{closest}")
    for name in ("layers", "d_model", "heads", "seq", "vocab_multiple", "t5_buckets", "batch", "steps",
                 "accum", "log_every", "eval_every", "keep", "heartbeat"):  # fmt: skip
        need(getattr(c, name) >= 1, f"{name} must be at least 1, got {getattr(c, name)}")
    for name in ("d_ff", "vocab", "rotary_dims", "init_std", "seed", "z_loss", "lr", "lr_min", "warmup",
                 "decay_steps", "weight_decay", "clip", "lora_rank", "lora_alpha", "eval_batches", "save_every",
                 "save_minutes", "keep_every", "processes", "process_id"):  # fmt: skip
        need(getattr(c, name) >= 0, f"{name} must not be negative, got {getattr(c, name)}")
    need(0 <= c.dropout < 1, f"dropout is a probability below 1, got {c.dropout}")
    # An average in float32 stops following what it averages before its decay is 1.
    for name, most in {"beta1": 0.999999, "beta2": 0.999999, "ema": 0.9999}.items():
        value = getattr(c, name)
        need(0 <= value < 1, f"{name} is the decay of an average, in [0, 1), got {value}")
        need(value <= most, f"{name}={value} is too close to 1 for float32; give at most {most}")


def _check_model(c: Config) -> None:
    need(c.d_model % c.heads == 0,
         f"d_model={c.d_model} does not divide into heads={c.heads}; "
         f"try heads={_divisor(c.d_model, c.heads)}")  # fmt: skip
    if c.positions == "rotary":
        even = min(c.rotary_size, c.head_size) // 2 * 2
        need(c.rotary_size == even > 0,
             f"rotary_dims={c.rotary_size} must be even and at most the head size d_model / heads = {c.head_size}; "
             f"try {f'rotary_dims={even}' if even else 'positions=learned'}")  # fmt: skip
    buckets = min(c.t5_buckets + c.t5_buckets % 2, 254)
    need(c.t5_buckets == buckets, f"t5_buckets must be even and below 256 (half of them count distances one by one, up "
         f"to 128), got {c.t5_buckets}; try t5_buckets={buckets}")  # fmt: skip
    need(not (c.tied and c.embed_split == "width"),
         "tied=true needs embed_split=vocab: with the width split, the head would all-reduce whole logits")  # fmt: skip


def _check_training(c: Config) -> None:
    if c.grad_metrics:
        need(c.zero < 3, "grad_metrics=true needs zero below 3: with zero=3 the backward pass itself sums over dp, and "
             "no example has a gradient of its own")  # fmt: skip
        need(c.batch > 1, f"grad_metrics=true compares examples and needs 2 or more in a batch, got batch={c.batch}")
    need(c.batch % c.accum == 0, f"batch={c.batch} does not divide into accum={c.accum} microbatches; "
         f"try batch={-(-c.batch // c.accum) * c.accum}, or another accum")  # fmt: skip
    if c.lora_rank:
        need(c.lora_alpha > 0, "lora_alpha=0 would count adapters not at all; give lora_alpha=16, say")
        unknown = [name for name in c.lora_names if name not in MATRICES]
        need(not unknown and len(set(c.lora_names)) == len(c.lora_names),
             f"lora_targets takes some of {','.join(MATRICES)}, each once; got {c.lora_targets!r}")  # fmt: skip


def _check_optimizer(c: Config) -> None:
    rules = parsing.lr_rules(c.lr_rules)
    if c.optimizer == "lbfgs":
        off = {"clip": 0, "weight_decay": 0, "accum": 1}
        need(all(getattr(c, name) == value for name, value in off.items()),
             "optimizer=lbfgs follows the loss of the whole batch, which knows no clip, no decay and no microbatches: "
             "give clip=0 weight_decay=0 accum=1; got "
             + " ".join(f"{name}={getattr(c, name)}" for name in off))  # fmt: skip
        rates = [str(rule) for rule in rules if rule.factor]
        need(not rates, "lr_rules with optimizer=lbfgs can only freeze, as one line search finds one rate for all; got "
             + ",".join(rates))  # fmt: skip
    need(not (c.optimizer == "muon" and c.lora_rank),
         "optimizer=muon works on whole matrices, of which lora_rank trains none; give optimizer=adamw")  # fmt: skip


def _check_processes(c: Config) -> None:
    if c.coordinator or c.processes or c.process_id:
        host, _, port = c.coordinator.rpartition(":")
        need(host and port.isdecimal() and c.process_id < c.processes,
             "several processes take coordinator=HOST:PORT of process 0, processes=N and process_id=0 to N-1; got "
             f"coordinator={c.coordinator!r}, processes={c.processes}, process_id={c.process_id}")  # fmt: skip


def _check_mesh(c: Config) -> None:
    dp, mp = parsing.mesh(c.mesh)
    cut, into = (dp, f"dp={dp} (mesh={c.mesh})") if c.accum == 1 else (
        dp * c.accum, f"dp * accum = {dp * c.accum} (mesh={c.mesh}, accum={c.accum})")  # fmt: skip
    need(c.batch % cut == 0,
         f"batch={c.batch} does not divide over {into}; "
         f"try batch={-(-c.batch // cut) * cut}, or another mesh")  # fmt: skip
    sizes = {"heads": c.heads, "feed-forward width": c.ff_size}
    if c.positions == "learned" or c.embed_split == "width":
        sizes["d_model"] = c.d_model
    padded = c.padded_vocab or c.vocab_multiple
    fitting = _divisor(math.gcd(padded, *sizes.values()), mp)
    for name, size in sizes.items():
        need(size % mp == 0, f"{name}={size} does not divide over mp={mp} (mesh={c.mesh}); "
             f"try mesh={dp}x{fitting}")  # fmt: skip
    need(padded % mp == 0, f"the vocabulary padded to vocab_multiple={c.vocab_multiple} does not divide over mp={mp}; "
         f"set vocab_multiple={mp} (it is part of the model, so on every mesh)")  # fmt: skip


def _divisor(size: int, at_most: int) -> int:
    """The largest divisor of `size` that is not above `at_most`."""
    return next(n for n in range(min(size, at_most), 0, -1) if size % n == 0)
