"""The model under a policy gradient on sampled answers: the loss, its gradient and its metrics.

Every mean is over the tokens of the sampled answers in the global batch, as `weights` weighs them. The objectives
differ in the ratio that weighs an advantage, in the weights, and in the advantages of `rollouts.py`:

    grpo     the ratio of each token's probability to the sampler's
    dr_grpo  the same; the sum over an answer's tokens is divided by answer_tokens, whatever their number
    gspo     the geometric mean of an answer's ratios
    rloo     the product of an answer's ratios; the divergence is a part of the rewards, not of the loss
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardformer import collectives
from shardformer.config.names import CP
from shardformer.model.model import Model
from shardformer.model.task_on_mesh import TaskOnMesh
from shardformer.objectives.reward_model import RewardModel, fit_rows, names_run, read_reward_config
from shardformer.shards.pair_transformer import PairTransformerShard


class PolicyLoss(NamedTuple):
    """Means over the tokens of the answers, or over the answers; the first three are those of `Loss`."""

    loss: jax.Array  # the minimised loss
    z_loss: jax.Array
    accuracy: jax.Array  # share of the answers with a reward above 0
    reward: jax.Array
    kl: jax.Array  # the estimated divergence from the start of the run, in nats per token; 0 with beta=0
    # The share of the tokens (gspo, rloo: of the answers, as they are weighed) whose ratio is clipped; of the gradient
    # they have only the divergence's.
    clip_share: jax.Array
    answer_length: jax.Array  # tokens
    logp_gap: jax.Array  # mean distance of a token's log-probability from the sampler's


class PolicyModel(Model):
    """`Model` with an objective over sampled answers."""

    losses = PolicyLoss
    batch_is_stored = True
    make_batch = TaskOnMesh.make_batch
    shard: PairTransformerShard
    shard_class = PairTransformerShard

    def batch_shapes(self) -> dict:
        """Returns the shapes of a rollout: rows of a prompt and its sampled answer.

        `weights` are 0 outside of the answers. `advantages`, and log-probabilities under the sampler and the reference,
        are of each target; `rewards` and `lengths` are of each answer.
        """
        rows, seq = self.config.training.batch, self.config.model.seq
        ids, values = jax.ShapeDtypeStruct((rows, seq), jnp.int32), jax.ShapeDtypeStruct((rows, seq), jnp.float32)
        shapes = {"tokens": ids, "targets": ids, "weights": values, "advantages": values, "sampled": values}
        if self.config.preferences.beta:
            shapes["references"] = values
        return shapes | dict.fromkeys(("rewards", "lengths"), jax.ShapeDtypeStruct((rows,), jnp.float32))

    def companion_shapes(self) -> dict:
        """Returns the parameters of the reward model that reward= names, on the policy's mesh."""
        name = self.config.start.reward
        if not names_run(name):
            return {}
        return RewardModel.on(fit_rows(read_reward_config(name), self.config), self.mesh).abstract

    def prepare(self, batch):
        """Returns the batch with weights of mean 1 and, for dr_grpo, each row's factor of the loss."""
        prepared = super().prepare(batch)
        if self.config.preferences.objective != "dr_grpo":
            return prepared
        lengths = batch["lengths"]
        share = lengths.mean() / self.config.preferences.answer_tokens
        return prepared | {"loss_scales": jnp.full_like(lengths, share)}

    # Shard view.

    def local_objective(self, params, batch, dropout_key=None, counts=None):
        """Returns (the minimised loss, `PolicyLoss`) of this shard's rows; weights are of the global batch."""
        keys, local = self.config.preferences, self.layout.attention.take_batch(batch)
        token, of_records = self.shard.token_losses(
            params, local["tokens"], local["targets"], None, None, constants=counts
        )
        weights_BT, advantages_BT = local["weights"], local["advantages"]

        def mean(x_BT):
            return (x_BT * weights_BT).mean()

        def subtract(x_BT, y_BT):  # 0 outside of the answers, where the exponential could overflow
            return jnp.where(weights_BT > 0, x_BT - y_BT, 0)

        gap_BT = subtract(-token.nats_BT, local["sampled"])
        ratio_BT = jnp.exp(self._join_ratios(gap_BT, local["lengths"]))  # [B, 1] of gspo and rloo
        clipped_BT = jnp.clip(ratio_BT, 1 - keys.clip_ratio, 1 + keys.clip_ratio)
        gain_BT, limit_BT = ratio_BT * advantages_BT, clipped_BT * advantages_BT
        kl_BT = jnp.zeros_like(gap_BT)
        if keys.beta:
            behind_BT = subtract(local["references"], -token.nats_BT)
            # As in TRL since DeepSeek-V3.2: a token's ratio (grpo, dr_grpo) makes the gradient that of the divergence.
            # An answer's ratio (gspo) does not. With rloo this is only a metric.
            kl_BT = ratio_BT * (jnp.exp(behind_BT) - behind_BT - 1)
        z_loss = mean(jnp.square(token.log_z_BT))
        loss_BT = -jnp.minimum(gain_BT, limit_BT)
        if keys.beta and keys.objective != "rloo":
            loss_BT = keys.beta * kl_BT + loss_BT
        if keys.objective == "dr_grpo":
            loss_BT = loss_BT * local["loss_scales"][:, None]
        objective = self.add_z_loss(mean(loss_BT), z_loss) + of_records
        clipped = mean((limit_BT < gain_BT).astype(jnp.float32))
        of_tokens = mean(kl_BT), clipped, self._mean_of_rows(local["lengths"]), mean(jnp.abs(gap_BT))
        rewards_B = local["rewards"]
        of_answers = self._mean_of_rows(rewards_B > 0), self._mean_of_rows(rewards_B)
        result = PolicyLoss(objective, z_loss, *of_answers, *of_tokens)
        return objective, lax.stop_gradient(result)

    def _join_ratios(self, gap_BT, length_B):
        """Returns the logarithms of the ratios: of each token, or [B, 1] of each answer."""
        objective = self.config.preferences.objective
        if objective not in ("gspo", "rloo"):
            return gap_BT
        gap_B = gap_BT.sum(-1)
        gap_B = collectives.psum(gap_B, CP) if self.config.parallel.cp > 1 else gap_B
        return (gap_B / jnp.maximum(length_B, 1) if objective == "gspo" else gap_B)[:, None]

    @staticmethod
    def _mean_of_rows(x_B):
        return x_B.astype(jnp.float32).mean()
