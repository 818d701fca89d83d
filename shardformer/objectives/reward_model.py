"""A reward model: a number for each answer, trained by the pairs of a chosen and a rejected one (Bradley and Terry).

The number is read at the last token of an answer by a head [d_model, 1], which replaces that of the vocabulary.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardformer import checkpoint, collectives, storage
from shardformer.config import Config, is_hugging_face
from shardformer.config.keys import keys_of, next_multiple
from shardformer.config.names import PREFIX, Stream
from shardformer.config.parallel_keys import ParallelKeys
from shardformer.config.registries import names_code
from shardformer.errors import UsageError
from shardformer.kernels.threefry import THREEFRY
from shardformer.model.model import Model
from shardformer.objectives.preference_model import Losses, PreferenceModel
from shardformer.shards.score_transformer import SCORE, ScoreTransformerShard

HEAD = f"{PREFIX}head"  # of the vocabulary: its matrix if no table is tied to it, and `project` with embed_dim
MODULE = f"{PREFIX}{SCORE}"
TILE = 128  # tokens: rows are as long as a multiple of it


class RewardLoss(NamedTuple):
    """Means over the pairs of a batch; the first three stand where those of `Loss` do."""

    loss: jax.Array  # the minimised loss
    z_loss: jax.Array  # 0, as the model has no logits
    accuracy: jax.Array  # share of pairs whose chosen side has the larger reward
    chosen_reward: jax.Array
    rejected_reward: jax.Array
    reward_margin: jax.Array


class RewardModel(PreferenceModel):
    """`PreferenceModel` whose sides have rewards in place of log-probabilities. `scored` is 1 where one is read."""

    losses = RewardLoss  # type: ignore[assignment]
    unmeasured = ("z_loss",)
    shard: ScoreTransformerShard  # type: ignore[assignment]
    shard_class = ScoreTransformerShard  # type: ignore[assignment]

    @staticmethod
    def abstract_parameters(config: Config) -> dict:
        head = jax.ShapeDtypeStruct((config.model.d_model, 1), jnp.float32)
        return replace_head(Model.abstract_parameters(config), head)

    def draw_parameters(self, seed) -> dict:
        key = jax.random.fold_in(jax.random.key(seed, impl=THREEFRY), Stream.SCORE)
        head = self.config.model.position_std * jax.random.normal(key, (self.config.model.d_model, 1), jnp.float32)
        return replace_head(super().draw_parameters(seed), head)

    def make_base_model(self, base: Config) -> Model:
        """Returns the model that has the parameters of a base: a language model, or another reward model."""
        return self if not base.objective.has_vocabulary else Model.on(self.config.replace(objective="lm"), self.mesh)

    def score(self, params, rows) -> jax.Array:
        """Returns the rewards [B] of the rows `tokens` [B, T], read where `scored` [B, T] is 1."""

        def body(params, rows):
            local = self.layout.attention.take_batch(rows)
            score_BT, _ = self.shard.scores(self.replicas.make_local(params), local["tokens"])
            return self._sum_over_context((score_BT * local["scored"]).sum(-1))

        return self.shard_map(body, (self.specs, self.row_spec), self.row_spec)(params, rows)

    # Shard view: the parts of the bodies above.

    def local_objective(self, params, batch, dropout_key=None, counts=None):
        """Returns (the minimised loss, `RewardLoss`) of this shard's rows; weights of pairs are of the global batch."""
        losses, score_BT, of_records = self._compare(params, batch, dropout_key, counts)
        weight_bK, rows = batch["pairs"], batch["pairs"].shape[0]

        def mean(values_bK):
            return (values_bK * weight_bK).sum() / rows

        # As in `PreferenceModel`: marked as varying, the sums over the context get the cotangents of all shards.
        objective = collectives.vary_like(mean(losses.loss), score_BT) + of_records
        right = (losses.chosen > losses.rejected).astype(jnp.float32)
        rewards = losses.chosen, losses.rejected, losses.chosen - losses.rejected
        result = RewardLoss(objective, jnp.zeros_like(objective), mean(right), *map(mean, rewards))
        return objective, lax.stop_gradient(result)

    def _compare(self, params, batch, dropout_key=None, counts=None) -> tuple[Losses, jax.Array, jax.Array]:
        """Returns the losses of the pairs, the score of every token, and the objective of the layers' records."""
        flat = self._flatten(batch)
        local = self.layout.attention.take_batch(flat)
        dropout = self.draw_masks(dropout_key, local, flat["tokens"].shape[1])
        score_BT, of_records = self.shard.scores(params, local["tokens"], dropout, local.get("documents"), counts)
        of_sides_BT = score_BT * local["scored"]
        [reward_b2K] = self._sum_sides(batch, of_sides_BT.reshape(-1, 2, of_sides_BT.shape[-1]))
        chosen_bK, rejected_bK = reward_b2K[:, 0], reward_b2K[:, 1]
        loss_bK = compute_losses(chosen_bK, rejected_bK, self.pairs.keys.reward_center)
        return Losses(loss_bK, chosen_bK, rejected_bK), score_BT, of_records


def compute_losses(chosen: jax.Array, rejected: jax.Array, center: float) -> jax.Array:
    """Returns the loss of every pair; `center` weighs the square of a pair's sum."""
    loss = -jax.nn.log_sigmoid(chosen - rejected)
    return loss + center * jnp.square(chosen + rejected) if center else loss


def replace_head(params: dict, head) -> dict:
    """Returns the parameters of a language model with this head in place of the vocabulary's."""
    return {module: leaves for module, leaves in params.items() if module != HEAD} | {MODULE: {"w": head}}


def names_run(name: str) -> bool:
    """Returns whether reward= names a folder with a config.json."""
    return bool(name) and not names_code(name) and (storage.location(name) / "config.json").exists()


def read_reward_config(name: str) -> Config:
    """Returns the configuration of the run that reward= names; raises UsageError if it gives no rewards."""
    if is_hugging_face(storage.read_small(storage.location(name) / "config.json")):
        raise UsageError(
            f"reward={name} is in Hugging Face's format, expected a run; convert a classifier with one label, "
            f"convert {name} RUN, or train one on pairs: train base={name} data=PAIRS objective=reward"
        )
    config = checkpoint.read_config(storage.location(name))
    if config.preferences.objective != "reward":
        raise UsageError(
            f"reward={name} was trained with objective={config.preferences.objective}, expected objective=reward"
        )
    return config


def fit_rows(reward: Config, policy: Config) -> Config:
    """Returns the configuration of a reward model on the policy's mesh, for rows that hold all tokens of the policy's.

    A table of learned positions keeps its length.
    """
    seq = reward.model.seq
    if reward.model.positions != "learned":
        seq = next_multiple(policy.model.seq + 1, math.lcm(TILE, 2 * policy.parallel.mp * policy.parallel.cp))
    of_mesh = {name: policy.get(name) for name in keys_of(ParallelKeys) if name not in ("dtype", "loss_chunk")}
    of_rows = {"batch": policy.training.batch, "accum": 1, "documents": "padded", "seq": seq}
    check_frequencies(policy.start.reward, reward, seq)
    try:
        return reward.replace(**of_mesh | of_rows).without_gradients()
    except UsageError as error:
        raise UsageError(f"reward={policy.start.reward} cannot be split over this policy's mesh: {error}") from None


def check_frequencies(name: str, reward: Config, seq: int) -> None:
    """Raises UsageError if rows of `seq` tokens have other frequencies of longrope than those of the training."""
    limit, trained = reward.model.longest_short_row, reward.model.seq
    if limit and (trained > limit) != (seq > limit):
        raise UsageError(
            f"reward={name} was trained in rows of seq={trained}, and would read rows of {seq} tokens here: "
            f"its longrope has other frequencies beyond {limit}; give a reward model that was trained with seq={seq}"
        )
