"""A plain dense model on unsharded arrays: no mesh, no Haiku, nothing shared with the package.

It computes in the type of its parameters: float32, or float64 under `jax.enable_x64`.
"""

import jax
import jax.numpy as jnp
import numpy as np


def logits(config, params, tokens):
    """[B, T, vocab] of the parameters that `Model.init` makes."""
    c = config
    embed, layers = params["transformer/embed"], params["transformer/layers"]
    x = embed["tokens"][tokens] + embed.get("bias", jnp.zeros(c.d_model))[None, None]
    T = tokens.shape[1]
    if c.positions == "learned":
        x = x + embed["positions"][None, :T]
    for i in range(c.layers):
        layer = {name: leaf[i] for name, leaf in layers.items()}
        norm = lambda kind, x, i=i: _norm(c, {k: v[i] for k, v in params[f"transformer/layers/{kind}"].items()}, x)
        if c.block == "parallel":
            h = norm("norm", x)
            x = x + _attention(c, params, layer, h) + _feed_forward(layer, h)
        else:
            x = x + _attention(c, params, layer, norm("attention_norm", x))
            x = x + _feed_forward(layer, norm("feed_forward_norm", x))
    x = _norm(c, params["transformer/head/norm"], x)
    head = params.get("transformer/head", {})
    out = x @ (embed["tokens"].T if c.tied else head["w"])
    if "bias" in head:
        out = out + head["bias"][None, None]
    return out[..., : c.vocab]


def loss(config, params, tokens, targets):
    """Mean nats per token, and what is minimised."""
    out = logits(config, params, tokens)
    log_z = jax.nn.logsumexp(out, axis=-1)
    nats = log_z - jnp.take_along_axis(out, targets[..., None], axis=-1)[..., 0]
    return nats.mean(), nats.mean() + config.z_loss * jnp.square(log_z).mean()


def _norm(c, p, x):
    if c.norm == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p["scale"][None, None]
    return x + p["offset"][None, None] if "offset" in p else x


def _feed_forward(p, h):
    u = h @ p["up"]
    if "up_bias" in p:
        u = u + p["up_bias"][None, None]
    y = jax.nn.gelu(u) @ p["down"]
    return y + p["down_bias"][None, None] if "down_bias" in p else y


def _attention(c, params, p, h):
    B, T, D = h.shape
    H, K = c.heads, D // c.heads
    q, k, v = (h @ p[n] + (p[f"{n}_bias"][None, None] if f"{n}_bias" in p else 0.0) for n in "qkv")
    q, k, v = (a.reshape(B, T, -1, K) for a in (q, k, v))
    k, v = (jnp.repeat(a, H // a.shape[2], axis=2) for a in (k, v))
    if c.positions == "rotary":
        q, k = _rotate(c, q), _rotate(c, k)
    logits = jnp.einsum("bthk,bshk->bhts", q, k) / K**0.5
    if c.positions == "t5":
        logits = logits + _t5_bias(c, params["transformer/relative_bias"]["table"], T)[None]
    logits = jnp.where(np.tril(np.ones((T, T), bool))[None, None], logits, -jnp.inf)
    y = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(logits, axis=-1), v).reshape(B, T, D) @ p["o"]
    return y + p["o_bias"][None, None] if "o_bias" in p else y


def _rotate(c, x):
    """By complex multiplication: pair (2i, 2i + 1) of each head turns by t / 10000^(2i / dims)."""
    dims = c.rotary_dims or x.shape[-1]
    turn = np.exp(1j * np.arange(x.shape[1])[:, None] / 10000.0 ** (np.arange(0, dims, 2) / dims))[None, :, None]
    pairs = jax.lax.complex(x[..., 0:dims:2], x[..., 1:dims:2])
    turned = pairs * jnp.asarray(turn, pairs.dtype)
    pairs = jnp.stack([turned.real, turned.imag], axis=-1).reshape(*x.shape[:-1], dims)
    return jnp.concatenate([pairs, x[..., dims:]], axis=-1)


def _t5_bias(c, table, T):
    """[H, T, T]"""
    exact = c.t5_buckets // 2
    bias = np.zeros((T, T), np.int32)
    for query in range(T):
        for key in range(query + 1):
            distance = query - key
            far = exact + int(np.log(max(distance, exact) / exact) / np.log(128 / exact) * (c.t5_buckets - exact))
            bias[query, key] = distance if distance < exact else min(far, c.t5_buckets - 1)
    return jnp.transpose(table[bias], (2, 0, 1))
