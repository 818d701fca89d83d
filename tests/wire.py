"""The collectives of a train step, derived by hand from its configuration; no code is shared with the package."""

import math
import re
from collections import Counter

import jax
import numpy as np

from shardformer.config import Config

FLOAT = 4
LAYER_SUMS = {"parallel": 1, "sequential": 2}  # of activations over mp, in each layer and direction
OUTER_SUMS = 2  # of activations over mp: the embedding forward, the head backward
LOSS_SUMS = 4  # of one number per token over mp: a maximum, two sums, an index
LOSSES = Counter({(3,): 1})  # the means over dp: loss, z-loss, accuracy
NORMS = Counter({(): 2})  # of the gradient and of the update, over the axes that split a parameter


def count_activation_sums(config: Config) -> int:
    """Counts the all-reduces of an activation over mp in a step."""
    return 2 * LAYER_SUMS[config.model.block] * config.model.layers + OUTER_SUMS


def count_gradients(trainer) -> Counter:
    """Counts the gradients on one device by shape."""
    shards = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(trainer.model.abstract)]
    return Counter(shards)


def muon_bytes(trainer) -> tuple[float, float]:
    """Returns the bytes that one device sends for muon, and those of one gather of each matrix.

    Holds where the layers of a stage divide over the parts of a matrix.
    """
    sizes, exchanged, gathered = trainer.model.mesh.shape, 0.0, 0.0
    layers = trainer.model.shapes["transformer/layers"]
    for name in ("q", "k", "v", "o", "up", "down"):
        spec = trainer.model.specs["transformer/layers"][name]
        axes = [axis for entry in spec[1:] for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis]
        parts = [sizes[axis] for axis in axes if sizes[axis] > 1]
        whole = FLOAT * layers[name].size / trainer.config.parallel.pp
        exchanged += 2 * whole / math.prod(parts) * sum((n - 1) / n for n in parts)
        gathered += whole * (1 - 1 / math.prod(parts))
    return exchanged, gathered


def find_lowered(text: str, sizes: dict[str, int]) -> Counter:
    """Counts the collectives of a lowered program by (operation, axes, are they scalars)."""
    found = re.findall(
        r'"stablehlo\.(all_\w+|reduce_scatter|collective_permute)".*?'
        r"(?:replica_groups|source_target_pairs) = "
        r"(dense<.*?> : tensor<\d+x\d+xi64>|#stablehlo\.replica_group_mesh_axes<.*?\]>).*?-> tensor<(.*?)>",
        text,
        re.DOTALL,
    )
    counts: Counter = Counter()
    for operation, groups, result in found:
        counts[operation, _read_axes(groups, sizes), result in ("f32", "3xf32")] += 1
    return counts


def _read_axes(groups: str, sizes: dict[str, int]) -> str:
    """Returns the axes of more than one shard of a lowered collective: JAX 0.12 names them, before it lists devices."""
    if named := re.findall(r'axis_ref<name = "(\w+)"', groups):
        return " ".join(axis for axis in sizes if axis in named and sizes[axis] > 1)
    numbers, size = re.fullmatch(r"dense<(.*?)> : tensor<\d+x(\d+)xi64>", groups, re.DOTALL).groups()
    group = np.array(re.findall(r"\d+", numbers), int).reshape(-1, int(size))[0]
    places = np.unravel_index(group, tuple(sizes.values()))
    return " ".join(axis for axis, place in zip(sizes, places, strict=True) if len(set(place)) > 1)


def count_lowered(c: Config) -> Counter:
    """Counts, in the same form, what a step of `tiny` must send; a loop's body counts once.

    For muon, holds where the layers of a stage divide over the parts of a matrix.
    """
    sizes = {"dp": c.parallel.dp, "mp": c.parallel.mp, "pp": c.parallel.pp, "cp": c.parallel.cp}

    def over(*axes: str) -> str:
        return " ".join(axis for axis in axes if sizes[axis] > 1)

    matrices, layer_leaves, outer_leaves = 6, 10, 5
    replicas, rows = over("dp", "cp"), over("dp", "pp", "cp")
    counts = Counter({("all_reduce", rows, True): 1})  # the losses
    counts["all_reduce", over("dp", "mp", "pp", "cp") if c.parallel.zero else over("mp", "pp"), True] += 2  # the norms
    counts["all_reduce", over("mp"), False] += 2 * LAYER_SUMS[c.model.block] + OUTER_SUMS + LOSS_SUMS
    if c.parallel.zero == 0:
        counts["all_reduce", replicas, False] += layer_leaves
        counts["all_reduce", rows, False] += outer_leaves
    else:
        again = layer_leaves - 1 if c.parallel.zero == 3 else 0  # in the backward pass; no gradient needs down's bias
        counts["all_gather", replicas, False] = layer_leaves + outer_leaves + again
        counts["reduce_scatter", replicas, False] = layer_leaves + outer_leaves
        counts["all_reduce", over("pp"), False] += outer_leaves  # of each device's own parts
    if c.optimizer.name == "muon":
        for axis in [over("mp"), *([over("dp")] if c.parallel.zero else [])]:
            counts["all_to_all", axis, False] += 2 * matrices
    counts["collective_permute", over("pp"), False] = 6  # onward, backward and the last exchange; their gradients
    if c.parallel.cp > 1:  # keys and values, in a gather
        counts["all_gather", "cp", False] += 4
        counts["reduce_scatter", "cp", False] += 2
    return Counter({kind: count for kind, count in counts.items() if kind[1]})


def layer_bytes(c: Config) -> int:
    """Returns the bytes of the layers' parameters on one shard over mp.

    q, k, v, o, up, down and up's bias are split over mp; down's bias and the norms are replicated.
    """
    D, F = c.model.d_model, 4 * c.model.d_model
    norms = LAYER_SUMS[c.model.block]
    return (
        c.model.layers
        * FLOAT
        * (4 * D * D // c.parallel.mp + 2 * D * F // c.parallel.mp + F // c.parallel.mp + D + norms * 2 * D)
    )


def other_bytes(c: Config) -> int:
    """Returns the bytes of the other parameters: table, head and head bias are split, the head's norm replicated."""
    V = c.model.padded_vocab
    return FLOAT * (2 * V * c.model.d_model // c.parallel.mp + V // c.parallel.mp + 2 * c.model.d_model)


def expected_bytes(c: Config) -> dict[tuple[str, str], float]:
    """Returns {(operation, axis): bytes sent by one device} in a step of `tiny`, without scalars."""
    sizes = {"dp": c.parallel.dp, "mp": c.parallel.mp, "cp": c.parallel.cp, "dp cp": c.parallel.dp * c.parallel.cp}
    found = _over_mp(c) | _over_replicas(c) | _over_cp(c)
    return {
        (operation, axis): size * _sent_of_result(operation, sizes[axis]) for (operation, axis), size in found.items()
    }


def _over_mp(c: Config) -> dict[tuple[str, str], int]:
    """Returns the bytes of the results over mp. Microbatches split the rows and are as many: accum cancels."""
    if c.parallel.mp == 1:
        return {}
    tokens, sums = c.training.batch // c.parallel.dp * c.model.seq // c.parallel.cp, count_activation_sums(c)
    if not c.parallel.sequence_parallel:
        return {("all-reduce", "mp"): FLOAT * tokens * (sums * c.model.d_model + LOSS_SUMS)}
    norms_and_late_bias = {"parallel": 3, "sequential": 5}[c.model.block]
    on_own_tokens = FLOAT * c.model.d_model * (c.model.layers * norms_and_late_bias + 2)  # 2: the head's norm
    if c.parallel.zero == 3:  # a device has its part of these parameters, and so of their gradients
        on_own_tokens //= c.parallel.dp * c.parallel.cp
    is_recomputed = c.parallel.zero == 3 or c.parallel.remat in (
        "dots",
        "full",
    )  # then the layers do not keep gathered tokens
    recomputed = c.model.layers * LAYER_SUMS[c.model.block] if is_recomputed else 0
    gathered = FLOAT * tokens * (sums + recomputed) * c.model.d_model
    return {
        ("all-gather", "mp"): gathered,
        ("reduce-scatter", "mp"): FLOAT * tokens * sums * c.model.d_model // c.parallel.mp,
        ("all-reduce", "mp"): FLOAT * tokens * LOSS_SUMS + c.training.accum * on_own_tokens,
    }


def _over_replicas(c: Config) -> dict[tuple[str, str], int]:
    """Returns the bytes of the results over dp (and cp): gradients, and with ZeRO the gathered parameters."""
    parameters, count = layer_bytes(c) + other_bytes(c), c.parallel.dp * c.parallel.cp
    axes = "dp" if c.parallel.cp == 1 else "dp cp" if c.parallel.dp > 1 else "cp"
    if c.parallel.zero == 0:
        return {("all-reduce", axes): parameters} if count > 1 else {}
    if c.parallel.zero == 1:  # gathered when the step begins
        return {("reduce-scatter", axes): parameters // count, ("all-gather", axes): parameters}
    unused_backward = c.model.layers * FLOAT * c.model.d_model  # no gradient needs down's bias
    return {
        ("all-gather", axes): other_bytes(c) + c.training.accum * (2 * layer_bytes(c) - unused_backward),
        ("reduce-scatter", axes): c.training.accum * parameters // count,
    }


def _over_cp(c: Config) -> dict[tuple[str, str], int]:
    """Returns the bytes of the results over cp: keys and values forward and backward, and their gradients."""
    if c.parallel.cp == 1:
        return {}
    keys_and_values = (
        2
        * FLOAT
        * c.model.layers
        * c.training.batch
        // c.parallel.dp
        * c.model.seq
        // c.parallel.cp
        * c.model.d_model
        // c.parallel.mp
    )  # of a shard
    if (
        c.parallel.context_parallel == "ring"
    ):  # the own part visits the cp - 1 others, and its gradients come back from them
        return {("collective-permute", "cp"): 3 * (c.parallel.cp - 1) * keys_and_values}
    return {("all-gather", "cp"): 2 * c.parallel.cp * keys_and_values, ("reduce-scatter", "cp"): keys_and_values}


def _sent_of_result(operation: str, n: int) -> float:
    """Returns the bytes that a ring of n sends per byte of the result.

    An all-gather sends n - 1 of n parts, a reduce-scatter n - 1 parts, and an all-reduce does both.
    """
    sent = {"all-gather": (n - 1) / n, "reduce-scatter": n - 1, "all-reduce": 2 * (n - 1) / n, "collective-permute": 1}
    return sent[operation]


def expected_expert_bytes(c: Config) -> dict[tuple[str, str], float]:
    """Returns the same for a step with experts and without ZeRO, balance loss included.

    Holds for gated experts and a shared expert, one block without biases, and layernorms.
    """
    keys, D, L, dp, mp = c.experts, c.model.d_model, c.model.layers, c.parallel.dp, c.parallel.mp
    tokens, choices = c.training.batch // dp * c.model.seq, keys.experts_per_token
    is_over_dp = keys.expert_axes == "dp"
    experts = L * 3 * keys.experts * D * c.mixture.expert_size // mp
    shared = 3 * D * keys.shared_width // mp
    others = L * (4 * D * D // mp + D * keys.experts + shared + D) + 2 * c.model.padded_vocab * D // mp + D
    found = {
        # As in a dense layer, and the gradients of the gates, to which each shard adds those of its experts.
        ("all-reduce", "mp"): tokens * (count_activation_sums(c) * D + LOSS_SUMS + L * choices),
        ("all-reduce", "dp"): others + (0 if is_over_dp else experts),
        ("all-reduce", "dp mp"): L * keys.experts,  # the counts of the balance loss
    }
    if is_over_dp:
        # Forward: tokens, choices and gates are gathered, sums are scattered. Backward: the transposes, no choices.
        found["all-gather", "dp"] = L * dp * tokens * (D + choices + choices + D)
        found["reduce-scatter", "dp"] = L * tokens * (D + D + choices)
    sizes = {"dp": dp, "mp": mp, "dp mp": dp * mp}
    return {kind: FLOAT * size * _sent_of_result(kind[0], sizes[kind[1]]) for kind, size in found.items()}
