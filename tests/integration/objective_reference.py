"""The objectives once more: plain formulas of the log-probabilities that the dense reference gives."""

import jax
import jax.numpy as jnp
import numpy as np

from shardformer.analysis import dense_reference


def compute_objective(config, params, batch, teacher=None):
    """Returns the minimised loss; `teacher` is the configuration of the parameters `batch["teacher"]`."""
    if config.preferences.objective == "distill":
        return distill(config, teacher, params, batch)
    if config.preferences.objective == "mtp":
        return predict_two_tokens(config, params, batch)
    if config.preferences.objective == "reward":
        return compare_rewards(config, params, batch)
    return learn_rewards(config, params, batch) if config.objective.takes_reward else compare(config, params, batch)


def mean(values, weights):
    return (values * weights).sum() / weights.sum()


def compare(config, params, batch):
    """Returns the loss of pairs [B, 2, T]."""
    keys = config.preferences
    logp, tokens, nats, squares = measure_sides(config, params, batch, "")
    score = logp - batch.get("references", jnp.zeros_like(logp))
    margin = score[:, 0] - score[:, 1]
    mean_logp = logp / jnp.maximum(tokens, 1)
    mean_score = score / jnp.maximum(tokens, 1)
    if keys.objective == "dpo":
        margin = keys.beta * (mean_score[:, 0] - mean_score[:, 1] if keys.length_norm else margin)
        loss = smooth(margin, keys.label_smoothing)
    elif keys.objective == "simpo":
        loss = smooth(keys.beta * (mean_logp[:, 0] - mean_logp[:, 1]) - keys.reward_gap, keys.label_smoothing)
    elif keys.objective == "ipo":
        loss = (mean_score[:, 0] - mean_score[:, 1] - 0.5 / keys.beta) ** 2
    elif keys.objective == "orpo":
        odds = mean_logp - jnp.log(1 - jnp.exp(jnp.where(tokens > 0, mean_logp, -1)))
        loss = keys.beta * jnp.log(1 + jnp.exp(odds[:, 1] - odds[:, 0]))
    else:
        other, _, _, _ = measure_sides(config, params, batch, "kl_")
        kl = jnp.maximum(mean(other[..., 0] - batch["kl_references"], batch["kl_pairs"]), 0)
        kl = jax.lax.stop_gradient(kl)
        gain = jax.nn.sigmoid(keys.beta * (score[:, 0] - kl)) + jax.nn.sigmoid(keys.beta * (kl - score[:, 1]))
        loss = 1 - gain / 2
    total = mean(loss, batch["pairs"]) + config.training.z_loss * mean(squares, batch["scored"])
    return total + keys.sft * mean(nats[:, 0], batch["sft"]) if "sft" in batch else total


def compare_rewards(config, params, batch):
    """Returns the loss of a reward model, whose numbers are the only logits of a model with that head."""
    plain = config.replace(objective="lm", reward_center=0.0, tied=False, logits_scale=1.0, logits_cap=None)
    params = params | {"transformer/head": params["transformer/score"]}
    documents, tokens = batch.get("documents"), batch["tokens"]
    flat = [x if x is None else x.reshape(-1, x.shape[-1]) for x in (tokens, documents)]
    marked = (
        dense_reference.logits(plain, params, flat[0], None, flat[1])[..., 0].reshape(tokens.shape) * batch["scored"]
    )
    slots = range(batch["pairs"].shape[1])
    own = [marked if documents is None else jnp.where(documents == slot, marked, 0) for slot in slots]
    chosen, rejected = jnp.moveaxis(jnp.stack(own, -1).sum(2), 1, 0)
    loss = jnp.log(1 + jnp.exp(rejected - chosen)) + config.preferences.reward_center * (chosen + rejected) ** 2
    return mean(loss, batch["pairs"])


def predict_two_tokens(config, params, batch):
    """Returns the loss of the next token, and the weighted one of the token after it, of rows without their last."""
    tokens, targets = batch["tokens"], batch["targets"]
    weights, documents = batch.get("weights", jnp.ones(tokens.shape)), batch.get("documents")
    of_next, squares = dense_reference.token_losses(config, params, tokens, targets, None, documents)
    second_params = {name.removeprefix("transformer/next/"): p for name, p in params.items() if "/next/" in name}
    h = dense_reference.run_layers(config, params, tokens, None, documents, None)[:, :-1]
    positions = jnp.broadcast_to(dense_reference.positions_of(tokens, documents), tokens.shape)
    e = dense_reference.embed_tokens(config, params, tokens, positions)[:, 1:]
    normed = [
        dense_reference._norm(config, second_params.get(f"join/{name}", {}), x)
        for name, x in (("hidden_norm", h), ("token_norm", e))
    ]
    layer = {name: leaf[0] for name, leaf in second_params["layers"].items()}
    norms = {name.removeprefix("layers/"): {n: leaf[0] for n, leaf in leaves.items()}
             for name, leaves in second_params.items() if name.startswith("layers/")}  # fmt: skip
    norms = {name: norms.get(name, {}) for name in dense_reference.NORMS[config.model.block]} | norms
    of_last = dense_reference._resolve_window(config, config.model.layers - 1)
    before = None if documents is None else documents[:, :-1]
    x = jnp.concatenate(normed, -1) @ second_params["join"]["w"]
    x = dense_reference._layer(of_last, params, layer, norms, x, None, before, None)
    logits = jax.nn.log_softmax(dense_reference.project(config, params, second_params.get("head_norm", {}), x))
    after_next = -jnp.take_along_axis(logits, targets[:, 1:, None], -1)[..., 0]
    has_target = weights[:, 1:]
    if documents is not None:
        has_target = jnp.where(documents[:, 1:] == before, has_target, 0)
    first = mean(of_next, weights) + config.training.z_loss * mean(squares, weights)
    return first + config.preferences.mtp_weight * mean(after_next, has_target)


def add_up(config, losses):
    """Returns the minimised loss of metrics whose `loss` is the language model's; a program has float32 weights."""
    keys = config.preferences
    weights = {"z_loss": config.training.z_loss}
    if keys.objective == "mtp":
        weights |= {"loss": 1.0, "mtp_loss": keys.mtp_weight}
    else:
        weights |= {"loss": 1 - keys.distill_weight, "kl": keys.distill_weight * keys.distill_temperature**2}
    return sum(np.float64(np.float32(weight)) * getattr(losses, name) for name, weight in weights.items())


def smooth(margin, share):
    return -(1 - share) * jnp.log(jax.nn.sigmoid(margin)) - share * jnp.log(jax.nn.sigmoid(-margin))


def measure_sides(config, params, batch, prefix):
    """Returns the sums of log-probabilities and of tokens [B, 2, K], and nats and log-partitions squared [B, 2, T]."""
    tokens, targets, scored = (batch[f"{prefix}{name}"] for name in ("tokens", "targets", "scored"))
    documents = batch.get("documents")
    flat = [x if x is None else x.reshape(-1, x.shape[-1]) for x in (tokens, targets, documents)]
    nats, squares = dense_reference.token_losses(config, params, flat[0], flat[1], None, flat[2])
    nats, squares = nats.reshape(tokens.shape), squares.reshape(tokens.shape)
    slots = batch["pairs"].shape[1]
    ones = jnp.ones(tokens.shape, jnp.float32)
    own = [ones if documents is None else jnp.where(documents == slot, ones, 0) for slot in range(slots)]
    logp = jnp.stack([(-nats * scored * here).sum(-1) for here in own], -1)
    return logp, jnp.stack([(scored * here).sum(-1) for here in own], -1), nats, squares


def learn_rewards(config, params, batch):
    """Returns the loss of answers [B, T]."""
    keys, weights, advantages = config.preferences, batch["weights"], batch["advantages"]
    nats, squares = dense_reference.token_losses(config, params, batch["tokens"], batch["targets"])
    gap = jnp.where(weights > 0, -nats - batch["sampled"], 0)
    if keys.objective == "gspo":
        gap = gap.sum(-1, keepdims=True) / jnp.maximum(batch["lengths"], 1)[:, None]
    elif keys.objective == "rloo":
        gap = gap.sum(-1, keepdims=True)
    ratio = jnp.exp(gap)
    low, high = 1 - keys.clip_ratio, 1 + keys.clip_ratio
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, low, high) * advantages)
    loss = -gain
    if keys.beta and keys.objective != "rloo":
        behind = batch["references"] + nats
        loss = loss + keys.beta * ratio * (jnp.exp(behind) - behind - 1)
    if keys.objective == "dr_grpo":
        loss = loss * batch["lengths"].mean() / keys.answer_tokens
    return mean(loss, weights) + config.training.z_loss * mean(squares, weights)


def distill(config, teacher, params, batch):
    """Returns the weighted divergence and loss of the tokens [B, T]."""
    keys, weights = config.preferences, batch.get("weights", jnp.ones(batch["tokens"].shape))
    documents = batch.get("documents")

    def predict(config, params):
        return dense_reference.logits(config, params, batch["tokens"], None, documents) / keys.distill_temperature

    p, q = jax.nn.log_softmax(predict(teacher, batch["teacher"])), jax.nn.log_softmax(predict(config, params))
    if keys.divergence == "reverse":
        p, q = q, p
    kl = (jnp.exp(p) * (p - q)).sum(-1)
    nats, squares = dense_reference.token_losses(config, params, batch["tokens"], batch["targets"], None, documents)
    share = keys.distill_weight
    total = share * keys.distill_temperature**2 * mean(kl, weights) + (1 - share) * mean(nats, weights)
    return total + config.training.z_loss * mean(squares, weights)
