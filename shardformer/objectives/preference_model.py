"""The model under an objective over preference pairs: the loss, its gradient and its metrics.

A batch row is one or more pairs: `tokens`, `targets` and `scored` are [B, 2, T], chosen and rejected, so that dp,
microbatches and processes split between pairs. Every mean is over the pairs of the global batch.
"""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from shardformer import collectives
from shardformer.config.names import CP
from shardformer.data.chat.preference_windows import MOST_PAIRS
from shardformer.model.model import Model, choose_counts
from shardformer.model.task_on_mesh import Sums, TaskOnMesh
from shardformer.objectives.objective import Pairs
from shardformer.parallel.microbatch import AccumulationType
from shardformer.shards.pair_transformer import PairTransformerShard

OF_TOKENS = ("tokens", "targets", "scored", "documents")  # of a batch, [B, 2, T]


class PairLoss(NamedTuple):
    """Means over the pairs of a batch; the first three stand where those of `Loss` do."""

    loss: jax.Array  # the minimised loss, with the SFT term
    z_loss: jax.Array
    accuracy: jax.Array  # share of pairs whose chosen side has the larger reward
    chosen_reward: jax.Array
    rejected_reward: jax.Array
    reward_margin: jax.Array
    chosen_logp: jax.Array
    rejected_logp: jax.Array
    sft_loss: jax.Array  # nats per token of the SFT term; 0 without it
    kl: jax.Array  # KTO's divergence from the reference, at least 0; 0 for other objectives


class Losses(NamedTuple):
    """The loss and the two rewards of every pair, [b, K] of up to K pairs in a row."""

    loss: Array
    chosen: Array
    rejected: Array


class Sides(NamedTuple):
    """Sums over the scored tokens of each side, [b, 2, K]: chosen, then rejected."""

    logp: Array  # log-probabilities
    reference: Array  # those under the model that training starts from
    tokens: Array


class PreferenceModel(Model):
    """`Model` with the objective of `config.preferences`."""

    losses = PairLoss
    make_batch = TaskOnMesh.make_batch
    shard: PairTransformerShard
    shard_class = PairTransformerShard

    def __init__(self, layout, mesh):
        super().__init__(layout, mesh)
        self.pairs = cast(Pairs, self.config.objective)
        if self.pairs.measures_kl:
            self.count_first = measure_constants

    def batch_shapes(self) -> dict:
        """Returns the shapes of the arrays of a training batch, without their shardings."""
        c = self.config
        rows, slots = c.training.batch, MOST_PAIRS if c.data.documents == "masked" else 1
        shapes = {
            "tokens": (2, c.model.seq),
            "targets": (2, c.model.seq),
            "scored": (2, c.model.seq),
            "pairs": (slots,),
        }
        if c.data.documents == "masked":
            shapes["documents"] = (2, c.model.seq)
        if self.pairs.needs_references:
            shapes["references"] = (2, slots)
        if self.pairs.measures_kl:
            shapes |= {f"kl_{name}": (2, c.model.seq) for name in ("tokens", "targets", "scored")}
            shapes |= {"kl_references": (2,), "kl_pairs": (2,)}
        if c.preferences.has_sft_term:
            shapes["sft"] = (c.model.seq,)
        integers = ("tokens", "targets", "documents", "kl_tokens", "kl_targets")
        return {
            name: jax.ShapeDtypeStruct((rows, *shape), jnp.int32 if name in integers else jnp.float32)
            for name, shape in shapes.items()
        }

    def prepare(self, batch):
        return super().prepare(normalise_pairs(batch))

    def sums(self, params, batch) -> Sums:
        """Returns the sums over a batch's pairs: their number, their losses without the SFT term, the right orders."""

        def body(params, batch):
            params, rows = self.replicas.make_local(params), self.number_rows(batch)
            counts = self.count_first(self, params, rows, None)

            def sums(batch):
                losses, _, _ = self._compare(params, batch, counts=counts)
                right = (losses.chosen > losses.rejected).astype(jnp.float32)
                parts = batch["pairs"], batch["pairs"] * losses.loss, batch["pairs"] * right, batch["pairs"] * 0
                return Sums(*(part.sum() for part in parts))

            result = self.run_rows(sums, rows, accumulator=AccumulationType.SUM)
            return collectives.psum(result, self.row_spec[0])

        return self.shard_map(body, (self.specs, self.row_spec), P())(params, batch)

    def log_probabilities(self, params, batch) -> jax.Array:
        """Returns the log-probability of every side [B, 2, K]; those of KTO's other answers behind them, [B, 4, 1]."""

        def body(params, batch):
            params, rows = self.replicas.make_local(params), self.number_rows(batch)
            logp_b2K = self._measure(params, rows, with_references=False)[0].logp
            if not self.pairs.measures_kl:
                return logp_b2K
            other = self._measure(params, select_mismatched(rows), with_references=False)[0].logp
            return jnp.concatenate([logp_b2K, other], axis=1)

        return self.shard_map(body, (self.specs, self.row_spec), self.row_spec)(params, batch)

    # Shard view: the parts of the bodies above.

    def local_objective(self, params, batch, dropout_key=None, counts=None):
        """Returns (the minimised loss, `PairLoss`) of this shard's rows; weights of pairs are of the global batch."""
        if self.pairs.measures_kl and counts is None:
            counts = None, measure_kl(self, params, batch)
        losses, sides, measured = self._compare(params, batch, dropout_key, counts)
        weight_bK, rows = batch["pairs"], batch["pairs"].shape[0]

        def mean(values_bK):
            return (values_bK * weight_bK).sum() / rows

        def sum_tokens(values_b2T):
            return self._sum_over_context(values_b2T.sum((1, 2)))

        nats_b2T, log_z_b2T, of_records = measured
        sft = jnp.zeros_like(mean(losses.loss))
        if "sft" in batch:
            sft_bT = self.layout.attention.take_batch({"sft": batch["sft"]})["sft"]
            sft = self._sum_over_context((nats_b2T[:, 0] * sft_bT).sum()) / rows
        scored_b2T = self._take(batch, "scored")
        z_loss = (sum_tokens(jnp.square(log_z_b2T) * scored_b2T) * batch["scored_weight"]).sum() / rows
        of_pairs = self.add_z_loss(mean(losses.loss) + self.pairs.keys.sft * sft, z_loss)
        # The shards of a context have the same objective, each its part of the gradient, and `_mean` averages over
        # them. Marked as varying, the sums over the context get the cotangents of all shards.
        objective = collectives.vary_like(of_pairs, nats_b2T) + of_records
        right = (losses.chosen > losses.rejected).astype(jnp.float32)
        means = [losses.chosen, losses.rejected, losses.chosen - losses.rejected, sides.logp[:, 0], sides.logp[:, 1]]
        kl = counts[1] if self.pairs.measures_kl else jnp.zeros_like(sft)
        result = PairLoss(objective, z_loss, mean(right), *map(mean, means), sft, kl)
        return objective, lax.stop_gradient(result)

    def local_records(self, params, batch, dropout_key=None):
        return super().local_records(params, self._flatten(batch), dropout_key)

    def _compare(self, params, batch, dropout_key=None, counts=None) -> tuple[Losses, Any, Any]:
        """Returns the losses of the pairs, the sums of their sides, and (nats, log-partitions, records' objective)."""
        constants, kl = counts if self.pairs.measures_kl else (counts, 0.0)
        sides, measured = self._measure(params, batch, dropout_key, constants)
        return compute_losses(sides, self.pairs, kl), sides, measured

    def _measure(self, params, batch, dropout_key=None, counts=None, with_references=None) -> tuple[Sides, tuple]:
        """Returns the sums of the sides, and (nats, log-partitions, records' objective)."""
        with_references = self.pairs.needs_references if with_references is None else with_references
        flat = self._flatten(batch)
        tokens = flat["tokens"].shape[1]
        local = self.layout.attention.take_batch(flat)
        dropout = self.draw_masks(dropout_key, local, tokens)
        token, of_records = self.shard.token_losses(
            params, local["tokens"], local["targets"], dropout, local.get("documents"), counts
        )
        nats_b2T, log_z_b2T = (x.reshape(-1, 2, x.shape[-1]) for x in (token.nats_BT, token.log_z_BT))
        scored_b2T = local["scored"].reshape(nats_b2T.shape)
        logp_b2K, tokens_b2K = self._sum_sides(batch, -nats_b2T * scored_b2T, scored_b2T)
        reference_b2K = batch["references"] if with_references else jnp.zeros_like(logp_b2K)
        return Sides(logp_b2K, reference_b2K, tokens_b2K), (nats_b2T, log_z_b2T, of_records)

    def _sum_sides(self, batch, *values_b2T):
        """Returns the sums [n, b, 2, K] of n arrays over the tokens of each side of each pair."""
        of_pair_b2TK = jnp.ones((*values_b2T[0].shape, 1))
        if "documents" in batch:
            documents_b2T, slots = self._take(batch, "documents", as_targets=True), batch["pairs"].shape[1]
            of_pair_b2TK = (documents_b2T[..., None] == jnp.arange(slots)[None, None, None]).astype(jnp.float32)
        return self._sum_over_context(jnp.einsum("xbst,bstk->xbsk", jnp.stack(values_b2T), of_pair_b2TK))

    def _take(self, batch, name: str, as_targets: bool = False):
        """Returns this shard's tokens of an array [b, 2, T]; documents too, which attention needs complete."""
        x_b2T = batch[name]
        flat = {"targets" if as_targets else name: x_b2T.reshape(-1, x_b2T.shape[-1])}
        [local] = self.layout.attention.take_batch(flat).values()
        return local.reshape(-1, 2, local.shape[-1])

    def _sum_over_context(self, x):
        return collectives.psum(x, CP) if self.config.parallel.cp > 1 else x

    @staticmethod
    def _flatten(batch) -> dict:
        """Returns a batch of sides [2b, T]: 2n is the chosen and 2n + 1 the rejected side of row n."""
        flat = {name: batch[name].reshape(-1, batch[name].shape[-1]) for name in OF_TOKENS if name in batch}
        return flat | {"examples": (2 * batch["examples"][:, None] + jnp.arange(2)[None]).reshape(-1)}


def measure_constants(model: PreferenceModel, params, batch, dropout_key) -> tuple:
    """Returns the experts' counts that the objective needs, and KTO's divergence, over the global batch. Shard view."""
    return choose_counts(model.config)(model, params, batch, dropout_key), measure_kl(model, params, batch)


def measure_kl(model: PreferenceModel, params, batch) -> jax.Array:
    """Returns KTO's divergence over the global batch: the mean log-ratio of answers to other prompts, at least 0.

    Computed before the gradients of the microbatches, without dropout and without a gradient. Shard view.
    """

    def sums(rows):
        logp_b2 = model._measure(params, select_mismatched(rows), with_references=False)[0].logp[..., 0]
        ratio_b2 = (logp_b2 - rows["kl_references"]) * rows["kl_pairs"]
        return jnp.stack([ratio_b2.sum(), rows["kl_pairs"].sum()])

    total = model.run_rows(sums, batch, accumulator=AccumulationType.SUM)
    total = collectives.psum(total, model.row_spec[0])
    return lax.stop_gradient(jnp.maximum(total[0] / jnp.maximum(total[1], 1), 0))


def select_mismatched(rows: dict) -> dict:
    """Returns the rows with the answers of other pairs in place of their own."""
    names = ("tokens", "targets", "scored")
    return rows | {name: rows[f"kl_{name}"] for name in names} | {"pairs": rows["pairs"]}


def normalise_pairs(batch) -> dict:
    """Scales the weights of pairs, and of the tokens of the SFT term, to a sum of 1 a row over the global batch.

    Means over parts of the batch are then means over its pairs, however the rows are split. `scored_weight` of a row
    does the same for the scored tokens. Global view.
    """
    rows = batch["pairs"].shape[0]
    scored_weight = jnp.full(rows, rows / jnp.maximum(batch["scored"].sum(), 1))
    batch = batch | {"pairs": batch["pairs"] * rows / jnp.maximum(batch["pairs"].sum(), 1)}
    batch |= {"scored_weight": scored_weight}
    if "sft" in batch:
        batch |= {"sft": batch["sft"] * rows / jnp.maximum(batch["sft"].sum(), 1)}
    return batch


def compute_losses(sides: Sides, pairs: Pairs, kl: Array | float = 0.0) -> Losses:
    """Returns the loss of every pair under an objective; `kl` is the divergence that KTO needs."""
    keys = pairs.keys
    score = sides.logp - sides.reference
    normed = score / jnp.maximum(sides.tokens, 1)  # a slot without a pair has no tokens
    used = normed if pairs.is_normed else score
    margin = used[:, 0] - used[:, 1]
    if pairs.name == "ipo":
        loss = jnp.square(margin - 1 / (2 * keys.beta))
    elif pairs.name == "kto":
        loss = 1 - (jax.nn.sigmoid(keys.beta * (score[:, 0] - kl)) + jax.nn.sigmoid(keys.beta * (kl - score[:, 1]))) / 2
    elif pairs.name == "orpo":
        loss = -keys.beta * jax.nn.log_sigmoid(margin - (log_complement(normed[:, 0]) - log_complement(normed[:, 1])))
    else:
        gap = keys.reward_gap if pairs.name == "simpo" else 0.0
        loss = smooth_sigmoid_loss(keys.beta * margin - gap, keys.label_smoothing)
    rewards = keys.beta * jax.lax.stop_gradient(normed if pairs.name in ("orpo", "simpo") else score)
    return Losses(loss, rewards[:, 0], rewards[:, 1])


def smooth_sigmoid_loss(margin: Array, smoothing: float) -> Array:
    """Returns -log sigmoid of a margin, or its mean if the fraction `smoothing` of the labels is wrong."""
    right, wrong = jax.nn.log_sigmoid(margin), jax.nn.log_sigmoid(-margin)
    return -(1 - smoothing) * right - smoothing * wrong


def log_complement(logp: Array) -> Array:
    """Returns log(1 - exp(logp)) of a log-probability below 0, without cancellation at either end.

    An empty slot's log-probability is 0, whose complement would be -inf: it gets that of a half instead.
    """
    logp = jnp.where(logp < 0, logp, -jnp.log(2.0))
    near_zero = logp > -jnp.log(2.0)
    first = jnp.log(-jnp.expm1(jnp.where(near_zero, logp, -1.0)))
    return jnp.where(near_zero, first, jnp.log1p(-jnp.exp(jnp.where(near_zero, -1.0, logp))))
