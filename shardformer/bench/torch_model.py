"""The reference step in plain torch, run in a process that torch_twin.py starts and that does not import JAX."""

import signal
import time

from shardformer.config import Config

PARAMETERS = "parameters"  # the request for the parameters after the last step


def run_steps(connection, c: Config, compiled: bool, on_gpu: bool, parameters, decayed, rates) -> None:
    """Receives batches, and answers with the loss of the last one and the CPU seconds, or with the text of an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    try:
        step, current = make_step(c, compiled, on_gpu, parameters, decayed, rates)
        while True:
            request = connection.recv()
            if request == PARAMETERS:
                connection.send({name: value.detach().cpu().numpy() for name, value in current.items()})
                continue
            started = time.process_time()
            for batch in request:
                loss = step(batch)
            connection.send((float(loss), time.process_time() - started))
    except (EOFError, ConnectionError):  # the parent process has ended
        return
    except Exception as error:  # any error of torch, such as a missing compiler
        connection.send(f"{type(error).__name__}: {error}")


def make_step(c: Config, compiled: bool, on_gpu: bool, parameters, decayed, rates):
    """Returns the next step as a function of a batch, with torch's attention, AdamW and clipping, and its parameters.

    The step returns its loss.
    """
    import torch

    # On a GPU JAX multiplies float32 in TF32 by default and torch does not; both must have one precision.
    torch.backends.cuda.matmul.allow_tf32 = True
    device = "cuda" if on_gpu and torch.cuda.is_available() else "cpu"
    flat = {name: torch.tensor(value, device=device, requires_grad=True) for name, value in parameters.items()}
    groups = [
        {"params": [p for name, p in flat.items() if (name in decayed) == decays],
         "weight_decay": c.optimizer.weight_decay if decays else 0.0}
        for decays in (True, False)
    ]  # fmt: skip
    fused = True if device == "cuda" else None  # None lets torch choose, which never fuses by itself
    optimizer = torch.optim.AdamW(groups, betas=(c.optimizer.beta1, c.optimizer.beta2), fused=fused)
    model = TorchModel(c, torch)
    forward = torch.compile(model.forward) if compiled else model.forward
    remaining = iter(rates)

    def step(batch):
        tokens, targets = (torch.tensor(batch[name].astype("i8"), device=device) for name in ("tokens", "targets"))
        rate = next(remaining, rates[-1])
        for group in optimizer.param_groups:
            group["lr"] = float(rate)
        loss = forward(flat, tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        if c.optimizer.clip:
            torch.nn.utils.clip_grad_norm_(flat.values(), c.optimizer.clip)
        optimizer.step()
        return loss.detach()

    return step, flat


class TorchModel:
    """`reference.forward` in torch."""

    def __init__(self, c: Config, torch):
        self.c, self.torch, self.functions = c, torch, torch.nn.functional
        self.dtype = getattr(torch, c.parallel.dtype)

    def forward(self, params, tokens, targets):
        c, embed = self.c, "transformer/embed"
        x = params[f"{embed}/tokens"][tokens].to(self.dtype)
        if c.model.positions == "learned":
            x = x + params[f"{embed}/positions"][: tokens.shape[1]].to(self.dtype)
        x = self.drop(x)
        for i in range(c.model.layers):
            x = self.layer({name.removeprefix(f"transformer/layers_{i}/"): p for name, p in params.items()}, x)
        h = self.normalise(params, "transformer/head/norm", x)
        w = params[f"{embed}/tokens"].T if c.model.tied else params["transformer/head/w"]
        logits = (h @ w.to(h.dtype)).float()
        if not c.model.tied and c.model.bias != "none":
            logits = logits + params["transformer/head/bias"]
        logits = logits[..., : c.model.vocab].flatten(0, 1)
        loss = self.functions.cross_entropy(logits, targets.flatten())
        return loss + c.training.z_loss * logits.logsumexp(-1).square().mean() if c.training.z_loss else loss

    def layer(self, p, x):
        if self.c.model.block == "parallel":
            h = self.normalise(p, "norm", x)
            return x + self.drop(self.attention(p, h) + self.feed_forward(p, h))
        x = x + self.drop(self.attention(p, self.normalise(p, "attention_norm", x)))
        return x + self.drop(self.feed_forward(p, self.normalise(p, "feed_forward_norm", x)))

    def attention(self, p, h):
        B, T, D = h.shape
        shape = B, T, self.c.model.heads, D // self.c.model.heads
        q, k, v = (self.dense(p, name, h).view(shape).transpose(1, 2) for name in "qkv")
        values = self.functions.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.c.training.dropout)
        return self.dense(p, "o", values.transpose(1, 2).reshape(B, T, D))

    def feed_forward(self, p, h):
        return self.dense(p, "down", self.functions.gelu(self.dense(p, "up", h), approximate="tanh"))

    def dense(self, p, name, x):
        y = x @ p[name].to(x.dtype)
        return y + p[f"{name}_bias"].to(x.dtype) if f"{name}_bias" in p else y

    def normalise(self, p, name, inputs):
        x, scale, offset = inputs.float(), p[f"{name}/scale"], p.get(f"{name}/offset")
        size, eps = x.shape[-1:], self.c.model.norm_eps
        if self.c.model.norm == "layernorm":
            return self.functions.layer_norm(x, size, scale, offset, eps).to(inputs.dtype)
        x = self.functions.rms_norm(x, size, scale, eps)
        return (x if offset is None else x + offset).to(inputs.dtype)

    def drop(self, x):
        return self.functions.dropout(x, self.c.training.dropout) if self.c.training.dropout else x
