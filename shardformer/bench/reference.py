"""The reference of `bench step`: the usual model in Haiku and optax for one device.

It unrolls its layers, never recomputes and starts from our parameters, so both compute the same losses. It runs on one
device, under `jit` with NamedShardings (partitioned_twin.py), and split by hand under `xmap` (xmap_twin.py).
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer import optim
from shardformer.bench import reference
from shardformer.bench.contenders import Contender, unstack
from shardformer.config import Config
from shardformer.errors import UsageError
from shardformer.kernels.rotary import rotate
from shardformer.layout import mesh, specs
from shardformer.model import ROWS, Model
from shardformer.optim.chain import is_decayed
from shardformer.shards.positions import find_rotation

# With other values a step would do more work or have another model.
PLAIN = {
    "optimizer": "adamw", "dropout": 0, "embed": "plain", "accum": 1, "ema": 0, "lr_rules": "", "lora_rank": 0,
    "activation": "gelu", "kv_heads": None, "attention_scale": None, "head_bias": True, "param_dtype": "float32",
    "moment_dtype": "float32", "window": None, "attention_cap": None, "head_dim": None, "qk_norm": "none",
    "embed_scale": 1.0, "logits_cap": None, "residual_scale": 1.0, "logits_scale": 1.0, "window_pattern": "",
    "experts": 0, "offload": "none", "sinks": False, "kv_latent": None, "query_growth": 0.0, "scale": "",
    "embed_dim": None, "previous_tokens": 0,
}  # fmt: skip
# Values that the reference implements, and the one that a rejection proposes.
IMPLEMENTED = {
    "positions": ("rotary", "learned", "none"),
    "block": ("parallel", "sequential"),
    "bias": ("all", "ff", "none"),
    "norm": ("layernorm", "rmsnorm"),
}


class Cut(NamedTuple):
    """The functions that split the model over shards; by default nothing is split."""

    parts: int = 1
    enter: Callable = lambda x: x  # before products that are split by columns
    leave: Callable = lambda x: x  # sums the partial results of products that are split by rows
    look_up: Callable = lambda table, tokens: table[tokens]
    cross_entropy: Callable = lambda logits, targets: (
        optax.softmax_cross_entropy_with_integer_labels(logits, targets),
        jax.nn.logsumexp(logits, axis=-1),
    )


WHOLE = Cut()


def check(c: Config) -> None:
    """Rejects settings that the reference does not implement."""
    more = {name: value for name, value in PLAIN.items() if c.get(name) != value}
    more |= {name: values[0] for name, values in IMPLEMENTED.items() if c.get(name) not in values}
    if more:
        given = " ".join(f"{name}={c.get(name)}" for name in more)
        arguments = " ".join(f"{name}={str(value).lower()}" for name, value in more.items())
        raise UsageError(f"bench step compares with a plain step, which does not implement {given}; give {arguments}")


def make_update(c: Config, grads_of: Callable, clip: Callable):
    """Returns (optimizer, update), where update maps (state, batch) to (state, loss).

    `grads_of(params, batch)` returns ((_, loss), grads).
    """

    def decayed(params):
        return {module: {name: is_decayed(name) for name in leaves} for module, leaves in params.items()}

    optimizer = optax.adamw(
        optim.learning_rate(c),
        c.optimizer.beta1,
        c.optimizer.beta2,
        weight_decay=c.optimizer.weight_decay,
        mask=decayed,
    )

    def update(state, batch):
        params, moments = state
        (_, loss), grads = grads_of(params, batch)
        updates, moments = optimizer.update(clip(grads), moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    return optimizer, update


def make_step(c: Config):
    """Returns (optimizer, update) of the full model on one device."""
    model: hk.Transformed = hk.without_apply_rng(hk.transform(functools.partial(forward, c)))

    def objective(params, batch):
        return model.apply(params, batch["tokens"], batch["targets"])

    clip = optax.clip_by_global_norm(c.optimizer.clip) if c.optimizer.clip else optax.identity()
    return make_update(c, jax.value_and_grad(objective, has_aux=True), lambda grads: clip.update(grads, ())[0])


def initial_parameters(c: Config):
    """Returns our initial parameters under the reference's names, on one device."""
    check(c)
    one = c.replace(mesh="1x1", zero=0)
    return unstack(Model.on(one, mesh.make(one)).init(c.training.seed))


def forward(c: Config, tokens, targets, cut: Cut = WHOLE):
    """Returns (objective, cross-entropy) in nats per token."""
    with hk.name_scope("transformer"):
        with hk.name_scope("embed"):
            embedding = parameter("tokens", c.model.padded_vocab // cut.parts, c.model.d_model)
            x = cut.look_up(embedding, tokens).astype(c.parallel.dtype)
            if c.model.positions == "learned":
                x = x + parameter("positions", c.model.seq, c.model.d_model).astype(c.parallel.dtype)
        for i in range(c.model.layers):
            with hk.name_scope(f"layers_{i}"):
                x = layer(c, x, cut)
        with hk.name_scope("head"):
            h = cut.enter(normalise(c, "norm", x))
            w = embedding.T if c.model.tied else parameter("w", c.model.d_model, c.model.padded_vocab // cut.parts)
            logits = jnp.matmul(h, w.astype(h.dtype), preferred_element_type=jnp.float32)
            if not c.model.tied and c.model.bias != "none":
                logits = logits + parameter("bias", c.model.padded_vocab // cut.parts)
    nats, log_z = cut.cross_entropy(logits if cut.parts > 1 else logits[..., : c.model.vocab], targets)
    loss = nats.mean()
    return loss + c.training.z_loss * jnp.square(log_z).mean() if c.training.z_loss else loss, loss


def layer(c: Config, x, cut: Cut):
    h = cut.enter(normalise(c, "norm" if c.model.block == "parallel" else "attention_norm", x))
    attended = attention(c, h, cut)
    if c.model.block == "parallel":
        return add_biases(c, x + cut.leave(attended + feed_forward(c, h, cut)), "o", "down")
    x = add_biases(c, x + cut.leave(attended), "o")
    h = cut.enter(normalise(c, "feed_forward_norm", x))
    return add_biases(c, x + cut.leave(feed_forward(c, h, cut)), "down")


def attention(c: Config, h, cut: Cut):
    B, T, D = h.shape
    heads = c.model.heads // cut.parts
    q, k, v = (
        dense(name, h, D // cut.parts, c.model.bias == "all").reshape(B, T, heads, c.model.head_size) for name in "qkv"
    )
    if c.model.positions == "rotary":
        q, k = (rotate(x, jnp.arange(T), find_rotation(c), c.model.rotary_factor) for x in (q, k))
    logits = jnp.einsum("bthk,bshk->bhts", q, k, preferred_element_type=jnp.float32) / math.sqrt(c.model.head_size)
    weights = jax.nn.softmax(jnp.where(jnp.tri(T, dtype=bool), logits, -1e30)).astype(h.dtype)
    values = jnp.einsum("bhts,bshk->bthk", weights, v)
    return dense("o", values.reshape(B, T, D // cut.parts), D)


def feed_forward(c: Config, h, cut: Cut):
    return dense(
        "down", jax.nn.gelu(dense("up", h, c.model.ff_size // cut.parts, c.model.bias != "none")), c.model.d_model
    )


def add_biases(c: Config, x, *names: str):
    """Adds the biases of products that are split by rows: once, after the sum."""
    for name in names:
        if c.model.bias == "all" or (c.model.bias == "ff" and name == "down"):
            x = x + parameter(f"{name}_bias", c.model.d_model).astype(x.dtype)
    return x


def normalise(c: Config, name: str, inputs):
    with hk.name_scope(name):
        x, D = inputs.astype(jnp.float32), inputs.shape[-1]
        if c.model.norm == "layernorm":
            x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + c.model.norm_eps) * parameter("scale", D)
        return (x if c.model.bias == "none" else x + parameter("offset", D)).astype(inputs.dtype)


def dense(name: str, x, size: int, bias: bool = False):
    y = x @ parameter(name, x.shape[-1], size).astype(x.dtype)
    return y + parameter(f"{name}_bias", size).astype(x.dtype) if bias else y


def parameter(name: str, *shape: int):
    return hk.get_parameter(name, shape, init=jnp.zeros)  # the values come from unstack


def partitioned(c: Config, batches) -> Contender:
    """Returns the step; each parameter and its two moments are split as ours, by Megatron's rules."""
    devices = mesh.make(c)
    optimizer, update = reference.make_step(c)
    params = reference.initial_parameters(c)
    moments = optimizer.init(params)

    def shard(spec):
        return NamedSharding(devices, spec)

    trainable = jax.tree.map(shard, plain_specs(params, c))
    followed = optax.tree.map_params(optimizer, lambda _, like: like, moments, trainable,
                                     transform_non_params=lambda _: shard(P()))  # fmt: skip
    shardings = trainable, followed
    step = jax.jit(update, in_shardings=(shardings, shard(ROWS)), out_shardings=(shardings, shard(P())),
                   donate_argnums=0)  # fmt: skip
    state = jax.device_put((params, moments), shardings)
    compiled = step.lower(state, jax.device_put(batches[0], shard(ROWS))).compile()
    return Contender(
        f"partitioned {c.parallel.mesh}",
        c.parallel.devices,
        lambda state, step: compiled(state, jax.device_put(batches[step], shard(ROWS))),
        state,
        [compiled],
        lambda state: state[0],
    )


def plain_specs(params, c: Config):
    """Returns our spec of each plain parameter, without the leading L of stacked layers."""

    def spec_of(module, name):
        top, layers, rest = module.partition("/layers_")
        if not layers:
            return specs.parameter_spec(f"{module}/{name}", c)
        inner = rest.partition("/")[2]
        return P(*specs.parameter_spec("/".join(filter(None, (f"{top}/layers", inner, name))), c)[1:])

    return {module: {name: spec_of(module, name) for name in leaves} for module, leaves in params.items()}
