"""The configuration of a run: one frozen dataclass whose keys say what they mean.

Nothing here imports JAX, so a wrong command is refused before any device is touched.
"""

import dataclasses
import json
import math

from shardformer.config import parsing, validation
from shardformer.config.parsing import key
from shardformer.errors import RunError, UsageError

# Earlier versions had remat=true and remat=false.
OLD_REMAT = {True: "full", "true": "full", False: "none", "false": "none"}


@dataclasses.dataclass(frozen=True)
class Config:
    """One run. Sizes are global: what the whole mesh sees, whatever its shape."""

    # The model. On resume none of these may change (see ARCHITECTURE).
    layers: int = key(4, "number of transformer layers")
    d_model: int = key(128, "width of the residual stream")
    heads: int = key(4, "attention heads per layer")
    kv_heads: int = key(
        0, "heads of keys and values, each shared by heads / kv_heads queries; 0 means as many as heads"
    )
    d_ff: int = key(0, "width of the feed-forward layer; 0 means 4 * d_model")
    activation: str = key(
        "gelu", "of the feed-forward: gelu (tanh form), gelu_exact (erf), relu, silu or swiglu (gated)"
    )
    seq: int = key(64, "context length, in tokens")
    vocab: int = key(0, "number of tokens the model predicts; 0 means as many as the data has")
    vocab_multiple: int = key(8, "the token table is padded to a multiple of this; mp must divide it")
    block: str = key(
        "parallel",
        "parallel (GPT-J, one all-reduce per layer), parallel_two_norms (GPT-NeoX) or sequential (GPT-2, two)",
    )
    norm: str = key("layernorm", "layernorm or rmsnorm")
    norm_eps: float = key(1e-5, "added to the variance in every norm")
    bias: str = key(
        "ff", "what has a bias: none, ff (feed-forward, norms and head, as GPT-J), all_but_qkv (GPT-Neo) or all"
    )
    head_bias: bool = key(True, "an untied output head has a bias, unless bias=none")
    positions: str = key("rotary", "learned, rotary, t5 (relative bias) or none")
    rotary_dims: int = key(0, "dimensions of each head that rotate; 0 means all of them")
    rotary_theta: float = key(10_000.0, "base of the rotary frequencies")
    rotary_scaling: str = key("", "longer contexts: linear:FACTOR or llama3:FACTOR,LOW,HIGH,OLD_SEQ; empty means none")
    attention_scale: float = key(0.0, "factor on the attention logits; 0 means 1 / sqrt(head size)")
    t5_buckets: int = key(32, "distance buckets of the T5 relative bias")
    embed_bias: bool = key(False, "add a bias after the token embedding, as GPT-J does")
    tied: bool = key(False, "share one table between the embedding and the output head")
    init_std: float = key(0.02, "standard deviation of initial weights; 0 means 1 / sqrt(fan in)")

    # How it is computed: results agree to rounding, whatever is chosen.
    mesh: str = key(
        "auto",
        "devices as DPxMP (data parallel x model parallel), or DPxMPxPP with pipeline stages, through which the accum "
        "microbatches flow; auto: least mp that fits in memory",
    )
    pipeline_rounds: int = key(
        1, "times that a microbatch passes each pipeline stage; more make the bubble smaller, and send more"
    )
    embed_split: str = key("vocab", "split of the token table over mp: vocab (psum after lookup) or width (all_gather)")
    dtype: str = key(
        "float32",
        "number type of activations and matrix products, float32 or bfloat16; parameters (but for param_dtype), "
        "softmax, norms, losses and sums of gradients stay float32",
    )
    sequence_parallel: bool = key(
        False, "split activations between the blocks over mp by tokens: less memory, for some more on the wire"
    )
    attention: str = key(
        "auto",
        "plain: all pairs of tokens at once; blocks: linear memory; fused: the kernel of a TPU or GPU; "
        "auto: fused where there is one, else blocks from 1,024 tokens",
    )
    loss_chunk: int = key(0, "tokens whose logits a device has at once; 0: all, or as many as fit in 64 MiB")
    scan: bool = key(True, "run the layers in one lax.scan (compiles fast); false unrolls them (may run faster)")
    remat: str = key(
        "none", "what the backward pass recomputes: none, attention (its weights), dots (all but products) or full"
    )

    # The data.
    data: str = key("auto", "auto, tiny_shakespeare, builtin, tfds:NAME, text files, token files, or 'a=3,b=1' of them")
    tokenizer: str = key(
        "auto", "chars, bytes, bpe:N (trained on the data), a tokenizer.json, or ids; auto: by the data"
    )
    validation: str = key(
        "", "another source for validation, or a share of the data; empty means 0.05, and 2 MB at most"
    )
    windows: str = key(
        "epoch", "order of the rows: epoch (each once, shuffled), random (nanoGPT's) or file (as stored)"
    )
    pack: bool = key(True, "fill rows across documents; false gives each document rows of its own, padded")
    mask_documents: bool = key(False, "attention and positions stop where a document ends")
    mask_prompt: bool = key(False, "no loss on prompts, of .jsonl records with prompt and completion")
    text: str = key("text", "name of the field that holds the text of .jsonl records")
    special_tokens: bool = key(
        False, "recognise a tokenizer.json's special tokens in texts; false reads them as plain text"
    )

    # The training.
    batch: int = key(12, "sequences per step, over the whole mesh")
    steps: int = key(2000, "optimizer steps of the whole run")
    seed: int = key(0, "seed of the initial parameters, the order of the batches and the dropout masks")
    dropout: float = key(0.0, "dropout probability on the embedding, attention weights and residual branches")
    z_loss: float = key(0.0, "weight of the squared log-partition added to the loss per token; GPT-J used 1e-4")
    optimizer: str = key("adamw", "adamw, muon (for the layers' matrices) or lbfgs (line search; ignores lr)")
    lr: float = key(1e-3, "peak learning rate")
    lr_min: float = key(1e-4, "final learning rate of the cosine decay; never above lr")
    warmup: int = key(100, "steps of linear warm-up; at most one fewer than those of the decay")
    decay_steps: int = key(
        0, "steps after which the rate is lr_min; 0 means all of the run's: its last step is just above lr_min"
    )
    lr_rules: str = key("", "rates by whole parts of names: '*bias=10x,embed=0.1x,layers/up=frozen'; first match wins")
    accum: int = key(1, "microbatches per step; activations take 1/accum of the memory; auto: as few as fit")
    accum_mode: str = key("scan", "scan (one compiled step), multisteps (optax.MultiSteps) or manual (two functions)")
    grad_metrics: bool = key(False, "at logged steps, write gradient norms per example and the gradient noise scale")
    zero: int = key(
        0, "ZeRO: 0 none; 1 parameters, gradients and optimizer split over dp, gathered once a step; 3 layer by layer"
    )
    ema: float = key(0.0, "decay of an exponential average of the weights, for eval and sample; 0 means none")
    ema_names: str = key("*", "parameters that the average covers, by whole parts of names: 'embed', '*_bias'")
    param_dtype: str = key(
        "float32", "type in which the layers' matrices are stored; bfloat16 keeps float32 masters for the optimizer"
    )
    moment_dtype: str = key(
        "float32", "type of the optimizer's moments; bfloat16 takes half the memory, rounded at random"
    )
    lora_rank: int = key(0, "rank of LoRA adapters, trained while the weights are frozen; 0 means train the weights")
    lora_targets: str = key("q,v", "matrices that get adapters: any of q, k, v, o, up, gate (of swiglu), down")
    lora_alpha: float = key(16.0, "scale of the adapters: alpha / rank")
    base: str = key("", "run folder whose best weights this run starts from; empty means from the seed")
    beta1: float = key(0.9, "decay of Adam's first moment")
    beta2: float = key(0.99, "decay of Adam's second moment")
    weight_decay: float = key(0.1, "weight decay of matrices; norms, biases and positions have none")
    clip: float = key(1.0, "limit of the global gradient norm; 0 means no clipping")

    # The run folder.
    out: str = key("", "run folder, or gs://BUCKET/RUN, s3://BUCKET/RUN; empty means checkpoints/PRESET")
    log_every: int = key(10, "steps between logged metrics")
    eval_every: int = key(250, "steps between evaluations on the validation split")
    eval_batches: int = key(200, "batches of each such evaluation at most; 0 means the whole validation split")
    save_every: int = key(500, "steps between checkpoints; 0 means by time alone (a run always saves when it ends)")
    save_minutes: float = key(0.0, "minutes after which a checkpoint is due as well; 0 means never by time")
    keep: int = key(2, "newest checkpoints to keep, besides the best by validation loss")
    keep_every: int = key(0, "also save at multiples of this many steps and keep those forever; 0 means none")
    on_save_error: str = key("stop", "what a failed save, e.g. on a full disk, does to training: stop or continue")

    # What belongs to this start of the run; never written to config.json, because a tracker runs code.
    program_cache: str = key(
        "auto", "folder of compiled programs, for the next start; auto: in ~/.cache; none: no folder"
    )
    tracker: str = key("", "module:function called with the settings; gives an object with write(row) and close()")
    wandb: str = key("", "project of Weights & Biases that gets the metrics; needs the wandb package")
    profile: str = key("", "FROM:TO, the steps whose trace JAX's profiler writes into the run folder")

    # Several processes that train together, unless the environment names them; never written to config.json.
    coordinator: str = key("", "HOST:PORT of process 0")
    processes: int = key(0, "number of processes")
    process_id: int = key(0, "number of this process, from 0")
    start_timeout: int = key(300, "seconds that a process waits at the start for the others")
    heartbeat: int = key(60, "seconds of silence after which a process counts as dead and the others stop")

    def __post_init__(self):
        object.__setattr__(self, "remat", OLD_REMAT.get(self.remat, self.remat))
        validation.check(self)

    @property
    def dp(self) -> int:
        return self.mesh_shape[0]

    @property
    def mp(self) -> int:
        return self.mesh_shape[1]

    @property
    def pp(self) -> int:
        return 1 if self.mesh == "auto" else parsing.parse_mesh(self.mesh)[2]

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """(dp, mp), and pp where there are several stages."""
        if self.mesh == "auto":
            raise ValueError("mesh=auto has no shape yet; call mesh.resolve(config) first")
        return parsing.parse_mesh(self.mesh)[: 3 if self.pp > 1 else 2]

    @property
    def mesh_axes(self) -> str:
        """What the numbers of the mesh are."""
        return "dp x mp x pp" if self.pp > 1 else "dp x mp"

    @property
    def devices(self) -> int:
        return math.prod(self.mesh_shape)

    @property
    def stage_layers(self) -> int:
        """Layers that a pipeline stage computes in one round; all of them where there are no stages."""
        return self.layers // (self.pp * self.pipeline_rounds) if self.pp > 1 else self.layers

    @property
    def head_size(self) -> int:
        return self.d_model // self.heads

    @property
    def key_value_heads(self) -> int:
        return self.kv_heads or self.heads

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

    @property
    def architecture(self) -> "Config":
        """The model on one device and nothing else: what its parameters depend on, beside the seed."""
        names = (*ARCHITECTURE, "lora_rank", "lora_targets") if self.lora_rank else ARCHITECTURE
        return Config(**{name: getattr(self, name) for name in names}, mesh="1x1")

    def without_stages(self) -> "Config":
        """For sampling on the same devices: stages become more of dp, over which the parameters stay split."""
        if self.pp == 1:
            return self
        dp = self.dp * self.pp
        return self.replace(mesh=f"{dp}x{self.mp}", batch=dp, accum=1, zero=3)

    def without_gradients(self) -> "Config":
        """For evaluation, scores and samples, perhaps on other devices: without what only a backward pass needs."""
        zero = 0 if self.zero == 1 else self.zero  # gathered once, parameters are whole on every device anyway
        attention = "auto" if self.attention == "fused" else self.attention  # these devices may have no kernel
        return self.replace(grad_metrics=False, zero=zero, attention=attention)

    def describe_changes(self, before: "Config") -> str:
        """The keys that differ from an earlier config: 'lr 0.003 -> 0.0001, mesh 4x2 -> 2x4'."""
        names = [name for name in FIELDS if name not in (*LAUNCH_ONLY_KEYS, "out")]
        values = [(name, getattr(before, name), getattr(self, name)) for name in names]
        return ", ".join(f"{name} {old} -> {new}" for name, old, new in values if old != new)

    def to_json(self) -> str:
        lasting = {name: value for name, value in dataclasses.asdict(self).items() if name not in LAUNCH_ONLY_KEYS}
        return json.dumps(lasting, indent=2) + "\n"


FIELDS = {field.name: field for field in dataclasses.fields(Config)}
# Titles for `--help`, by the first key of each section above.
SECTIONS = {
    "layers": "The model (cannot change on resume)",
    "mesh": "How it is computed (results agree to rounding)",
    "data": "The data",
    "batch": "Training",
    "out": "The run folder",
    "program_cache": "This start of the run",
    "coordinator": "Several processes that train together",
}
# A checkpoint's arrays, its batches and its place in the schedule are valid only under these.
ARCHITECTURE = tuple(FIELDS)[: tuple(FIELDS).index("mesh")]
LAUNCH_ONLY_KEYS = tuple(FIELDS)[tuple(FIELDS).index("program_cache") :]
# These decide which arrays a training state holds.
STATE_LAYOUT = (
    "optimizer", "lr_rules", "accum_mode", "base", "ema", "ema_names", "param_dtype", "moment_dtype", "lora_rank",
    "lora_targets", "lora_alpha",
)  # fmt: skip
# These decide what a batch holds. `data` and `validation` may move: a run recognises its text by a fingerprint.
BATCHES = ("tokenizer", "windows", "pack", "mask_documents", "mask_prompt", "special_tokens", "batch", "seed")
FIXED_ON_RESUME = (*ARCHITECTURE, *STATE_LAYOUT, *BATCHES)


def is_hugging_face(text: str | bytes) -> bool:
    """Whether a config.json is Hugging Face's: a run's has no model_type."""
    try:
        theirs = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(theirs, dict) and "model_type" in theirs


def parse_config(text: str | bytes, path) -> Config:
    """The text of a config.json; `path` is for messages."""
    try:
        stored = {"windows": "random"} | json.loads(text)  # as before there was a choice
        config = Config(**{name: value for name, value in stored.items() if name not in LAUNCH_ONLY_KEYS})
        validation.need(config.vocab > 0, "vocab must be at least 1 in a run")
        return config
    except (ValueError, TypeError, RecursionError, UsageError) as error:
        raise RunError(f"{path} is damaged ({error}); every step_ folder of a run holds a copy") from None


def override_on_resume(config: Config, overrides: dict) -> Config:
    """A run's own config with the overrides of `--resume RUN key=value`; keys that are fixed on resume are refused."""
    for name in FIXED_ON_RESUME:
        if name in overrides and overrides[name] != getattr(config, name):
            raise UsageError(
                f"{name} cannot change on resume: the run has {getattr(config, name)!r}, got {overrides[name]!r}; "
                "start a new run with another out="
            )
    return config.replace(**overrides)
