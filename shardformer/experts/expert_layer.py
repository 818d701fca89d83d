"""A mixture of experts as the feed-forward of a layer: the router, this shard's experts, the shared expert.

Every shard of the model has all tokens, and routes them alike. If the experts divide over mp, each shard computes the
pairs of a token and one of its experts; else all pairs, with its part of each expert's width. Both give partial sums,
which the all-reduce of the layer adds up anyway. The gradients of the gates are partial sums too.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from shardformer import collectives
from shardformer.collectives import vary_over_mp
from shardformer.config.names import DP, EXPERT_MATRICES, LAYERS, LORA_IN, LORA_OUT, MP, ROUTER_BIAS, ROUTER_SHIFT
from shardformer.experts import grouped_product
from shardformer.kernels.activations import ACTIVATIONS
from shardformer.kernels.remat import PRODUCT
from shardformer.layout import Layout
from shardformer.shards.layer import Records, TransformerLayerShard
from shardformer.shards.parameters import add_bias, weight, zeros


class Routes(NamedTuple):
    """A layer's record of each row: sums over its tokens. Only `score_BE` and the last two have gradients."""

    count_BE: Array  # pairs of a token and a choice, by expert
    score_BE: Array  # scores, each token's with the sum 1
    square_B: Array  # squared log-partitions of the router
    excess_B: Array  # zeros, whose gradient in the router's bias is each expert's excess of pairs


class ExpertFeedForward:
    """The feed-forward of one layer; `routes` has its record after a call."""

    def __init__(self, layout: Layout):
        self.config, self.product = layout.config, layout.experts
        self.over_dp = DP in layout.expert_axes
        self.routes: Routes | None = None

    def __call__(self, layer: TransformerLayerShard, h_BTD: Array) -> Array:
        """Returns this shard's part of the sum of each token's experts: a partial sum over mp."""
        choice_BTC, gate_BTC = self.route(h_BTD)
        B, T, D = h_BTD.shape
        apply = grouped_product.join_rows(self.apply_experts) if self.product.joins_rows else self.apply_experts
        tokens = (x.reshape(B * T, -1) for x in (h_BTD, choice_BTC, gate_BTC))
        y_BTD = apply(self.read_weights(layer, D), *tokens).reshape(B, T, D)
        return y_BTD + self.apply_shared(layer, h_BTD) if self.config.experts.shared_width else y_BTD

    def route(self, h_BTD: Array) -> tuple[Array, Array]:
        """Returns the experts of each token, the largest score first, and their gates. Computes in float32.

        Of equal scores, the expert with the lowest number comes first.
        """
        keys, D = self.config.experts, h_BTD.shape[-1]
        w_DE = weight("router", [D, keys.experts], self.config.model.init_std or D**-0.5)
        logits_BTE = jnp.matmul(h_BTD.astype(jnp.float32), vary_over_mp(w_DE), precision=lax.Precision.HIGHEST)
        logits_BTE = checkpoint_name(logits_BTE, PRODUCT)
        if keys.expert_bias:
            logits_BTE = add_bias(logits_BTE, vary_over_mp(zeros(ROUTER_SHIFT, keys.experts)))
        score_BTE = jax.nn.softmax(logits_BTE) if keys.router == "softmax" else jax.nn.sigmoid(logits_BTE)
        ranked_BTE, bias_E = score_BTE, None
        if keys.balance_rate:
            bias_E = vary_over_mp(zeros(ROUTER_BIAS, keys.experts))
            ranked_BTE = score_BTE + bias_E.reshape(1, 1, -1)
        if keys.expert_groups > 1:
            ranked_BTE = self.limit_to_groups(ranked_BTE)
        choice_BTC = lax.top_k(lax.stop_gradient(ranked_BTE), keys.experts_per_token)[1]
        gate_BTC = jnp.take_along_axis(score_BTE, choice_BTC, axis=-1)
        if keys.router_norm:
            gate_BTC = gate_BTC / gate_BTC.sum(-1, keepdims=True)
        if keys.router_scale != 1:
            gate_BTC = gate_BTC * keys.router_scale
        self.routes = self.record(logits_BTE, score_BTE, choice_BTC, bias_E)
        return choice_BTC, gate_BTC

    def limit_to_groups(self, ranked_BTE: Array) -> Array:
        """Returns the ranks of the experts in each token's groups, and -inf for the others."""
        keys = self.config.experts
        by_group_BTGE = ranked_BTE.reshape(*ranked_BTE.shape[:2], keys.expert_groups, -1)
        best_BTG = lax.top_k(by_group_BTGE, 1 if keys.router == "softmax" else 2)[0].sum(-1)
        chosen_BTN = lax.top_k(best_BTG, keys.groups_per_token)[1]
        is_chosen_BTG = (chosen_BTN[..., None] == jnp.arange(keys.expert_groups).reshape(1, 1, 1, -1)).any(2)
        return jnp.where(is_chosen_BTG[..., None], by_group_BTGE, -jnp.inf).reshape(ranked_BTE.shape)

    def record(self, logits_BTE: Array, score_BTE: Array, choice_BTC: Array, bias_E: Array | None) -> Routes:
        """Returns the record of a layer."""
        E, T = score_BTE.shape[-1], score_BTE.shape[1]
        count_BE = (choice_BTC[..., None] == jnp.arange(E).reshape(1, 1, 1, E)).astype(jnp.float32).sum((1, 2))
        share_BTE = score_BTE
        if self.config.experts.router != "softmax":
            share_BTE = score_BTE / score_BTE.sum(-1, keepdims=True)
        square_B = jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1)).sum(1)
        excess_B = jnp.zeros_like(square_B)
        if bias_E is not None:
            # Integers, so that every mesh adds them up exactly.
            excess_BE = E * count_BE - T * self.config.experts.experts_per_token
            excess_B = ((bias_E - lax.stop_gradient(bias_E)).reshape(1, -1) * excess_BE).sum(-1)
        return Routes(count_BE, share_BTE.sum(1), square_B, excess_B)

    def read_weights(self, layer: TransformerLayerShard, D: int) -> dict[str, Array]:
        """Returns this shard's matrices and biases of its experts, by name."""
        c, e = self.config, self.local_experts
        f = c.mixture.expert_size if c.mixture.splits_experts else collectives.local(c.mixture.expert_size)
        init = c.model.init_std or D**-0.5
        weights = {"expert_up": weight("expert_up", [e, D, f], init)}
        if c.model.gated:
            weights["expert_gate"] = weight("expert_gate", [e, D, f], init)
        weights["expert_down"] = weight("expert_down", [e, f, D], layer.residual_stddev(c.mixture.expert_size))
        if c.experts.expert_bias:
            weights |= {f"{name}_bias": zeros(f"{name}_bias", e, w.shape[-1]) for name, w in weights.items()}
            if not c.mixture.splits_experts:
                # All shards of the model have a part of each expert's width, and one of them adds its last bias.
                bias_ED = vary_over_mp(weights["expert_down_bias"])
                weights["expert_down_bias"] = jnp.where(collectives.index(MP) == 0, bias_ED, jnp.zeros_like(bias_ED))
        return weights

    @property
    def local_experts(self) -> int:
        """The number of experts of which this shard has at least a part."""
        experts = self.config.experts.experts
        experts = collectives.local(experts) if self.config.mixture.splits_experts else experts
        return experts // lax.axis_size(DP) if self.over_dp else experts

    def apply_experts(self, weights: dict[str, Array], h_ND: Array, choice_NC: Array, gate_NC: Array) -> Array:
        """Returns the sum of this shard's parts of each token's experts, weighted by their gates."""
        if self.over_dp:
            # The transposes scatter the sums of gradients, so that each expert has that of all tokens once.
            h_ND, choice_NC, gate_NC = (lax.all_gather(x, DP, axis=0, tiled=True) for x in (h_ND, choice_NC, gate_NC))
        e = self.local_experts
        first = collectives.index((MP, DP) if self.over_dp else MP) * e if self.config.mixture.splits_experts else 0
        groups = grouped_product.group_tokens(choice_NC, first, e, self.product.block, self.product.tile)
        x_MD, gate_M = grouped_product.dispatch(h_ND, groups), grouped_product.list_gates(gate_NC, groups)
        if self.config.experts.gate_inputs:
            x_MD = grouped_product.weigh(x_MD, gate_M)
            gate_M = grouped_product.list_gates(jnp.ones_like(gate_NC), groups)
        u_Mf = self.project("expert_up", weights, x_MD, groups.size_E)
        factor_Mf = self.project("expert_gate", weights, x_MD, groups.size_E) if self.config.model.gated else None
        # Before the last product, a gate's gradient needs no output of the expert, which remat= would save as well.
        h_Mf = grouped_product.weigh(self._activate(u_Mf, factor_Mf), gate_M)
        y_ND = grouped_product.combine(self.project("expert_down", weights, h_Mf, groups.size_E, gate_M), groups)
        return lax.psum_scatter(y_ND, DP, scatter_dimension=0, tiled=True) if self.over_dp else y_ND

    def project(
        self, name: str, weights: dict[str, Array], x_MI: Array, size_E: Array, gate_M: Array | None = None
    ) -> Array:
        """Returns the product with each row's expert. Adds the expert's bias, if it has one, times the row's gate."""
        y_MO, bias_EO = self.multiply(name, weights, x_MI, size_E), weights.get(f"{name}_bias")
        return y_MO if bias_EO is None else grouped_product.add_biases(y_MO, bias_EO, size_E, gate_M)

    def multiply(self, name: str, weights: dict[str, Array], x_MI: Array, size_E: Array) -> Array:
        """Returns the product of each group of rows and its expert's matrix of this name, in the rows' dtype."""
        # With quantised weights, only one layer's experts are dequantised at a time.
        return checkpoint_name(self.product.multiply(x_MI, weights[name].astype(x_MI.dtype), size_E), PRODUCT)

    def apply_shared(self, layer: TransformerLayerShard, h_BTD: Array) -> Array:
        """Returns this shard's part of the expert that every token uses."""
        c, width = self.config, self.config.experts.shared_width
        u_BTf = layer.linear("shared_up", h_BTD, out=collectives.local(width))
        gate_BTf = layer.linear("shared_gate", h_BTD, out=collectives.local(width)) if c.model.gated else None
        y_BTD = layer.linear("shared_down", self._activate(u_BTf, gate_BTf), layer.residual_stddev(width))
        if not c.experts.shared_gate:
            return y_BTD
        w_D = vary_over_mp(weight("shared_scale", [h_BTD.shape[-1]], c.model.init_std or h_BTD.shape[-1] ** -0.5))
        scale_BT1 = jax.nn.sigmoid((h_BTD.astype(jnp.float32) * w_D.reshape(1, 1, -1)).sum(-1, keepdims=True))
        return (scale_BT1 * y_BTD.astype(jnp.float32)).astype(y_BTD.dtype)

    def _activate(self, u, gate):
        activate = ACTIVATIONS[self.config.model.activation]
        return activate(u) if gate is None else activate(u, gate)


class AdaptedExperts(ExpertFeedForward):
    """The feed-forward of a layer whose experts have LoRA's adapters.

    Each expert has a pair of factors, [experts, inputs, rank] and [experts, rank, outputs]. Both products with them are
    grouped products of the same rows as the product with the matrix.
    """

    def read_weights(self, layer: TransformerLayerShard, D: int) -> dict[str, Array]:
        """Returns the matrices of the experts, and the factors of their adapters in float32."""
        weights = super().read_weights(layer, D)
        for name in self.config.lora.lora_names:
            if name not in weights:
                continue
            rank, (experts, inputs, outputs) = self.config.lora.adapters[name].rank, weights[name].shape
            a = weight(f"{name}{LORA_IN}", [experts, inputs, rank], stddev=1.0).astype(jnp.float32)
            b = weight(f"{name}{LORA_OUT}", [experts, rank, outputs], stddev=0.0).astype(jnp.float32)
            if not self.config.mixture.splits_experts:
                # As in adapters.py: the factor next to the dimension that is not split is replicated over mp.
                a, b = (a, collectives.fan_out(b)) if name == "expert_down" else (collectives.fan_out(a), b)
            weights |= {f"{name}{LORA_IN}": a, f"{name}{LORA_OUT}": b}
        return weights

    def multiply(self, name: str, weights: dict[str, Array], x_MI: Array, size_E: Array) -> Array:
        """Returns the product with each row's expert, and with the expert's adapter if the matrix has one."""
        y_MO = super().multiply(name, weights, x_MI, size_E)
        if name not in self.config.lora.lora_names:
            return y_MO
        x_Mr = super().multiply(f"{name}{LORA_IN}", weights, x_MI, size_E) * self.config.lora.adapter_scale(name)
        return y_MO + super().multiply(f"{name}{LORA_OUT}", weights, x_Mr, size_E)


class RoutesOfLayers(Records):
    """The routes of all layers, and the terms of the objective that depend on them."""

    def __init__(self, layout: Layout):
        self.config, self.layout = layout.config, layout

    def feed_forward(self, stored: dict | None = None) -> ExpertFeedForward | None:
        """Returns the experts of a layer; None for a dense layer, whose parameters have no router."""
        if stored is not None and "router" not in stored[LAYERS]:
            return None
        if any(name in EXPERT_MATRICES for name in self.config.lora.lora_names):
            return AdaptedExperts(self.layout)
        return ExpertFeedForward(self.layout)

    def start(self, x_BTD: Array) -> Routes:
        L, E, B = sum(self.config.mixture.sparse_layers), self.config.experts.experts, x_BTD.shape[0]
        zeros_BLE, zeros_BL = jnp.zeros((B, L, E)), jnp.zeros((B, L))
        return collectives.vary_like(Routes(zeros_BLE, zeros_BLE, zeros_BL, zeros_BL), vary_over_mp(x_BTD))

    def add(self, records: Routes, of_layers: list[Routes | None], first: Array | int) -> Routes:
        stacked = self.stack(of_layers)
        sparse_of_stage = sum(self.config.mixture.sparse_layers[: self.config.stage_layers])
        first = first // self.config.stage_layers * sparse_of_stage
        return jax.tree.map(lambda all_, new: lax.dynamic_update_slice_in_dim(all_, new, first, 1), records, stacked)

    def stack(self, of_layers: list[Routes | None]) -> Routes:
        """Returns the routes of the layers that have experts."""
        routes = [each for each in of_layers if each is not None]
        return jax.tree.map(lambda *x: jnp.stack(x, axis=1), *routes)

    def count(self, routes: Routes) -> Array:
        """Returns the pairs of the global batch by layer and expert, count_LE."""
        counts_LE = lax.stop_gradient(routes.count_BE).sum(0)
        # Every shard of the model counts all tokens.
        return collectives.psum(counts_LE, (*self.config.parallel.token_axes, MP)) / lax.axis_size(MP)

    def complete(self, objective: Array, records: Routes, constants: Any) -> Array:
        """Adds the balance loss, the router's z-loss, and the zeros that carry the excess of each expert.

        The balance loss of a layer is E * sum(f * P): f is an expert's share of the pairs of the global batch, P its
        mean score. f has no gradient, so the loss of the batch is the mean of the losses of its parts. `constants` is
        the count_LE of the global batch; None: `records` are of the global batch.
        """
        keys, tokens = self.config.experts, self.config.model.seq // self.config.parallel.cp
        rows = records.square_B.shape[0]
        total = records.excess_B.sum() * (self.config.parallel.cp / rows)  # the sum over cp, which is then averaged
        if keys.router_z_loss:
            total += keys.router_z_loss * records.square_B.sum() / (rows * tokens)
        if keys.balance_loss:
            count_LE = self.count(records) if constants is None else constants
            # E * f - 1 instead of E * f, as a token's scores sum to 1: a constant would only add rounding to gradients.
            # At initial values, those of norms and routers were off by up to 7e-7 of float64, and now by 3e-7.
            pairs = count_LE[0].sum()
            excess_LE = (keys.experts * count_LE - pairs) / pairs
            mean = (excess_LE * records.score_BE.sum(0)).sum() / (rows * tokens)
            total += keys.balance_loss * (count_LE.shape[0] + mean)
        return objective + collectives.pmean(total, MP)
