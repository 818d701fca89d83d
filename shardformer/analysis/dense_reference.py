"""The model once more, plainly: full arrays on one device, no mesh, no Haiku. It shares no code with the package.

`verify` and the tests compare the package with it. It computes in the dtype of its parameters: float32, or float64
under `jax.enable_x64`.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TOKENS_AT_ONCE = 1024  # so many have activations in memory
Params = dict[str, dict[str, Any]]  # module name -> parameter name -> array, as `Model.init` returns them

ACTIVATIONS: dict[str, Callable] = {
    "gelu": lambda u: 0.5 * u * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3))),
    "gelu_exact": lambda u: 0.5 * u * (1 + jax.lax.erf(u * math.sqrt(0.5))),
    "relu": lambda u: jnp.maximum(u, 0),
    "relu2": lambda u: jnp.maximum(u, 0) ** 2,
    "silu": lambda u: u * jax.nn.sigmoid(u),
}
GATES: dict[str, Callable] = {
    "swiglu": lambda u, gate: ACTIVATIONS["silu"](gate) * u,
    "geglu": lambda u, gate: ACTIVATIONS["gelu"](gate) * u,
    # min and max share the slope of equal numbers.
    "clamped_swiglu": lambda u, gate: _silu_of_gpt_oss(jnp.minimum(gate, 7)) * (jnp.maximum(jnp.minimum(u, 7), -7) + 1),
}
NORMS = {
    "parallel": ("norm",),
    "parallel_two_norms": ("attention_norm", "feed_forward_norm"),
    "sequential": ("attention_norm", "feed_forward_norm"),
    "sequential_four_norms": (
        "attention_norm", "post_attention_norm", "feed_forward_norm", "post_feed_forward_norm",
    ),
    "sequential_post_norms": ("post_attention_norm", "post_feed_forward_norm"),
    "sequential_sum_norms": ("attention_norm", "feed_forward_norm"),
}  # fmt: skip
KNOWN = {
    "activation": (*ACTIVATIONS, *GATES),
    "norm": ("layernorm", "layernorm_plus_one", "rmsnorm", "rmsnorm_plus_one", "plain_layernorm"),
    "positions": ("learned", "sinusoids", "rotary", "t5", "alibi", "none"),
}


def _silu_of_gpt_oss(gate):
    return gate / (1 + jnp.exp(-1.702 * gate))


def find_missing(config) -> str:
    """Returns a key with a value that this reference does not compute; '' if it computes all."""
    return next((f"{key}={config.get(key)}" for key, known in KNOWN.items() if config.get(key) not in known), "")


def logits(config, params: Params, tokens, masks: "Masks | None" = None, documents=None, routes: list | None = None):
    """Returns [B, T, vocab]; `masks` are of dropout, and `documents` [B, T] numbers the text of each token.

    Appends to `routes` what each layer's router did: (chosen [B, T, experts], shares [B, T, experts], log-partitions).
    """
    c = _resolve_scale(config)
    x = run_layers(c, params, tokens, masks, documents, routes)
    return project(c, params, params.get("transformer/head/norm", {}), x)


def run_layers(c, params: Params, tokens, masks, documents, routes):
    """Returns [B, T, D] behind the last layer, as `logits` uses it."""
    layers = params["transformer/layers"]
    adapter_masks = masks if c.lora.lora_dropout else None
    if not adapter_masks:
        layers = _merge_adapters(c, layers)
    x = embed_tokens(c, params, tokens, positions_of(tokens, documents))
    if masks:
        x = masks.drop(x, 0)
    for i in range(c.model.layers):
        norms = {
            kind: {name: leaf[i] for name, leaf in params.get(f"transformer/layers/{kind}", {}).items()}
            for kind in (*NORMS[c.model.block], "q_latent_norm", "kv_latent_norm")
        }
        layer = _select_layer(c, layers, i)
        if adapter_masks:
            layer = _drop_inputs_of_adapters(c, layer, adapter_masks.of_layer(i))
        x = _layer(_resolve_window(c, i), params, layer, norms, x, masks and masks.of_layer(i), documents, routes)
    return x


def embed_tokens(c, params: Params, tokens, positions):
    """Returns [B, T, D] in front of the first layer, without dropout."""
    embed = params["transformer/embed"]
    rows = embed["tokens"][tokens]
    for distance, table in enumerate(embed.get("previous", ()), 1):
        reaches = (positions >= distance)[..., None]
        rows = rows + jnp.where(reaches, jnp.roll(table[tokens], distance, axis=1), 0)
    x = rows * (math.sqrt(c.model.d_model) if c.model.embed_scale is None else c.model.embed_scale)
    if "project" in embed:
        x = x @ embed["project"]
    x = x + embed.get("bias", jnp.zeros(c.model.d_model))[None, None]
    if c.model.positions == "learned":
        x = x + embed["positions"][positions]
    if c.model.positions == "sinusoids":
        x = x + _sinusoids(c.model.d_model, positions)
    return _norm(c, params.get("transformer/embed/norm", {}), x) if c.model.embed == "norm" else x


def project(c, params: Params, norm, x):
    """Returns the logits [B, T, vocab] of activations; `norm` has the parameters of the last norm."""
    x = x if c.model.block == "sequential_sum_norms" else _norm(c, norm, x)
    head = params.get("transformer/head", {})
    x = x @ head["project"] if "project" in head else x
    out = x @ (params["transformer/embed"]["tokens"].T if c.model.tied else head["w"])
    if "bias" in head:
        out = out + head["bias"][None, None]
    out = out * c.model.logits_scale
    if c.model.logits_cap:
        out = c.model.logits_cap * jnp.tanh(out / c.model.logits_cap)
    return out[..., : c.model.vocab]


def loss(config, params: Params, tokens, targets, weights=None, masks: "Masks | None" = None, documents=None):
    """Returns the mean nats per token, and the minimised objective; `weights` [B, T] are those of the targets."""
    nats, squared_log_z = token_losses(config, params, tokens, targets, masks, documents)
    weights = jnp.ones_like(nats) if weights is None else weights
    mean_nats, mean_z = ((weights * x).sum() / weights.sum() for x in (nats, squared_log_z))
    return mean_nats, mean_nats + config.training.z_loss * mean_z


def token_losses(config, params: Params, tokens, targets, masks: "Masks | None" = None, documents=None, routes=None):
    """Returns the nats and the squared log-partition of every token, each [B, T]."""
    out = logits(config, params, tokens, masks, documents, routes)
    log_z = jax.nn.logsumexp(out, axis=-1)
    nats = log_z - jnp.take_along_axis(out, targets[..., None], axis=-1)[..., 0]
    return nats, jnp.square(log_z)


def losses_and_gradients(config, params: Params, batch: dict[str, Any], dropout_key=None):
    """Returns ((mean nats, mean squared log-partition), the gradients of the objective).

    Goes through the batch part by part, so that only the activations of a few rows are in memory. `dropout_key` is the
    data of a threefry2x32 key.
    """
    weights = batch.get("weights", np.ones(batch["tokens"].shape, np.float32))
    size = count_rows_of_part(*weights.shape)
    rows = {**batch, "weights": weights / weights.sum(), "example": np.arange(len(weights))}
    parts = jax.tree.map(lambda x: jnp.reshape(x, (-1, size, *x.shape[1:])), rows)

    def run_part(params, part):
        masks, routes = make_masks(config, dropout_key, part["example"]), []
        nats, squares = token_losses(
            config, params, part["tokens"], part["targets"], masks, part.get("documents"), routes
        )  # fmt: skip
        return (part["weights"] * nats).sum(), (part["weights"] * squares).sum(), routes

    def count_part(part):
        return jnp.stack([chosen.sum((0, 1)) for chosen, _, _ in run_part(params, part)[2]])

    counts: Any = jax.lax.map(count_part, parts).sum(0) if config.experts.experts else None  # [layers, experts]

    def part_objective(params, part):
        *sums, routes = run_part(params, part)
        objective = sums[0] + config.training.z_loss * sums[1]
        if routes:
            objective = objective + _router_losses(config, routes, counts) * size / len(weights)
        return objective, tuple(sums)

    def add_part(total, part):
        (_, sums), gradients = jax.value_and_grad(part_objective, has_aux=True)(params, part)
        return jax.tree.map(jnp.add, total, (sums, gradients)), None

    zero = jnp.zeros((), params["transformer/embed"]["tokens"].dtype)
    start = (zero, zero), jax.tree.map(jnp.zeros_like, params)
    losses, gradients = jax.lax.scan(add_part, start, parts)[0]
    if "router_bias" in params["transformer/layers"]:  # its gradient is by definition the mean excess of a row
        excess = (counts * config.experts.experts - counts.sum(1, keepdims=True)) / len(weights)
        layers = gradients["transformer/layers"] | {"router_bias": excess}
        gradients = gradients | {"transformer/layers": layers}
    return losses, gradients


def count_rows_of_part(rows: int, tokens: int) -> int:
    """Returns how many rows of a batch are computed at once."""
    most = max(1, TOKENS_AT_ONCE // tokens)
    return max(size for size in range(1, min(rows, most) + 1) if rows % size == 0)


class Masks:
    """Dropout masks as `jax.random.bernoulli` draws them, from a key that folds in global indices, in this order.

    The number 0 for the embedding or 1 + i for layer i; in a layer, the site: 0 for attention weights, 1 and 2 for
    residual branches, 3 and further for the inputs of the adapters of q, k, v, o, up, gate and down, and of those of a
    shared expert; the number of the example in the batch; for attention weights, the number of the head.
    """

    def __init__(self, rate: float, key, examples):
        self._rate, self._key, self._examples = rate, key, examples

    def of_layer(self, number: int) -> "Masks":
        return Masks(self._rate, jax.random.fold_in(self._key, 1 + number), self._examples)

    def with_rate(self, rate: float) -> "Masks":
        return Masks(rate, self._key, self._examples)

    def drop(self, x, site: int):
        """Drops elements of x [B, T, D]."""
        return self._apply(x, lambda example: self._draw(site, (example,), x.shape[1:]))

    def drop_weights(self, weights):
        """Drops elements of attention weights [B, H, T, S]."""
        heads = jnp.arange(weights.shape[1])

        def draw(example):
            return jax.vmap(lambda head: self._draw(0, (example, head), weights.shape[2:]))(heads)

        return self._apply(weights, draw)

    def _draw(self, site: int, indices: tuple, shape):
        key = jax.random.fold_in(self._key, site)
        for index in indices:
            key = jax.random.fold_in(key, index)
        return jax.random.bernoulli(key, 1 - self._rate, shape)

    def _apply(self, x, draw: Callable):
        return jnp.where(jax.vmap(draw)(self._examples), x / (1 - self._rate), 0)


def make_masks(config, dropout_key, examples) -> Masks | None:
    """Returns the masks of these examples of a batch; None without dropout."""
    if not (config.training.dropout or config.lora.lora_dropout) or dropout_key is None:
        return None
    return Masks(config.training.dropout, jax.random.wrap_key_data(dropout_key, impl="threefry2x32"), examples)


def _sinusoids(width: int, positions):
    """Returns sin and cos of (position + 2) / 10000^(i / (half - 1)), all sines before all cosines."""
    half = width // 2
    step = np.float32(-math.log(10_000) / max(half - 1, 1))
    angle = (positions + 2).astype(jnp.float32)[..., None] * np.exp(np.arange(half, dtype=np.float32) * step)[
        None, None
    ]
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle), jnp.zeros((*angle.shape[:-1], width % 2))], axis=-1)


def _resolve_scale(c):
    """Returns the config with the factors of `scale` written out."""
    if not c.model.scale:
        return c
    width, layers = map(int, c.model.scale.removeprefix("completep:").split("x"))
    factors = {"residual_scale": layers / c.model.layers, "logits_scale": width / c.model.d_model}
    return c.replace(scale="", **{name: c.get(name) * factor for name, factor in factors.items()})


def _resolve_window(c, i: int):
    """Returns the config of a model whose layers are all as layer i is."""
    kind = (c.model.window_pattern or "w")[i % len(c.model.window_pattern or "w")]
    full = {"window": None, "window_pattern": "", "window_rotary_theta": None, "window_chunks": False}
    if kind == "n":
        qk_norm = "none" if c.model.qk_norm == "rotated_plain" else c.model.qk_norm
        return c.replace(**full, positions="none", qk_norm=qk_norm)
    if c.model.query_growth_tokens:
        c = c.replace(query_growth=0.0, query_growth_tokens=None)
    if not (c.model.window and kind == "w"):
        return c.replace(**full)
    changes = {"rotary_theta": c.model.window_rotary_theta, "rotary_scaling": ""} if c.model.window_rotary_theta else {}
    return c.replace(window_pattern="", window_rotary_theta=None, **changes)


def _select_layer(c, layers, i: int) -> dict[str, Any]:
    """Returns the parameters of layer i. Those of a feed-forward are stacked over the layers of their kind."""
    rest = itertools.cycle(c.experts.expert_pattern or "e")
    kinds = ["d"] * c.experts.dense_first + [next(rest) for _ in range(c.model.layers - c.experts.dense_first)]
    if not c.experts.experts or "d" not in kinds:
        return {name: leaf[i] for name, leaf in layers.items()}
    kind_of = {"up": "d", "gate": "d", "down": "d", "expert": "e", "shared": "e", "router": "e"}
    result = {}
    for name, leaf in layers.items():
        kind = kind_of.get(name.split("_")[0])
        if kind is None:
            result[name] = leaf[i]
        elif kind == kinds[i]:
            result[name] = leaf[kinds[:i].count(kind)]
    return result


def _layer(c, params, layer, norms, x, masks, documents, routes):
    def feed_forward(h):
        if "router" in layer:
            return _mix_experts(c, layer, h, routes)
        return _feed_forward(layer, h, c.model.activation)

    def normed(kind, x):
        return _norm(c, norms[kind], x) if kind in norms else x

    if c.model.block == "sequential_sum_norms":
        y = _attention(c, params, layer, norms, x, masks, documents)
        x = _norm(c, norms["attention_norm"], x + _drop(masks, y * c.model.residual_scale, 1))
        return _norm(c, norms["feed_forward_norm"], x + _drop(masks, feed_forward(x) * c.model.residual_scale, 2))
    if c.model.block.startswith("sequential"):
        y = _attention(c, params, layer, norms, normed("attention_norm", x), masks, documents)
        x = x + _drop(masks, normed("post_attention_norm", y) * c.model.residual_scale, 1)
        y = feed_forward(normed("feed_forward_norm", x))
        return x + _drop(masks, normed("post_feed_forward_norm", y) * c.model.residual_scale, 2)
    first = _norm(c, norms["norm" if c.model.block == "parallel" else "attention_norm"], x)
    second = first if c.model.block == "parallel" else _norm(c, norms["feed_forward_norm"], x)
    branch = _attention(c, params, layer, norms, first, masks, documents) + feed_forward(second)
    return x + _drop(masks, branch * c.model.residual_scale, 1)


def _drop(masks, x, site):
    return masks.drop(x, site) if masks else x


def _merge_adapters(c, layers):
    """Multiplies LoRA's factors out: w + scale * a @ b."""
    merged = {name: leaf for name, leaf in layers.items() if not name.endswith(("_lora_in", "_lora_out"))}
    for name in [name for name in merged if f"{name}_lora_in" in layers]:
        update = jnp.einsum("...ir,...ro->...io", layers[f"{name}_lora_in"], layers[f"{name}_lora_out"])
        merged[name] = merged[name] + c.lora.adapter_scale(name) * update
    return merged


class _Adapted:
    """A matrix with an adapter whose inputs are dropped: it multiplies as `x @ self`."""

    def __init__(self, w, adapter: Callable):
        self._w, self._adapter = w, adapter

    def __rmatmul__(self, x):
        return x @ self._w + self._adapter(x)


def _drop_inputs_of_adapters(c, layer, masks: Masks):
    """Returns the parameters of a layer with a matrix that multiplies x @ w + scale * drop(x) @ a @ b per adapter."""

    def adapt(name, w):
        site = 3 + ["q", "k", "v", "o", "up", "gate", "down", "shared_up", "shared_gate", "shared_down"].index(name)
        a, b = layer[f"{name}_lora_in"], layer[f"{name}_lora_out"]
        drop = masks.with_rate(c.lora.lora_dropout).drop
        return _Adapted(w, lambda x: c.lora.adapter_scale(name) * (drop(x, site) @ a @ b))

    return {name: adapt(name, leaf) if f"{name}_lora_in" in layer else leaf for name, leaf in layer.items()}


def _norm(c, p, x):
    if c.model.norm.endswith(("layernorm", "layernorm_plus_one")):
        x = x - x.mean(-1, keepdims=True)
    x = _divide_by_root_mean_square(c, x)
    if "scale" in p:
        x = x * (p["scale"] + float(c.model.norm.endswith("plus_one")))[None, None]
    return x + p["offset"][None, None] if "offset" in p else x


def _divide_by_root_mean_square(c, x):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + c.model.norm_eps)


def _norm_heads(c, p, name, x):
    """Applies RMSNorm to queries or keys [B, T, heads, K]: to each head, or to all heads as one vector."""
    kind = "scale" if c.model.qk_norm == "all" else "head_scale"
    together = x.reshape(*x.shape[:2], 1, -1) if c.model.qk_norm == "all" else x
    factor = (p[f"{name}_{kind}"] + float(c.model.norm == "rmsnorm_plus_one"))[None, None, None]
    return (_divide_by_root_mean_square(c, together) * factor).reshape(x.shape)


def _feed_forward(p, h, activation="gelu"):
    u = _multiply(p, "up", h)
    u = GATES[activation](u, _multiply(p, "gate", h)) if activation in GATES else ACTIVATIONS[activation](u)
    return _multiply(p, "down", u)


def _multiply(p, name, x):
    y = x @ p[name]
    return y + p[f"{name}_bias"][None, None] if f"{name}_bias" in p else y


def _mix_experts(c, p, h, routes: list | None):
    """Returns the sum of all experts' outputs, in which those that a token did not choose have the gate 0."""
    keys, logits_ = c.experts, h @ p["router"] + (p["router_shift"][None, None] if c.experts.expert_bias else 0.0)
    scores = jax.nn.softmax(logits_) if keys.router == "softmax" else jax.nn.sigmoid(logits_)
    ranked = scores + p["router_bias"][None, None] if keys.balance_rate else scores
    if keys.expert_groups > 1:
        groups = ranked.reshape(*ranked.shape[:2], keys.expert_groups, -1)
        best = jnp.sort(groups, axis=-1)[..., -1 if keys.router == "softmax" else -2 :].sum(-1)
        groups = jnp.where(_is_largest(best, keys.groups_per_token)[..., None], groups, -jnp.inf)
        ranked = groups.reshape(ranked.shape)
    chosen = _is_largest(ranked, keys.experts_per_token).astype(h.dtype)
    gates = scores * chosen
    if keys.router_norm:
        gates = gates / gates.sum(-1, keepdims=True)
    gates = gates * keys.router_scale
    if routes is not None:
        shares = scores / scores.sum(-1, keepdims=True)
        routes.append((chosen, shares, jax.nn.logsumexp(logits_, axis=-1)))
    y = jnp.zeros_like(h)
    for e in range(keys.experts):
        expert = {name.removeprefix("expert_"): leaf[e] for name, leaf in p.items() if name.startswith("expert_")}
        gate, is_chosen = gates[..., e, None], chosen[..., e, None]
        inputs, factor = (gate * h, is_chosen) if keys.gate_inputs else (h, gate)
        y = y + factor * _feed_forward(expert, inputs, c.model.activation)
    if not keys.shared_width:
        return y
    shared = {n: p[f"shared_{n}"] for n in ("up", "gate", "down") if f"shared_{n}" in p}
    every = _feed_forward(shared, h, c.model.activation)
    return y + (jax.nn.sigmoid(h @ p["shared_scale"])[..., None] * every if keys.shared_gate else every)


def _is_largest(x, count: int):
    """Returns which numbers are among the `count` largest of the last axis; of equal ones, those that come first."""
    return jnp.argsort(jnp.argsort(-x, axis=-1, stable=True), axis=-1) < count


def _router_losses(c, routes: list, counts):
    """Returns the balance loss and the router's z-loss of some rows, summed over layers; `counts` are of the batch."""
    total = 0.0
    for (_, shares, log_z), count in zip(routes, counts, strict=True):
        load = jax.lax.stop_gradient(count / count.sum())
        total = total + c.experts.balance_loss * c.experts.experts * (load * shares.mean((0, 1))).sum()
        total = total + c.experts.router_z_loss * (log_z**2).mean()
    return total


def _attention(c, params, p, norms, h, masks=None, documents=None):
    B, T, D = h.shape
    H, K = c.model.heads, c.model.head_dim or D // c.model.heads
    q, k, v = _heads_of_latents(c, p, norms, h) if c.model.kv_latent else _heads(c, p, h)
    if c.model.positions == "rotary":
        q, k = _rotate(c, q), _rotate(c, k)
    if c.model.qk_norm == "rotated_head":
        q, k = _norm_heads(c, p, "q", q), _norm_heads(c, p, "k", k)
    if c.model.qk_norm == "rotated_plain":
        q, k = (_divide_by_root_mean_square(c, x) for x in (q, k))
    if c.model.attention_scale:
        q = q * (c.model.attention_scale * K**0.5)  # so that a constant in float32 is rounded as in the model
    if c.model.query_growth:
        if c.model.query_growth_tokens:
            contexts = np.floor((np.arange(T) + 1) / c.model.query_growth_tokens)
        else:
            contexts = np.floor(np.arange(T) / float(c.model.rotary_scaling.split(":")[1].split(",")[3]))
        q = q * (1 + c.model.query_growth * jnp.log1p(contexts))[None, :, None, None]
    logits = jnp.einsum("bthk,bshk->bhts", q, k) * K**-0.5
    if c.model.positions == "t5":
        logits = logits + _t5_bias(c, params["transformer/relative_bias"]["table"], T)[None]
    if c.model.positions == "alibi":
        logits = logits - _alibi_slopes(H)[None, :, None, None] * np.abs(np.arange(T)[:, None] - np.arange(T))
    if c.model.attention_cap:
        logits = jnp.tanh(logits / c.model.attention_cap) * c.model.attention_cap
    distance = np.arange(T)[:, None] - np.arange(T)
    seen = jnp.asarray((distance >= 0) & (distance < (c.model.window or T)))[None]
    if c.model.window_chunks:
        chunk = np.arange(T) // c.model.window
        seen = seen & (chunk[:, None] == chunk)[None]
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None, :])
    logits = jnp.where(seen[:, None], logits, -jnp.inf)
    if c.model.sinks:  # a further key, of which the value is zero
        sinks = jnp.broadcast_to(p["sinks"][None, :, None, None], (B, H, T, 1))
        logits = jnp.concatenate([logits, sinks], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., :T]
    weights = masks.drop_weights(weights) if masks else weights
    y = jnp.einsum("bhts,bshk->bthk", weights, v).reshape(B, T, -1) @ p["o"]
    return y + p["o_bias"][None, None] if "o_bias" in p else y


def _heads(c, p, h):
    """Returns queries, keys and values [B, T, H, K]."""
    (B, T, D), H = h.shape, c.model.heads
    K = c.model.head_dim or D // H
    q, k, v = (h @ p[n] + (p[f"{n}_bias"][None, None] if f"{n}_bias" in p else 0.0) for n in "qkv")
    q, k, v = (a.reshape(B, T, -1, K) for a in (q, k, v))
    if c.model.qk_norm in ("head", "all"):
        q, k = _norm_heads(c, p, "q", q), _norm_heads(c, p, "k", k)
    return q, jnp.repeat(k, H // k.shape[2], axis=2), jnp.repeat(v, H // v.shape[2], axis=2)


def _heads_of_latents(c, p, norms, h):
    """Returns queries, keys and values of MLA; the first numbers of a key, which rotate, are those of all heads."""
    (B, T, _), H, C = h.shape, c.model.heads, c.model.kv_latent
    with_eps = c.replace(norm_eps=1e-6)  # DeepSeek's
    queries = _norm(with_eps, norms["q_latent_norm"], h @ p["q_latent"]) if c.model.q_latent else h
    q = (queries @ p["q"]).reshape(B, T, H, -1)
    both = h @ p["kv_latent"]
    latent = _norm(with_eps, norms["kv_latent_norm"], both[..., :C])
    rotary = jnp.repeat(both[:, :, None, C:], H, axis=2)
    k = jnp.concatenate([rotary, (latent @ p["k"]).reshape(B, T, H, -1)], axis=-1)
    return q, k, (latent @ p["v"]).reshape(B, T, H, -1)


def positions_of(tokens, documents):
    """Returns [B, T] or [1, T]: positions that restart at 0 with every document."""
    positions = jnp.arange(tokens.shape[1])[None]
    if documents is None:
        return positions
    same = documents[:, :, None] == documents[:, None, :]
    return jnp.tril(same).sum(-1) - 1  # documents are contiguous: earlier tokens of the same one


def _rotate(c, x):
    """Turns pair (2i, 2i + 1) of each head by t * frequency_i, as a complex multiplication."""
    dims = c.model.rotary_dims or x.shape[-1]
    frequencies = _frequencies(c, dims, x.shape[1]).astype(np.float32)
    angle = (jnp.arange(x.shape[1], dtype=np.float32)[:, None] * frequencies[None]).astype(x.dtype)[None, :, None]
    pairs = jax.lax.complex(x[..., 0:dims:2], x[..., 1:dims:2])
    kind, _, values = c.model.rotary_scaling.partition(":")
    place = {"yarn": 4, "yarn_untruncated": 4, "longrope": 1}.get(kind)
    factor = 1.0 if place is None else float(values.split(",")[place])
    turned = pairs * jax.lax.complex(jnp.cos(angle), jnp.sin(angle)) * factor
    pairs = jnp.stack([turned.real, turned.imag], axis=-1).reshape(*x.shape[:-1], dims)
    return jnp.concatenate([pairs, x[..., dims:]], axis=-1)


def _frequencies(c, dims: int, tokens: int) -> np.ndarray:
    """Returns theta^(-2i / dims), scaled as `rotary_scaling` says: KIND:FACTOR,LOW,HIGH,OLD_SEQ,ATTENTION.

    Longrope's are OLD_SEQ,ATTENTION, and two numbers for each pair: one for rows of at most OLD_SEQ tokens, one for
    longer rows.
    """
    # In float32, as in Llama's published code.
    frequencies = np.float32(1) / np.float32(c.model.rotary_theta) ** (np.arange(0, dims, 2, dtype=np.float32) / dims)
    kind, _, values = c.model.rotary_scaling.partition(":")
    if not kind:
        return frequencies
    if kind == "longrope":
        old_seq, _, *factors = map(float, values.split(","))
        half = len(factors) // 2
        return frequencies / np.array(factors[:half] if tokens <= old_seq else factors[half:], np.float32)
    factor, *bounds = map(float, values.split(","))
    if kind == "linear":
        return frequencies / factor
    low, high, old_seq = bounds[:3]
    if kind.startswith("yarn"):  # as in the paper's published code: pairs that turn `high` and `low` times bound a ramp
        first, last = (dims * math.log(old_seq / (rounds * 2 * math.pi)) / 2 / math.log(c.model.rotary_theta)
                       for rounds in (high, low))  # fmt: skip
        if kind == "yarn":
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dims - 1)
        ramp = np.clip((np.arange(dims // 2) - first) / (last - first if last != first else 0.001), 0, 1)
        return frequencies * (1 - ramp) + frequencies / factor * ramp
    scaled = []
    for frequency in frequencies:  # as in Llama 3.1's published code
        wavelength = 2 * math.pi / frequency
        if wavelength < old_seq / high:
            scaled.append(frequency)
        elif wavelength > old_seq / low:
            scaled.append(frequency / factor)
        else:
            smooth = (old_seq / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * frequency / factor + smooth * frequency)
    return np.array(scaled)


def _alibi_slopes(heads: int) -> np.ndarray:
    """Returns the slopes as in ALiBi's published code."""
    if math.log2(heads).is_integer():
        start = 2 ** -(2 ** -(math.log2(heads) - 3))
        return np.array([start * start**i for i in range(heads)], np.float32)
    closest = 2 ** math.floor(math.log2(heads))
    further = _alibi_slopes(2 * closest)[0::2][: heads - closest]
    return np.concatenate([_alibi_slopes(closest), further])


def _t5_bias(c, table, T):
    """Returns [H, T, T]."""
    buckets = table.shape[0]
    exact = buckets // 2
    bias = np.zeros((T, T), np.int32)
    for query in range(T):
        for key in range(query + 1):
            distance = query - key
            far = exact + int(np.log(max(distance, exact) / exact) / np.log(128 / exact) * (buckets - exact))
            bias[query, key] = distance if distance < exact else min(far, buckets - 1)
    return jnp.transpose(table[bias], (2, 0, 1))
