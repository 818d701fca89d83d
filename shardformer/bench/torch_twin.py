"""The same step in plain torch, where torch is installed: eager, or through `torch.compile`."""

import os

import jax
import numpy as np

from shardformer import optim
from shardformer.bench import reference
from shardformer.bench.contenders import Contender
from shardformer.config import Config
from shardformer.optim.chain import is_decayed

# To find a program in its caches, torch.compile looks through all modules, and Haiku's raise where flax is missing.
WITHOUT_CACHES = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
RATES = 4096  # learning rates that are computed ahead, so that no step asks JAX


def torch_step(c: Config, batch, compiled: bool = False) -> Contender:
    """On one device: torch's own attention, AdamW and clipping. It starts from our parameters."""
    os.environ.update(WITHOUT_CACHES)  # read at the import
    import torch

    device = "cuda" if torch.cuda.is_available() and jax.default_backend() == "gpu" else "cpu"
    flat = {
        f"{module}/{name}": torch.tensor(np.asarray(leaf), device=device, requires_grad=True)
        for module, leaves in reference.initial_parameters(c.replace(dropout=0.0)).items()
        for name, leaf in leaves.items()
    }
    groups = [
        {"params": [p for name, p in flat.items() if is_decayed(name.rpartition("/")[2]) == decayed],
         "weight_decay": c.weight_decay if decayed else 0.0}
        for decayed in (True, False)
    ]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, betas=(c.beta1, c.beta2))
    rates = np.asarray(jax.vmap(optim.learning_rate(c))(np.arange(RATES)))
    tokens, targets = (torch.tensor(batch[name].astype("i8"), device=device) for name in ("tokens", "targets"))
    model = TorchModel(c, torch)
    forward = torch.compile(model.forward) if compiled else model.forward

    def advance(state, number):
        for group in optimizer.param_groups:
            group["lr"] = float(rates[min(number, RATES - 1)])
        loss = forward(flat, tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        if c.clip:
            torch.nn.utils.clip_grad_norm_(flat.values(), c.clip)
        optimizer.step()
        return state, loss.detach().cpu().numpy()

    return Contender("torch compiled" if compiled else "torch eager", 1, advance, None)


class TorchModel:
    """`reference.forward` in torch."""

    def __init__(self, c: Config, torch):
        self.c, self.torch, self.functions = c, torch, torch.nn.functional
        self.dtype = getattr(torch, c.dtype)

    def forward(self, params, tokens, targets):
        c, embed = self.c, "transformer/embed"
        x = params[f"{embed}/tokens"][tokens].to(self.dtype)
        if c.positions == "learned":
            x = x + params[f"{embed}/positions"][: tokens.shape[1]].to(self.dtype)
        x = self.drop(x)
        for i in range(c.layers):
            x = self.layer({name.removeprefix(f"transformer/layers_{i}/"): p for name, p in params.items()}, x)
        h = self.normalise(params, "transformer/head/norm", x)
        w = params[f"{embed}/tokens"].T if c.tied else params["transformer/head/w"]
        logits = (h @ w.to(h.dtype)).float()
        if not c.tied and c.bias != "none":
            logits = logits + params["transformer/head/bias"]
        logits = logits[..., : c.vocab].flatten(0, 1)
        loss = self.functions.cross_entropy(logits, targets.flatten())
        return loss + c.z_loss * logits.logsumexp(-1).square().mean() if c.z_loss else loss

    def layer(self, p, x):
        if self.c.block == "parallel":
            h = self.normalise(p, "norm", x)
            return x + self.drop(self.attention(p, h) + self.feed_forward(p, h))
        x = x + self.drop(self.attention(p, self.normalise(p, "attention_norm", x)))
        return x + self.drop(self.feed_forward(p, self.normalise(p, "feed_forward_norm", x)))

    def attention(self, p, h):
        B, T, D = h.shape
        split = lambda name: self.dense(p, name, h).view(B, T, self.c.heads, D // self.c.heads).transpose(1, 2)
        values = self.functions.scaled_dot_product_attention(
            split("q"), split("k"), split("v"), is_causal=True, dropout_p=self.c.dropout
        )
        return self.dense(p, "o", values.transpose(1, 2).reshape(B, T, D))

    def feed_forward(self, p, h):
        return self.dense(p, "down", self.functions.gelu(self.dense(p, "up", h), approximate="tanh"))

    def dense(self, p, name, x):
        y = x @ p[name].to(x.dtype)
        return y + p[f"{name}_bias"].to(x.dtype) if f"{name}_bias" in p else y

    def normalise(self, p, name, inputs):
        x, scale, offset = inputs.float(), p[f"{name}/scale"], p.get(f"{name}/offset")
        size, eps = x.shape[-1:], self.c.norm_eps
        if self.c.norm == "layernorm":
            return self.functions.layer_norm(x, size, scale, offset, eps).to(inputs.dtype)
        x = self.functions.rms_norm(x, size, scale, eps)
        return (x if offset is None else x + offset).to(inputs.dtype)

    def drop(self, x):
        return self.functions.dropout(x, self.c.dropout) if self.c.dropout else x
