"""Every rule that a configuration must obey, each with its fix in the message. Nothing here imports JAX."""

import dataclasses
import math
import os
import stat
import sys

from shardformer.config import parsing
from shardformer.config.names import MATRICES
from shardformer.errors import UsageError

FLOAT32 = 3.4e38
CHOICES = {
    "activation": ("gelu", "gelu_exact", "relu", "silu", "swiglu"),
    "block": ("parallel", "parallel_two_norms", "sequential"),
    "norm": ("layernorm", "rmsnorm"),
    "positions": ("learned", "rotary", "t5", "none"),
    "embed_split": ("vocab", "width"),
    "bias": ("none", "ff", "all_but_qkv", "all"),
    "dtype": ("float32", "bfloat16"),
    "attention": ("auto", "plain", "blocks", "fused"),
    "remat": ("none", "attention", "dots", "full"),
    "windows": ("epoch", "random", "file"),
    "optimizer": ("adamw", "lbfgs", "muon"),
    "param_dtype": ("float32", "bfloat16"),
    "moment_dtype": ("float32", "bfloat16"),
    "accum_mode": ("scan", "multisteps", "manual"),
    "zero": (0, 1, 3),
    "on_save_error": ("stop", "continue"),
}


def check(c) -> None:
    """Refuses a configuration that breaks a rule; rules about the mesh wait until mesh=auto is resolved."""
    _check_values(c)
    _check_data(c)
    _check_model(c)
    _check_training(c)
    _check_optimizer(c)
    _check_processes(c)
    traced = parsing.parse_steps_range("profile", c.profile)
    need(not traced or traced[0] <= c.steps, f"profile={c.profile} begins after the last step, steps={c.steps}")
    need(not c.tracker or all(c.tracker.partition(":")),
         f"tracker takes module:function, got {parsing.shorten(c.tracker)}")  # fmt: skip
    if c.mesh != "auto":
        _check_mesh(c)


def need(holds: bool, message: str) -> None:
    if not holds:
        raise UsageError(message)


def _check_values(c) -> None:
    """The type and the range of each key by itself."""
    for field in dataclasses.fields(c):
        name, value = field.name, getattr(c, field.name)
        fits = isinstance(value, field.type) and not (field.type is int and isinstance(value, bool))
        fits = fits or (field.type is float and isinstance(value, int) and not isinstance(value, bool))
        need(fits, f"{name} takes {field.type.__name__}, got {parsing.shorten(value)}")
        if field.type is int:
            need(abs(value) < 2**31, f"{name} must be below 2**31, got {parsing.shorten(value)}")
        if field.type is float:
            need(abs(value) <= sys.float_info.max, f"{name} must be a finite number, got {parsing.shorten(value)}")
            need(abs(value) < FLOAT32, f"{name} must be below {FLOAT32:g}, the largest of float32, got {value!r}")
            small = isinstance(value, float) or abs(value) < 2**31  # JAX takes no larger whole number
            need(small, f"{name} must be below 2**31, or written as 1e10, got {parsing.shorten(value)}")
        if field.type is str:
            need(
                _is_possible_path(value), f"{name} has a character that no path may have, got {parsing.shorten(value)}"
            )
    need(not _is_special_file(c.data), f"data={c.data} is a device or a pipe, which cannot be read again on resume; "
         "write the text into a file and give its path")  # fmt: skip
    for name, choices in CHOICES.items():
        value = getattr(c, name)
        closest = parsing.suggest_closest(str(value), map(str, choices))
        need(value in choices,
             f"{name} is one of {', '.join(map(str, choices))}; got {parsing.shorten(value)}{closest}")  # fmt: skip
    for name in ("layers", "d_model", "heads", "seq", "vocab_multiple", "t5_buckets", "pipeline_rounds",
                 "batch", "steps", "log_every", "eval_every", "keep", "start_timeout", "heartbeat"):  # fmt: skip
        need(getattr(c, name) >= 1, f"{name} must be at least 1, got {getattr(c, name)}")
    for name in ("kv_heads", "d_ff", "vocab", "attention_scale", "rotary_dims", "init_std", "seed", "z_loss", "lr",
                 "lr_min", "warmup", "decay_steps", "weight_decay", "clip", "accum", "lora_rank", "lora_alpha",
                 "loss_chunk", "eval_batches", "save_every", "save_minutes", "keep_every", "processes",
                 "process_id"):  # fmt: skip
        need(getattr(c, name) >= 0, f"{name} must not be negative, got {getattr(c, name)}")
    need(0 <= c.dropout < 1, f"dropout is a probability below 1, got {c.dropout}")
    # An average in float32 stops following what it averages before its decay is 1.
    for name, most in {"beta1": 0.999999, "beta2": 0.999999, "ema": 0.9999}.items():
        value = getattr(c, name)
        need(0 <= value < 1, f"{name} is the decay of an average, in [0, 1), got {value}")
        need(value <= most, f"{name}={value} is too close to 1 for float32; give at most {most}")


def check_tokenizer(tokenizer: str) -> None:
    need(tokenizer, "tokenizer is empty; give chars, bytes, bpe:N, ids, auto or the path of a tokenizer.json")
    size = tokenizer.removeprefix("bpe:") if tokenizer.startswith("bpe:") else "257"
    need(size.isdecimal() and len(size) < 8 and 257 <= int(size) <= 1 << 20,
         f"tokenizer=bpe:N takes N from 257 (all bytes and one more) to {1 << 20}, got "
         f"{parsing.shorten(tokenizer)}")  # fmt: skip


def _check_data(c) -> None:
    check_tokenizer(c.tokenizer)
    need(not (c.windows == "file" and not c.pack), "windows=file reads rows as they are stored; give pack=true")


def _check_model(c) -> None:
    need(c.d_model % c.heads == 0,
         f"d_model={c.d_model} does not divide into heads={c.heads}; "
         f"try heads={_divisor(c.d_model, c.heads)}")  # fmt: skip
    need(c.heads % c.key_value_heads == 0, f"heads={c.heads} does not divide over kv_heads={c.kv_heads}; "
         f"try kv_heads={_divisor(c.heads, c.key_value_heads)}")  # fmt: skip
    need(c.padded_vocab < 2**31, f"vocab={c.vocab} padded to vocab_multiple={c.vocab_multiple} must be below 2**31")
    need(c.norm_eps > 0, f"norm_eps must be above 0, got {c.norm_eps}")
    need(c.rotary_theta > 1, f"rotary_theta must be above 1, got {c.rotary_theta}")
    parsing.parse_rotary_scaling(c.rotary_scaling)
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


def _check_training(c) -> None:
    if c.grad_metrics:
        need(c.zero < 3, "grad_metrics=true needs zero below 3: with zero=3 the backward pass itself sums over dp, and "
             "no example has a gradient of its own")  # fmt: skip
        need(c.batch > 1, f"grad_metrics=true compares examples and needs 2 or more in a batch, got batch={c.batch}")
    accum = max(c.accum, 1)  # 0 is auto, until the devices are known
    need(c.batch % accum == 0, f"batch={c.batch} does not divide into accum={c.accum} microbatches; "
         f"try batch={-(-c.batch // accum) * accum}, or another accum")  # fmt: skip
    if c.lora_rank:
        need(c.lora_alpha > 0, "lora_alpha=0 would switch the adapters off; try lora_alpha=16")
        matrices = [name for name in MATRICES if name != "gate" or c.activation == "swiglu"]
        unknown = [name for name in c.lora_names if name not in matrices]
        need(not unknown and len(set(c.lora_names)) == len(c.lora_names),
             f"lora_targets takes some of {','.join(matrices)}, each once; got {c.lora_targets!r}")  # fmt: skip

    lacking = f"dropout={c.dropout}" if c.dropout else "positions=t5" if c.positions == "t5" else ""
    need(not (c.attention == "fused" and lacking),
         f"attention=fused has no kernel with {lacking}; give attention=auto")  # fmt: skip


def _check_optimizer(c) -> None:
    rules = parsing.parse_lr_rules(c.lr_rules)
    if c.optimizer == "lbfgs":
        off = {"clip": 0, "weight_decay": 0, "accum": 1}
        need(all(getattr(c, name) == value for name, value in off.items()),
             "optimizer=lbfgs searches along the loss of the whole batch, without clipping, decay or microbatches: "
             "give clip=0 weight_decay=0 accum=1; got "
             + " ".join(f"{name}={getattr(c, name)}" for name in off))  # fmt: skip
        rates = [str(rule) for rule in rules if rule.factor]
        need(not rates, "lr_rules with optimizer=lbfgs can only freeze, as one line search finds one rate for all; got "
             + ",".join(rates))  # fmt: skip
        need(c.moment_dtype == "float32", "optimizer=lbfgs keeps differences of gradients, which need all digits: "
             f"give moment_dtype=float32; got moment_dtype={c.moment_dtype}")  # fmt: skip
    need(c.param_dtype == "float32" or c.dtype == "bfloat16", "param_dtype=bfloat16 stores matrices in the type that "
         f"they multiply in: give dtype=bfloat16; got dtype={c.dtype}")  # fmt: skip
    need(not (c.optimizer == "muon" and c.lora_rank),
         "optimizer=muon updates whole matrices, but lora_rank trains adapters; give optimizer=adamw")  # fmt: skip


def _check_processes(c) -> None:
    if c.coordinator or c.processes or c.process_id:
        need(is_address(c.coordinator) and c.process_id < c.processes,
             "several processes take coordinator=HOST:PORT of process 0 (port 1 to 65535), processes=N and "
             f"process_id=0 to N-1; got coordinator={parsing.shorten(c.coordinator)}, processes={c.processes}, "
             f"process_id={c.process_id}")  # fmt: skip


def is_address(text: str) -> bool:
    """HOST:PORT with a port that exists."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536


def _is_possible_path(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _is_special_file(path: str) -> bool:
    """A device, a pipe or a socket: /dev/stdin, /dev/zero."""
    try:
        mode = os.stat(os.path.expanduser(path)).st_mode
    except OSError:
        return False  # a path that does not exist is refused where it is read
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _check_mesh(c) -> None:
    dp, mp, pp = parsing.parse_mesh(c.mesh)
    if pp > 1:
        _check_stages(c, dp, mp, pp)
    cut, into = (dp, f"dp={dp} (mesh={c.mesh})") if c.accum <= 1 else (
        dp * c.accum, f"dp * accum = {dp * c.accum} (mesh={c.mesh}, accum={c.accum})")  # fmt: skip
    need(c.batch % cut == 0,
         f"batch={c.batch} does not divide over {into}; "
         f"try batch={-(-c.batch // cut) * cut}, or another mesh")  # fmt: skip
    sizes = {"heads": c.heads, "kv_heads": c.key_value_heads, "feed-forward width": c.ff_size}
    if c.positions == "learned" or c.embed_split == "width":
        sizes["d_model"] = c.d_model
    padded = c.padded_vocab or c.vocab_multiple
    fitting = _divisor(math.gcd(padded, *sizes.values()), mp)
    for name, size in sizes.items():
        need(size % mp == 0, f"{name}={size} does not divide over mp={mp} (mesh={c.mesh}); "
             f"try mesh={dp}x{fitting}{f'x{pp}' if pp > 1 else ''}")  # fmt: skip
    need(not c.sequence_parallel or c.seq % mp == 0,
         f"sequence_parallel=true splits seq={c.seq} over mp={mp} (mesh={c.mesh}), which does not divide it; "
         f"try seq={-(-c.seq // mp) * mp} or sequence_parallel=false")  # fmt: skip
    need(padded % mp == 0, f"the vocabulary padded to vocab_multiple={c.vocab_multiple} does not divide over mp={mp}; "
         f"set vocab_multiple={mp} (it is part of the model, so on every mesh)")  # fmt: skip


def _check_stages(c, dp, mp, pp) -> None:
    need(c.layers % pp == 0, f"layers={c.layers} do not divide over pp={pp} stages (mesh={c.mesh}); "
         f"try mesh={dp}x{mp}x{_divisor(c.layers, pp)}")  # fmt: skip
    rounds = _divisor(c.layers // pp, c.pipeline_rounds)
    need(rounds == c.pipeline_rounds, f"layers={c.layers} do not divide over pp={pp} stages (mesh={c.mesh}) in "
         f"pipeline_rounds={c.pipeline_rounds}; try pipeline_rounds={rounds}")  # fmt: skip
    need(c.optimizer != "lbfgs" and not c.grad_metrics and c.accum_mode == "scan",
         f"pipeline stages (mesh={c.mesh}) find the mean gradient of all microbatches in one program: give "
         f"accum_mode=scan, grad_metrics=false and an optimizer other than lbfgs, or mesh={dp * pp}x{mp}")  # fmt: skip
    need(c.accum % pp == 0,  # 0 is auto, until the devices are known
         f"accum={c.accum} microbatches do not divide over pp={pp} stages (mesh={c.mesh}); "
         f"try accum={-(-c.accum // pp) * pp}, or more of them for a smaller bubble")  # fmt: skip


def check_zero(c) -> None:
    """For training alone: what was trained with zero may be evaluated on one device."""
    need(c.mesh == "auto" or not c.zero or c.dp > 1, f"zero={c.zero} splits over dp, and mesh={c.mesh} has dp=1; "
         "give zero=0, or a mesh with more dp")  # fmt: skip


def _divisor(size: int, at_most: int) -> int:
    """The largest divisor of `size` that is not above `at_most`."""
    return next(n for n in range(min(size, at_most), 0, -1) if size % n == 0)
