"""Rules between keys of several groups, each with its fix in the message."""

import math
from typing import TYPE_CHECKING

from shardformer.config.keys import largest_divisor, next_multiple, require
from shardformer.config.names import MATRICES
from shardformer.config.parsing import MeshSizes, parse_mesh, parse_steps_range, shorten
from shardformer.errors import UsageError

if TYPE_CHECKING:
    from shardformer.config.config import Config


def check_rules(c: "Config") -> None:
    """Raises UsageError if the configuration breaks a rule; rules about the mesh wait until mesh=auto is resolved."""
    require(
        not (c.tied and c.embed_split == "width"),
        "tied=true needs embed_split=vocab: with the width split, the head would all-reduce full logits",
    )
    tokens = c.batch * c.seq
    require(
        tokens < 2**31,
        f"batch={c.batch} x seq={c.seq} is {tokens} tokens a step, which must be below 2**31; "
        f"try batch={max((2**31 - 1) // c.seq, 1)}",
    )
    _check_kernel(c)
    _check_gradients(c)
    _check_adapters(c)
    _check_lbfgs(c)
    _check_bad_steps(c)
    traced = parse_steps_range("profile", c.profile)
    require(not traced or traced[0] <= c.steps, f"profile={c.profile} begins after the last step, steps={c.steps}")
    if c.mesh != "auto":
        _check_mesh(c)


def check_given(c: "Config", given: dict[str, object]) -> None:
    """Raises UsageError if a key that a user gave has no effect in this configuration."""
    for name, value in given.items():
        field = c.__dataclass_fields__[name]
        needed, used_if = field.metadata["needs"], field.metadata["used_if"]
        if needed and not getattr(c, needed):
            raise UsageError(f"{name} does nothing without {needed}; give {needed} as well")
        if used_if and value != field.default and not used_if.holds(c):
            raise UsageError(f"{name} does nothing {used_if.otherwise}; got {name}={shorten(value)}")


def check_zero(c: "Config") -> None:
    """Rejects ZeRO on one dp; a rule of training only: a run with zero may be evaluated on one device."""
    require(
        c.mesh == "auto" or not c.zero or c.replicas > 1,
        f"zero={c.zero} splits over dp, and mesh={c.mesh} has dp=1; give zero=0, or a mesh with more dp",
    )


def _check_kernel(c: "Config") -> None:
    lacking = f"dropout={c.dropout}" if c.dropout else f"positions={c.positions}" if c.biased_by_distance else ""
    require(
        not (c.attention == "fused" and lacking),
        f"attention=fused has no kernel with {lacking}; give attention=auto",
    )


def _check_gradients(c: "Config") -> None:
    require(
        not c.grad_metrics or c.zero < 3,
        "grad_metrics=true needs zero below 3: with zero=3 the backward pass itself sums over dp, and no example has "
        "its own gradient",
    )
    require(
        c.param_dtype == "float32" or c.dtype == "bfloat16",
        "param_dtype=bfloat16 stores matrices in the type that they multiply in: give dtype=bfloat16; "
        f"got dtype={c.dtype}",
    )


def _check_adapters(c: "Config") -> None:
    if not c.lora_rank:
        return
    matrices = [name for name in MATRICES if name != "gate" or c.gated]
    unknown = [name for name in c.lora_names if name not in matrices]
    require(
        not unknown and len(set(c.lora_names)) == len(c.lora_names),
        f"lora_targets takes some of {','.join(matrices)}, each once; got {c.lora_targets!r}",
    )
    require(
        c.optimizer != "muon",
        "optimizer=muon updates full matrices, but lora_rank trains adapters; give optimizer=adamw",
    )


def _check_bad_steps(c: "Config") -> None:
    if not c.skip_steps:
        return
    require(
        c.accum_mode != "multisteps",
        "skip_steps leaves out full steps, and accum_mode=multisteps updates by microbatches; give accum_mode=scan",
    )
    require(
        c.save_every or c.keep_every,
        "skip_steps goes back to checkpoints whose steps are known; got save_every=0 and keep_every=0, give save_every",
    )


def _check_lbfgs(c: "Config") -> None:
    if c.optimizer != "lbfgs":
        return
    off = {"clip": 0, "weight_decay": 0, "accum": 1}
    got = " ".join(f"{name}={getattr(c, name)}" for name in off)
    require(
        all(getattr(c, name) == value for name, value in off.items()),
        "optimizer=lbfgs searches along the loss of the full batch, without clipping, decay or microbatches: "
        f"give clip=0 weight_decay=0 accum=1; got {got}",
    )


def _check_mesh(c: "Config") -> None:
    dp, mp, pp, cp = parse_mesh(c.mesh)
    if cp > 1:
        _check_context(c)
    if pp > 1:
        _check_stages(c)
    parts, name = dp, f"dp={dp} (mesh={c.mesh})"
    if c.accum > 1:
        parts, name = dp * c.accum, f"dp * accum = {dp * c.accum} (mesh={c.mesh}, accum={c.accum})"
    require(
        c.batch % parts == 0,
        f"batch={c.batch} does not divide over {name}; try batch={next_multiple(c.batch, parts)}, or another mesh",
    )
    require(
        not c.sequence_parallel or c.seq % mp == 0 or cp > 1,
        f"sequence_parallel=true splits seq={c.seq} over mp={mp} (mesh={c.mesh}), which does not divide it; "
        f"try seq={next_multiple(c.seq, mp)} or sequence_parallel=false",
    )
    _check_split_sizes(c, mp)


def _check_context(c: "Config") -> None:
    """Rejects what a mesh that splits the context cannot do."""
    dp, mp, pp, cp = parse_mesh(c.mesh)
    without = MeshSizes(dp=dp * cp, mp=mp, pp=pp)
    require(
        not c.grad_metrics,
        f"grad_metrics=true needs each example's gradient on one device, and mesh={c.mesh} splits its tokens over "
        f"cp={cp}; give grad_metrics=false or mesh={without}",
    )
    parts = 2 * cp * (mp if c.sequence_parallel else 1)
    name = f"2 * cp = {2 * cp}" if parts == 2 * cp else f"2 * cp * mp = {parts}, as sequence_parallel=true splits it"
    require(
        c.seq % parts == 0,
        f"seq={c.seq} does not divide over {name} (mesh={c.mesh}); try seq={next_multiple(c.seq, parts)}",
    )


def _check_split_sizes(c: "Config", mp: int) -> None:
    sizes = {"heads": c.heads, "feed-forward width": c.ff_size}
    if mp % c.key_value_heads:  # otherwise mp / kv_heads shards share each of them
        sizes["kv_heads"] = c.key_value_heads
    if c.positions == "learned" or c.embed_split == "width":
        sizes["d_model"] = c.d_model
    padded = c.padded_vocab or c.vocab_multiple
    sizes_of_mesh = parse_mesh(c.mesh)
    fitting = sizes_of_mesh._replace(mp=largest_divisor(math.gcd(padded, *sizes.values()), mp))
    for name, size in sizes.items():
        require(
            size % mp == 0,
            f"{name}={size} does not divide over mp={mp} (mesh={c.mesh}); try mesh={fitting}",
        )
    require(
        padded % mp == 0,
        f"the vocabulary padded to vocab_multiple={c.vocab_multiple} does not divide over mp={mp}; "
        f"set vocab_multiple={mp} (it is part of the model, so on every mesh)",
    )


def _check_stages(c: "Config") -> None:
    sizes = parse_mesh(c.mesh)
    pp, without = sizes.pp, sizes._replace(dp=sizes.dp * sizes.pp, pp=1)
    require(
        c.layers % pp == 0,
        f"layers={c.layers} do not divide over pp={pp} stages (mesh={c.mesh}); "
        f"try mesh={sizes._replace(pp=largest_divisor(c.layers, pp))}",
    )
    rounds = largest_divisor(c.layers // pp, c.pipeline_rounds)
    require(
        rounds == c.pipeline_rounds,
        f"layers={c.layers} do not divide over pp={pp} stages (mesh={c.mesh}) in "
        f"pipeline_rounds={c.pipeline_rounds}; try pipeline_rounds={rounds}",
    )
    require(
        c.optimizer != "lbfgs" and not c.grad_metrics and c.accum_mode == "scan",
        f"pipeline stages (mesh={c.mesh}) find the mean gradient of all microbatches in one program: give "
        f"accum_mode=scan, grad_metrics=false and an optimizer other than lbfgs, or mesh={without}",
    )
    require(
        c.accum % pp == 0,
        f"accum={c.accum} microbatches do not divide over pp={pp} stages (mesh={c.mesh}); "
        f"try accum={next_multiple(c.accum, pp)}, or more of them for a smaller bubble",
    )
