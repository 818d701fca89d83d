"""Rules between keys of two or more groups, each with its fix in the message."""

import math
from typing import TYPE_CHECKING

from shardformer.config.keys import keys_of, largest_divisor, next_multiple, require
from shardformer.config.parsing import MeshSizes, parse_mesh, parse_steps_range, shorten
from shardformer.errors import UsageError

if TYPE_CHECKING:
    from shardformer.config.config import Config
    from shardformer.config.model_keys import ModelKeys

MAX_UNROLLED = 1000  # layers; the time of a compilation grows with them


def check_rules(c: "Config") -> None:
    """Raises UsageError if the configuration breaks a rule; rules about the mesh wait until mesh=auto is resolved."""
    c.objective.check()
    tokens = c.training.batch * c.model.seq
    require(
        tokens < 2**31,
        f"batch={c.training.batch} x seq={c.model.seq} is {tokens} tokens a step, which must be below 2**31; "
        f"try batch={max((2**31 - 1) // c.model.seq, 1)}",
    )
    require(
        c.parallel.scan is not False or c.model.layers <= MAX_UNROLLED,
        f"scan=false compiles every layer by itself, at most {MAX_UNROLLED:,} of them, got layers={c.model.layers}; "
        "give scan=true",
    )
    if c.model.kv_latent:
        _check_latent(c.model)
    _check_scale(c)
    _check_kernel(c)
    _check_gradients(c)
    c.lora.check_matrices(c)
    c.mixture.check()
    _check_lbfgs(c)
    _check_bad_steps(c)
    require(
        c.optimizer.offload == "none" or not c.training.ema or c.optimizer.param_dtype == "float32",
        f"ema={c.training.ema} averages the float32 masters of param_dtype=bfloat16, which offload=optimizer moves to "
        "the host; give ema=0 or param_dtype=float32",
    )
    require(
        c.optimizer.offload == "none" or c.training.accum_mode != "multisteps",
        "accum_mode=multisteps keeps a gradient in the optimizer's state, which offload=optimizer moves to the host; "
        "give accum_mode=scan or manual",
    )
    traced = parse_steps_range("profile", c.start.profile)
    require(
        not traced or c.training.epochs or traced[0] <= c.training.steps,
        f"profile={c.start.profile} begins after the last step, steps={c.training.steps}",
    )
    if c.parallel.mesh != "auto":
        _check_mesh(c)
    c.stored.check_forms(c)


def check_given(c: "Config", given: dict[str, object]) -> None:
    """Raises UsageError if a key that a user gave has no effect in this configuration."""
    c.mixture.check_given(given)
    if "steps" in given and (epochs := c.training.epochs):
        both = f"steps={c.training.steps} and epochs={epochs:g}"
        raise UsageError(
            f"{both} both choose the length of the run; leave steps out, or give epochs=0 steps={c.training.steps}"
        )
    for name, value in given.items():
        keys, field = c.group(name), keys_of(type(c))[name]
        needed, used_if = field.metadata["needs"], field.metadata["used_if"]
        if needed and not getattr(keys, needed):
            raise UsageError(f"{name} does nothing without {needed}; give {needed} as well")
        if keys is c.model and c.training.base:
            continue  # a run with base= names all keys of the base's model, including those it does not read
        if used_if and value != field.default and not used_if.holds(keys):
            raise UsageError(f"{name} does nothing {used_if.otherwise}; got {name}={shorten(value)}")


def check_zero(c: "Config") -> None:
    """Rejects ZeRO on one dp and quantised weights without adapters: a run may be evaluated with either."""
    c.stored.check_trainable(c)
    require(
        c.parallel.mesh == "auto" or not c.parallel.zero or c.parallel.replicas > 1,
        f"zero={c.parallel.zero} splits over dp, and mesh={c.parallel.mesh} has dp=1; give zero=0, or a mesh with "
        "more dp",
    )


def _check_latent(model: "ModelKeys") -> None:
    require(
        model.rotates and model.rotary_size < model.head_size,
        f"kv_latent={model.kv_latent} needs keys of which a part rotates: give positions=rotary and rotary_dims "
        f"below the head size {model.head_size}; got positions={model.positions} rotary_dims={model.rotary_dims}",
    )
    off = {"kv_heads": (None, model.heads), "qk_norm": ("none",), "sinks": (False,)}
    for name, accepted in off.items():
        require(
            getattr(model, name) in accepted,
            f"{name}={getattr(model, name)} is not computed with kv_latent={model.kv_latent}; leave {name} out",
        )
    require(
        "q" not in model.biased,
        f"bias={model.bias} has biases of q, k and v, which kv_latent={model.kv_latent} does not have; give bias=ff",
    )


def _check_scale(c: "Config") -> None:
    if not c.model.scale:
        return
    for name in ("experts", "embed_dim", "kv_latent"):
        require(not c.get(name), f"scale={c.model.scale} has no rule for {name}={c.get(name)}; leave one of them out")
    require(
        not c.model.sum_norms,  # the norms between layers undo the factors of branches
        f"scale={c.model.scale} has no rule for block={c.model.block}; give another block, or leave scale out",
    )
    require(
        not (c.optimizer.searches_rate or c.optimizer.is_code),
        f"scale={c.model.scale} needs optimizer=adamw, muon or normuon, whose updates have known sizes; "
        f"got optimizer={c.optimizer.name}",
    )


def _check_kernel(c: "Config") -> None:
    lacking = f"dropout={c.training.dropout}" if c.training.dropout else ""
    lacking = lacking or (f"positions={c.model.positions}" if c.model.biased_by_distance else "")
    require(
        not (c.parallel.attention == "fused" and lacking),
        f"attention=fused has no kernel with {lacking}; give attention=auto",
    )


def _check_gradients(c: "Config") -> None:
    require(
        not c.training.grad_metrics or c.parallel.zero < 3,
        "grad_metrics=true needs zero below 3: with zero=3 the backward pass itself sums over dp, and no example has "
        "its own gradient",
    )
    require(
        c.optimizer.param_dtype == "float32" or c.parallel.dtype == "bfloat16",
        "param_dtype=bfloat16 stores matrices in the type that they multiply in: give dtype=bfloat16; "
        f"got dtype={c.parallel.dtype}",
    )


def _check_bad_steps(c: "Config") -> None:
    if not c.bad_steps.skip_steps:
        return
    require(
        c.training.accum_mode != "multisteps",
        "skip_steps leaves out full steps, and accum_mode=multisteps updates by microbatches; give accum_mode=scan",
    )
    require(
        c.run.save_every or c.run.keep_every,
        "skip_steps goes back to checkpoints whose steps are known; got save_every=0 and keep_every=0, give save_every",
    )


def _check_lbfgs(c: "Config") -> None:
    if not c.optimizer.searches_rate:
        return
    off = {"clip": 0, "weight_decay": 0, "accum": 1}
    got = " ".join(f"{name}={c.get(name)}" for name in off)
    require(
        all(c.get(name) == value for name, value in off.items()),
        "optimizer=lbfgs searches along the loss of the full batch, without clipping, decay or microbatches: "
        f"give clip=0 weight_decay=0 accum=1; got {got}",
    )


def _check_mesh(c: "Config") -> None:
    dp, mp, pp, cp = parse_mesh(c.parallel.mesh)
    if cp > 1:
        _check_context(c)
    if pp > 1:
        _check_stages(c)
    parts, name = dp, f"dp={dp} (mesh={c.parallel.mesh})"
    if c.training.accum > 1:
        parts, name = (
            dp * c.training.accum,
            f"dp * accum = {dp * c.training.accum} (mesh={c.parallel.mesh}, accum={c.training.accum})",
        )
    require(
        c.training.batch % parts == 0,
        f"batch={c.training.batch} does not divide over {name}; try batch={next_multiple(c.training.batch, parts)}, "
        "or another mesh",
    )
    require(
        not c.parallel.sequence_parallel or c.model.seq % mp == 0 or cp > 1,
        f"sequence_parallel=true splits seq={c.model.seq} over mp={mp} (mesh={c.parallel.mesh}), which does not "
        "divide it; "
        f"try seq={next_multiple(c.model.seq, mp)} or sequence_parallel=false",
    )
    if c.objective.reads_tokens:
        _check_split_sizes(c, mp)


def _check_context(c: "Config") -> None:
    """Rejects what a mesh that splits the context cannot do."""
    dp, mp, pp, cp = parse_mesh(c.parallel.mesh)
    without = MeshSizes(dp=dp * cp, mp=mp, pp=pp)
    require(
        not c.training.grad_metrics,
        f"grad_metrics=true needs each example's gradient on one device, and mesh={c.parallel.mesh} splits its "
        "tokens over "
        f"cp={cp}; give grad_metrics=false or mesh={without}",
    )
    parts = 2 * cp * (mp if c.parallel.sequence_parallel else 1)
    name = f"2 * cp = {2 * cp}" if parts == 2 * cp else f"2 * cp * mp = {parts}, as sequence_parallel=true splits it"
    require(
        c.model.seq % parts == 0,
        f"seq={c.model.seq} does not divide over {name} (mesh={c.parallel.mesh}); try "
        f"seq={next_multiple(c.model.seq, parts)}",
    )


def _check_split_sizes(c: "Config", mp: int) -> None:
    c.mixture.check_axes()
    sizes = {"heads": c.model.heads} | c.mixture.list_widths()
    if mp % c.model.key_value_heads:  # otherwise mp / kv_heads shards share each of them
        sizes["kv_heads"] = c.model.key_value_heads
    if c.model.embeds_positions:
        sizes["d_model"] = c.model.d_model
    padded = c.model.padded_vocab or c.model.vocab_multiple
    sizes_of_mesh = parse_mesh(c.parallel.mesh)
    fitting = sizes_of_mesh._replace(mp=largest_divisor(math.gcd(padded, *sizes.values()), mp))
    for name, size in sizes.items():
        require(
            size % mp == 0,
            f"{name}={size} does not divide over mp={mp} (mesh={c.parallel.mesh}); try mesh={fitting}",
        )
    require(
        padded % mp == 0,
        f"the vocabulary padded to vocab_multiple={c.model.vocab_multiple} does not divide over mp={mp}; "
        f"set vocab_multiple={mp} (it is part of the model, so on every mesh)",
    )


def _check_stages(c: "Config") -> None:
    sizes = parse_mesh(c.parallel.mesh)
    pp, without = sizes.pp, sizes._replace(dp=sizes.dp * sizes.pp, pp=1)
    require(
        c.optimizer.offload == "none",
        f"offload=optimizer updates one layer after the other, and the stages of mesh={c.parallel.mesh} have different "
        f"layers; give offload=none or mesh={without}",
    )
    require(
        c.model.layers % pp == 0,
        f"layers={c.model.layers} do not divide over pp={pp} stages (mesh={c.parallel.mesh}); "
        f"try mesh={sizes._replace(pp=largest_divisor(c.model.layers, pp))}",
    )
    rounds = largest_divisor(c.model.layers // pp, c.parallel.pipeline_rounds)
    require(
        rounds == c.parallel.pipeline_rounds,
        f"layers={c.model.layers} do not divide over pp={pp} stages (mesh={c.parallel.mesh}) in "
        f"pipeline_rounds={c.parallel.pipeline_rounds}; try pipeline_rounds={rounds}",
    )
    c.mixture.check_stages(c.model.layers // pp // rounds, without)
    require(
        not c.optimizer.searches_rate and not c.training.grad_metrics and c.training.accum_mode == "scan",
        f"pipeline stages (mesh={c.parallel.mesh}) find the mean gradient of all microbatches in one program: give "
        f"accum_mode=scan, grad_metrics=false and an optimizer other than lbfgs, or mesh={without}",
    )
    require(
        c.training.accum % pp == 0,
        f"accum={c.training.accum} microbatches do not divide over pp={pp} stages (mesh={c.parallel.mesh}); "
        f"try accum={next_multiple(c.training.accum, pp)}, or more of them for a smaller bubble",
    )
