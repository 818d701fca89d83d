"""Vectors to logits, split over the vocabulary, and the loss of each token without ever gathering them."""

import dataclasses
import math
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax import lax

from shardformer.config import Config
from shardformer.shards import axes
from shardformer.shards.norm import Norm
from shardformer.shards.parameters import add_bias, weight, zeros


class TokenLoss(NamedTuple):
    """Of every token, replicated over mp."""

    nats_BT: jax.Array  # cross-entropy
    log_z_BT: jax.Array  # the log-partition, which the z-loss keeps small
    correct_BT: jax.Array  # whether the target is the most likely token


@dataclasses.dataclass
class ProjectionShard(hk.Module):
    config: Config
    name: str = "head"

    def __call__(self, x_BTD, tied_table_vD=None):
        """This shard's logits_BTv, in float32; padded entries are -inf."""
        c = self.config
        h_BTD = axes.fan_out(Norm(c)(x_BTD))
        v = axes.local(c.padded_vocab)
        if tied_table_vD is None:
            w_Dv = weight("w", [c.d_model, v], c.init_std or 1 / math.sqrt(c.d_model))
            spec = "btd,dv->btv"
        else:
            w_Dv, spec = tied_table_vD, "btd,vd->btv"
        logits_BTv = jnp.einsum(spec, h_BTD, w_Dv.astype(h_BTD.dtype), preferred_element_type=jnp.float32)
        if tied_table_vD is None and c.bias != "none" and c.head_bias:
            logits_BTv = add_bias(logits_BTv, zeros("bias", v))
        real_v = axes.offset(v) + jnp.arange(v) < c.vocab
        return jnp.where(real_v[None, None], logits_BTv, -jnp.inf)

    def loss(self, x_BTD, targets_BT, tied_table_vD=None) -> TokenLoss:
        """Only [B, T]-sized numbers cross the wire: a maximum, two sums, and an index."""
        logits_BTv = self(x_BTD, tied_table_vD)
        v = logits_BTv.shape[-1]
        local_max_BT = lax.stop_gradient(logits_BTv).max(-1)
        max_BT = lax.pmax(local_max_BT, axes.MP)
        log_z_BT = max_BT + jnp.log(axes.reduce(jnp.exp(logits_BTv - max_BT[..., None]).sum(-1)))

        column_BT = targets_BT - axes.offset(v)
        held_BT = (column_BT >= 0) & (column_BT < v)
        column_BT1 = jnp.where(held_BT, column_BT, 0)[..., None]
        logit_BT = jnp.take_along_axis(logits_BTv, column_BT1, axis=-1)[..., 0]
        target_logit_BT = axes.reduce(jnp.where(held_BT, logit_BT, jnp.zeros_like(logit_BT)))

        # The lowest index among the largest, across shards: a shard without the maximum bids a number past the end.
        best_BT = axes.offset(v) + lax.stop_gradient(logits_BTv).argmax(-1)
        predicted_BT = lax.pmin(jnp.where(local_max_BT == max_BT, best_BT, self.config.padded_vocab), axes.MP)
        return TokenLoss(log_z_BT - target_logit_BT, log_z_BT, predicted_BT == targets_BT)
