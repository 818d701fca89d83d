"""A model with experts in NumPy and float64: its losses and the routes of a full batch, token by token.

It shares no code with the package. Derivatives are central differences: shares of the load are constant around a point.
"""

import math

import numpy as np

ACTIVATIONS = {
    "gelu": lambda u: 0.5 * u * (1 + np.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3))),
    "silu": lambda u: u / (1 + np.exp(-u)),
    "relu": lambda u: np.maximum(u, 0),
}
GATES = {"swiglu": "silu", "geglu": "gelu"}
FAULTS = ("balance per microbatch", "dropped token", "bias in the gate")


class Reference:
    """The objective of one configuration and batch; `fault` makes it a wrong one, for negative twins."""

    def __init__(self, config, batch: dict, fault: str = ""):
        self.config, self.batch, self.fault = config, batch, fault

    def run(self, params: dict) -> tuple[float, float, np.ndarray, float]:
        """Returns (nats, objective, pairs of each layer and expert, gap).

        The gap is the smallest difference between the scores of a chosen expert and of another.
        """
        c, tokens = self.config, self.batch["tokens"]
        embed, layers = params["transformer/embed"], params["transformer/layers"]
        x = embed["tokens"][tokens]
        if "positions" in embed:
            x = x + embed["positions"][: tokens.shape[1]]
        counts, losses, gaps = [], [], []
        for i in range(c.model.layers):
            p = {name: leaf[place] for name, leaf in layers.items() if (place := self.place(name, i)) is not None}

            def norm(name, x, i=i):
                return self.norm(params[f"transformer/layers/{name}"]["scale"][i], x)

            h = norm("norm" if c.model.block == "parallel" else "attention_norm", x)
            attended = self.attend(p, h)
            if c.model.block == "sequential":
                x = x + attended
                attended, h = 0.0, norm("feed_forward_norm", x)
            if "router" in p:
                y, count, loss, gap = self.mix(p, h)
                counts.append(count), losses.append(loss), gaps.append(gap)
            else:
                y = self.feed_forward(p, "", h)
            x = x + attended + y
        out = self.norm(params["transformer/head/norm"]["scale"], x) @ params["transformer/head"]["w"]
        out = out[..., : c.model.vocab]
        top = out.max(-1)
        log_z = top + np.log(np.exp(out - top[..., None]).sum(-1))
        nats = (log_z - np.take_along_axis(out, self.batch["targets"][..., None], -1)[..., 0]).mean()
        objective = nats + c.training.z_loss * (log_z**2).mean() + sum(losses)
        return float(nats), float(objective), np.stack(counts), min(gaps)

    def place(self, name: str, layer: int) -> int | None:
        """Returns the index of a layer in the array of this name; None: the layer has none."""
        keys = self.config.experts
        pattern = keys.expert_pattern or "e"
        kinds = ["d" if i < keys.dense_first else pattern[(i - keys.dense_first) % len(pattern)] for i in range(layer)]
        kind = "d" if layer < keys.dense_first else pattern[(layer - keys.dense_first) % len(pattern)]
        if name.startswith(("expert", "shared", "router")):
            return kinds.count("e") if kind == "e" else None
        if name in ("up", "gate", "down"):
            return kinds.count("d") if kind == "d" else None
        return layer

    def norm(self, scale, x):
        if self.config.model.norm == "layernorm":
            x = x - x.mean(-1, keepdims=True)
        return scale * x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config.model.norm_eps)

    def attend(self, p, h):
        """Returns causal attention without rotary positions."""
        B, T, D = h.shape
        H, K = self.config.model.heads, D // self.config.model.heads
        q, k, v = ((h @ p[name]).reshape(B, T, -1, K) for name in "qkv")
        k, v = (np.repeat(x, H // x.shape[2], axis=2) for x in (k, v))
        scores = np.einsum("bthk,bshk->bhts", q, k) / math.sqrt(K)
        scores = np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = weights / weights.sum(-1, keepdims=True)
        return np.einsum("bhts,bshk->bthk", weights, v).reshape(B, T, D) @ p["o"]

    def feed_forward(self, p, prefix, h, expert=...):
        u, kind = h @ p[f"{prefix}up"][expert], self.config.model.activation
        active = ACTIVATIONS[GATES.get(kind, kind)]
        u = active(h @ p[f"{prefix}gate"][expert]) * u if kind in GATES else active(u)
        return u @ p[f"{prefix}down"][expert]

    def mix(self, p, h):
        """Returns (the sum of each token's experts, pairs of each expert, the router's losses, the smallest gap)."""
        keys = self.config.experts
        E, C = keys.experts, keys.experts_per_token
        logits = h @ p["router"]
        exps = np.exp(logits)
        scores = exps / exps.sum(-1, keepdims=True) if keys.router == "softmax" else 1 / (1 + np.exp(-logits))
        ranked = scores + p["router_bias"] if keys.balance_rate else scores
        order = np.argsort(-ranked, axis=-1, kind="stable")
        descending = np.take_along_axis(ranked, order, -1)
        gap = (descending[..., C - 1] - descending[..., C]).min() if C < E else np.inf
        chosen = np.zeros_like(scores)
        np.put_along_axis(chosen, order[..., :C], 1.0, -1)
        gates = (ranked if self.fault == "bias in the gate" else scores) * chosen
        if keys.router_norm:
            gates = gates / gates.sum(-1, keepdims=True)
        gates = gates * keys.router_scale
        if self.fault == "dropped token":
            gates[0, 0, order[0, 0, 0]] = 0
        y = np.zeros_like(h)
        for b, t in np.ndindex(*h.shape[:2]):
            for e in np.flatnonzero(chosen[b, t]):
                y[b, t] += gates[b, t, e] * self.feed_forward(p, "expert_", h[b, t], e)
        if keys.shared_width:
            shared = self.feed_forward(p, "shared_", h)
            y = y + (shared / (1 + np.exp(-(h @ p["shared_scale"])))[..., None] if keys.shared_gate else shared)
        share = scores / scores.sum(-1, keepdims=True)
        parts = 2 if self.fault == "balance per microbatch" else 1
        balance = np.mean([
            E * (rows.mean((0, 1)) / C * part.mean((0, 1))).sum()
            for rows, part in zip(np.split(chosen, parts), np.split(share, parts), strict=True)
        ])  # fmt: skip
        loss = keys.balance_loss * balance + keys.router_z_loss * (np.log(exps.sum(-1)) ** 2).mean()
        return y, chosen.sum((0, 1)), loss, gap

    def slope(self, params: dict, module: str, name: str, direction: np.ndarray, step: float = 1e-5) -> float:
        """Returns the derivative of the objective along a direction of one parameter."""
        found = []
        for sign in (1, -1):
            moved = params[module] | {name: params[module][name] + sign * step * direction}
            found.append(self.run(params | {module: moved})[1:3])
        assert (found[0][1] == found[1][1]).all()  # no route changes on the way
        return (found[0][0] - found[1][0]) / (2 * step)
