"""The bench's yardstick: the step that one would write in Haiku and optax without a thought of sharding.

It unrolls its layers, never recomputes, and starts from our parameters, so that both compute the same losses. It has
one device, so a mesh, or ZeRO on it, is what ours is measured with; what else it has not is refused.
"""

import functools
import math

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from shardformer import mesh, optim
from shardformer.config import Config
from shardformer.errors import UsageError
from shardformer.model import Model
from shardformer.optim.chain import is_decayed
from shardformer.shards.positions import rotary_frequencies, rotate

# A run that has more does more in a step, or is another model.
PLAIN = {"optimizer": "adamw", "dropout": 0, "embed_bias": False, "accum": 1, "ema": 0, "lr_rules": "", "lora_rank": 0}


def check(c: Config) -> None:
    """Only what both sides compute can be compared."""
    more = {name: value for name, value in PLAIN.items() if getattr(c, name) != value}
    if c.positions == "t5":
        more["positions"] = "rotary"
    if more:
        given = " ".join(f"{name}={getattr(c, name)}" for name in more)
        words = " ".join(f"{name}={str(value).lower()}" for name, value in more.items())
        raise UsageError(f"bench step compares with a plain step, which does not know {given}; give {words}")


def step_and_state(c: Config):
    """A function (state, batch) -> (state, loss) to jit, and the state that it starts from."""
    check(c)
    one = c.replace(mesh="1x1")
    params = unstack(Model(one, mesh.make(one)).init(c.seed))
    model = hk.without_apply_rng(hk.transform(functools.partial(forward, c)))
    decayed = {module: {name: is_decayed(name) for name in leaves} for module, leaves in params.items()}
    optimizer = optax.chain(
        optax.clip_by_global_norm(c.clip) if c.clip else optax.identity(),
        optax.adamw(optim.learning_rate(c), c.beta1, c.beta2, weight_decay=c.weight_decay, mask=decayed),
    )

    def update(state, batch):
        params, moments = state
        objective = lambda params: model.apply(params, batch["tokens"], batch["targets"])
        (_, loss), grads = jax.value_and_grad(objective, has_aux=True)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    return update, jax.device_put((params, optimizer.init(params)), jax.devices()[0])


def unstack(params):
    """Our parameters under the reference's names: a module for each layer."""
    named = {}
    for module, leaves in params.items():
        top, layers, inner = module.partition("/layers")
        count = next(iter(leaves.values())).shape[0] if layers else 1
        for i in range(count):
            name = f"{top}/layers_{i}{inner}" if layers else module
            named[name] = jax.tree.map(lambda leaf, i=i: leaf[i], leaves) if layers else leaves
    return named


def forward(c: Config, tokens, targets):
    """(what is minimised, cross-entropy), in nats per token."""
    with hk.name_scope("transformer"):
        with hk.name_scope("embed"):
            embedding = parameter("tokens", c.padded_vocab, c.d_model)
            x = embedding[tokens].astype(c.dtype)
            if c.positions == "learned":
                x = x + parameter("positions", c.seq, c.d_model).astype(c.dtype)
        for i in range(c.layers):
            with hk.name_scope(f"layers_{i}"):
                x = layer(c, x)
        with hk.name_scope("head"):
            h = normalise(c, "norm", x)
            w = embedding.T if c.tied else parameter("w", c.d_model, c.padded_vocab)
            logits = jnp.matmul(h, w.astype(h.dtype), preferred_element_type=jnp.float32)
            if not c.tied and c.bias != "none":
                logits = logits + parameter("bias", c.padded_vocab)
    logits = logits[..., : c.vocab]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    return loss + c.z_loss * jnp.square(jax.nn.logsumexp(logits, axis=-1)).mean() if c.z_loss else loss, loss


def layer(c: Config, x):
    h = normalise(c, "norm" if c.block == "parallel" else "attention_norm", x)
    after = x + attention(c, h)
    if c.block == "sequential":
        h = normalise(c, "feed_forward_norm", after)
    u = jax.nn.gelu(dense("up", h, c.ff_size, c.bias != "none"))
    return after + dense("down", u, c.d_model, c.bias != "none")


def attention(c: Config, h):
    B, T, D = h.shape
    q, k, v = (dense(name, h, D, c.bias == "all").reshape(B, T, c.heads, c.head_size) for name in "qkv")
    if c.positions == "rotary":
        q, k = (rotate(x, jnp.arange(T), rotary_frequencies(c)) for x in (q, k))
    logits = jnp.einsum("bthk,bshk->bhts", q, k, preferred_element_type=jnp.float32) / math.sqrt(c.head_size)
    weights = jax.nn.softmax(jnp.where(jnp.tri(T, dtype=bool), logits, -1e30)).astype(h.dtype)
    return dense("o", jnp.einsum("bhts,bshk->bthk", weights, v).reshape(B, T, D), D, c.bias == "all")


def normalise(c: Config, name: str, inputs):
    with hk.name_scope(name):
        x, D = inputs.astype(jnp.float32), inputs.shape[-1]
        if c.norm == "layernorm":
            x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + c.norm_eps) * parameter("scale", D)
        return (x if c.bias == "none" else x + parameter("offset", D)).astype(inputs.dtype)


def dense(name: str, x, size: int, bias: bool):
    y = x @ parameter(name, x.shape[-1], size).astype(x.dtype)
    return y + parameter(f"{name}_bias", size).astype(x.dtype) if bias else y


parameter = lambda name, *shape: hk.get_parameter(name, shape, init=jnp.zeros)  # the values are ours: see unstack
