"""Products of tokens with the matrices of their experts: tokens sorted by expert, and one product for each group.

`group_tokens` gives every pair of a token and a chosen expert a row, sorted by expert. No token is dropped: there is a
row for each pair. `dispatch` copies the tokens into these rows, `combine` adds the rows of a token up again. An expert
without tokens has no rows, so its gradients are exact zeros.

Rows of padding hold a copy of the last token, which saves a pass of zeros over all rows. Their gate is 0: weighed
between `dispatch` and `combine`, they add nothing to any gradient while activations are finite.

`Blocks` multiplies one block of rows of one expert after the other, on CPUs. `Copies` multiplies all blocks at once,
each with a copy of its expert's matrix, on GPUs, which wait for the host at each turn of a loop. `Kernel` is JAX's
Pallas kernels of MegaBlox for TPUs, which read groups of any size.

`lax.ragged_dot` is not used: XLA makes a dense product of it on CPUs, GPUs and some TPUs, with the work of all experts
for each token. libtpu 0.0.52 has a kernel for it on a v5p, not on a v5e and a v6e: 33M cycles instead of 0.2M for
[8192, 2048] x [16, 2048, 768] (v5e, its estimate). On an H200 (jaxlib 0.11.2), [16384, 2048] x [16, 2048, 768] with
its gradients takes 5.6 ms by `lax.ragged_dot`, 10.5 by `Blocks(256)`, 0.9 by a prototype of `Copies(256)`; a dense
product of as many rows takes 0.3.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, custom_batching, lax

from shardformer.collectives import vary_like
from shardformer.kernels.typed_pallas import MEGABLOX, typed_kernel

TILE_BYTES = 2048  # of a row of a tile: 1024 bfloat16 numbers; tiles of float32 would not fit into a TPU's scratchpad


class Groups(NamedTuple):
    """The rows of this shard's experts. M rows are enough for any choice; those after the last group are unused."""

    pair_M: Array  # the pair of each row, token * choices + choice; the number of pairs for padding
    row_NC: Array  # the row of each token's choice; M if another shard has the expert
    size_E: Array  # rows of each expert, padding included

    @property
    def token_M(self) -> Array:
        """The token of each row; the number of tokens for padding."""
        return self.pair_M // self.row_NC.shape[1]


class Blocks(NamedTuple):
    """Products of blocks of rows of one expert; each group is padded to full blocks."""

    block: int
    joins_rows: bool = False  # groups the tokens of all rows of a vmap together; see `join_rows`
    tile: int = 1

    def __str__(self) -> str:
        return f"blocks of {self.block} rows of one expert"

    def multiply(self, x_MI: Array, w_EIO: Array, size_E: Array) -> Array:
        """Returns each group of rows times its expert's matrix, in the dtype of the rows."""
        return multiply_blocks(x_MI, w_EIO, size_E, self.block)


class Copies(NamedTuple):
    """Products of all blocks at once, each with a copy of its expert's matrix; each group is padded to full blocks."""

    block: int
    joins_rows: bool = False  # groups the tokens of all rows of a vmap together; see `join_rows`
    tile: int = 1

    def __str__(self) -> str:
        return f"blocks of {self.block} rows at once, with copies of their experts' matrices"

    def multiply(self, x_MI: Array, w_EIO: Array, size_E: Array) -> Array:
        """Returns each group of rows times its expert's matrix, in the dtype of the rows."""
        return multiply_copies(x_MI, w_EIO, size_E, self.block)


class Kernel(NamedTuple):
    """The product by MegaBlox' kernels; the rows are padded to full tiles, their groups are not."""

    tile: int  # rows of a tile
    joins_rows: bool = False  # groups the tokens of all rows of a vmap together; see `join_rows`
    interpret: bool = False  # runs the kernel on any device, for tests
    block: int = 1

    def __str__(self) -> str:
        return f"a kernel with tiles of {self.tile} rows"

    def multiply(self, x_MI: Array, w_EIO: Array, size_E: Array) -> Array:
        """Returns each group of rows times its expert's matrix; rows after the last group have any values."""
        return multiply_by_kernel(x_MI, w_EIO, size_E, self.tile, self.interpret)


GroupedProduct = Blocks | Copies | Kernel


def join_rows(apply: Callable[..., Array]) -> Callable[..., Array]:
    """Returns a function `apply(weights, *tokens)` of arrays [N, ...], which a vmap calls once for all of its rows.

    A vmap of a grouped product would copy the experts' matrices for each row. The result has no gradient: generation
    vmaps rows, and training does not.
    """
    joined = custom_batching.custom_vmap(apply)

    @joined.def_vmap
    def apply_to_all(rows, is_batched, weights, *tokens):
        full = [
            x if batched else jnp.broadcast_to(x, (rows, *x.shape))
            for x, batched in zip(tokens, is_batched[1:], strict=True)
        ]
        y_MD = joined(weights, *[x.reshape(-1, x.shape[-1]) for x in full])
        return y_MD.reshape(rows, -1, y_MD.shape[-1]), True

    return joined


def group_tokens(choice_NC: Array, first: Array | int, experts: int, block: int, tile: int = 1) -> Groups:
    """Sorts pairs of a token and a choice by expert, for the experts `first`, `first + 1`... of this shard.

    The group of each expert is padded to a multiple of `block` rows, and all rows to one of `tile`. A token's rows keep
    the order of the tokens.
    """
    tokens, choices = choice_NC.shape
    pairs = tokens * choices
    rows = -(-pairs // block) * block + (experts * block if block > 1 else 0)
    rows = -(-rows // tile) * tile
    local_NC = choice_NC - first
    is_local_NC = (local_NC >= 0) & (local_NC < experts)
    expert_P = jnp.where(is_local_NC, local_NC, experts).reshape(-1)
    pair_P = jnp.argsort(expert_P, stable=True)
    sorted_P = expert_P[pair_P]
    start_E = jnp.searchsorted(sorted_P, jnp.arange(experts + 1, dtype=sorted_P.dtype)).astype(jnp.int32)
    size_E = -(-jnp.diff(start_E) // block) * block
    shift_E = jnp.cumsum(size_E) - size_E - start_E[:-1]  # from the sorted position to the row
    shift_P = shift_E.at[sorted_P].get(mode="clip")
    row_P = jnp.where(sorted_P < experts, jnp.arange(pairs, dtype=jnp.int32) + shift_P, rows)
    none_M = vary_like(jnp.full(rows, pairs, jnp.int32), row_P)
    pair_M = none_M.at[row_P].set(pair_P.astype(jnp.int32), mode="drop")
    row_of_pair = vary_like(jnp.zeros(pairs, jnp.int32), row_P).at[pair_P].set(row_P)
    return Groups(pair_M, row_of_pair.reshape(tokens, choices), size_E)


def add_biases(x_MO: Array, bias_EO: Array, size_E: Array, gate_M: Array | None = None) -> Array:
    """Returns each row plus its expert's bias, in the rows' dtype. With gates, each bias is multiplied by its row's.

    Rows after the last group stay as they are. The sum is computed in float32, as in `add_broadcast`.
    """
    expert_M = jnp.searchsorted(jnp.cumsum(size_E), jnp.arange(x_MO.shape[0], dtype=size_E.dtype), side="right")
    bias_MO = bias_EO.astype(jnp.float32).at[expert_M].get(mode="fill", fill_value=0, indices_are_sorted=True)
    bias_MO = bias_MO if gate_M is None else gate_M[:, None] * bias_MO
    return (x_MO.astype(jnp.float32) + bias_MO).astype(x_MO.dtype)


def _take(x: Array, index: Array) -> Array:
    """Returns the rows of these indices; zeros for an index beyond the last row."""
    return x.at[index].get(mode="fill", fill_value=0)


def _copy_tokens(x_ND: Array, groups: Groups) -> Array:
    return x_ND.at[groups.token_M].get(mode="clip")


def _add_rows(x_MD: Array, groups: Groups) -> Array:
    return _take(x_MD, groups.row_NC).astype(jnp.float32).sum(1).astype(x_MD.dtype)


@jax.custom_vjp
def dispatch(x_ND: Array, groups: Groups) -> Array:
    """Returns each row's token, x_MD; the last one for padding. The backward pass gathers; JAX's would scatter."""
    return _copy_tokens(x_ND, groups)


dispatch.defvjp(
    lambda x_ND, groups: (dispatch(x_ND, groups), groups), lambda groups, d_MD: (_add_rows(d_MD, groups), None)
)


@jax.custom_vjp
def combine(y_MD: Array, groups: Groups) -> Array:
    """Returns the sum of each token's rows, in their dtype; adds up in float32. The transpose of `dispatch`."""
    return _add_rows(y_MD, groups)


combine.defvjp(
    lambda y_MD, groups: (combine(y_MD, groups), groups), lambda groups, d_ND: (_copy_tokens(d_ND, groups), None)
)


@jax.custom_vjp
def list_gates(gate_NC: Array, groups: Groups) -> Array:
    """Returns the gate of each row; 0 for padding. Its backward pass gathers too."""
    return _take(gate_NC.reshape(-1), groups.pair_M)


list_gates.defvjp(
    lambda gate_NC, groups: (list_gates(gate_NC, groups), groups),
    lambda groups, d_M: (_take(d_M, groups.row_NC), None),
)


@jax.custom_vjp
def weigh(x_MI: Array, gate_M: Array) -> Array:
    """Returns each row times its float32 gate, in the rows' dtype. The backward pass needs no rows in float32."""
    return (gate_M[:, None] * x_MI.astype(jnp.float32)).astype(x_MI.dtype)


def _weigh_backward(saved, d_MI):
    x_MI, gate_M = saved
    return weigh(d_MI, gate_M), (d_MI.astype(jnp.float32) * x_MI.astype(jnp.float32)).sum(-1)


weigh.defvjp(lambda x_MI, gate_M: (weigh(x_MI, gate_M), (x_MI, gate_M)), _weigh_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def multiply_blocks(x_MI: Array, w_EIO: Array, size_E: Array, block: int) -> Array:
    """Returns each group of rows times its expert's matrix, block by block; the loop ends with the last used block."""

    def multiply(x_bI, w_IO):
        return x_bI @ w_IO

    return _map_blocks(multiply, x_MI, w_EIO, size_E, block, w_EIO.shape[2])


def _blocks_forward(x_MI, w_EIO, size_E, block):
    return multiply_blocks(x_MI, w_EIO, size_E, block), (x_MI, w_EIO, size_E)


def _blocks_backward(block, saved, d_MO):
    x_MI, w_EIO, size_E = saved

    def multiply_transposed(d_bO, w_IO):
        return d_bO @ w_IO.T

    def sum_expert(expert, blocks, d_w_EIO):
        def add_block(b, d_w_IO):
            x_bI, d_bO = (lax.dynamic_slice_in_dim(a, b * block, block) for a in (x_MI, d_MO))
            # The barrier keeps a copy, as in kernels/linear.py: the CPU's fast product takes no transposed one.
            x_Ib = lax.optimization_barrier(x_bI.T)
            return d_w_IO + jnp.matmul(x_Ib, d_bO, preferred_element_type=jnp.float32)

        d_w_IO = lax.fori_loop(*blocks, add_block, jnp.zeros_like(d_w_EIO[0]))
        return lax.dynamic_update_index_in_dim(d_w_EIO, d_w_IO, expert, 0)

    d_x_MI = _map_blocks(multiply_transposed, d_MO, w_EIO, size_E, block, w_EIO.shape[1])
    zeros_EIO = vary_like(jnp.zeros(w_EIO.shape, jnp.float32), x_MI, d_MO, size_E)
    d_w_EIO = _for_experts(sum_expert, size_E, block, zeros_EIO)
    return d_x_MI, d_w_EIO.astype(w_EIO.dtype), None


multiply_blocks.defvjp(_blocks_forward, _blocks_backward)


def _map_blocks(function, x_MI, w_EIO, size_E, block, width):
    """Applies a function of a block of rows and its expert's matrix; the rows of unused blocks are zeros."""

    def run_expert(expert, blocks, y_MO):
        w_IO = w_EIO[expert]

        def write_block(b, y_MO):
            y_bO = function(lax.dynamic_slice_in_dim(x_MI, b * block, block), w_IO)
            return lax.dynamic_update_slice_in_dim(y_MO, y_bO, b * block, 0)

        return lax.fori_loop(*blocks, write_block, y_MO)

    zeros_MO = vary_like(jnp.zeros((x_MI.shape[0], width), x_MI.dtype), x_MI, w_EIO, size_E)
    return _for_experts(run_expert, size_E, block, zeros_MO)


def _for_experts(run_expert, size_E, block: int, start: Array) -> Array:
    """Returns the result of `run_expert(expert, (first block, end), carry)` for one expert after the other.

    A loop over blocks would copy the expert's matrix, or its gradient, for each block.
    """
    end_E = (jnp.cumsum(size_E) // block).astype(jnp.int32)

    def run(expert, carry):
        return run_expert(expert, (end_E[expert] - size_E[expert] // block, end_E[expert]), carry)

    return lax.fori_loop(0, size_E.shape[0], run, start)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def multiply_copies(x_MI: Array, w_EIO: Array, size_E: Array, block: int) -> Array:
    """Returns each group of rows times its expert's matrix: N products of a block of b rows with an [I, O]."""
    w_NIO = w_EIO[_find_experts(x_MI, size_E, block)]
    return jnp.einsum("nbi,nio->nbo", _split(x_MI, block), w_NIO).reshape(x_MI.shape[0], -1)


def _copies_forward(x_MI, w_EIO, size_E, block):
    return multiply_copies(x_MI, w_EIO, size_E, block), (x_MI, w_EIO, size_E)


def _copies_backward(block, saved, d_MO):
    x_MI, w_EIO, size_E = saved
    expert_N = _find_experts(x_MI, size_E, block)
    x_NbI, d_NbO = _split(x_MI, block), _split(d_MO, block)
    d_x_MI = jnp.einsum("nbo,nio->nbi", d_NbO, w_EIO[expert_N]).reshape(x_MI.shape)
    d_w_NIO = jnp.einsum("nbi,nbo->nio", x_NbI, d_NbO, preferred_element_type=jnp.float32)
    zeros_EIO = vary_like(jnp.zeros(w_EIO.shape, jnp.float32), x_MI, d_MO, size_E)
    d_w_EIO = zeros_EIO.at[expert_N].add(d_w_NIO, indices_are_sorted=True)
    return d_x_MI, d_w_EIO.astype(w_EIO.dtype), None


multiply_copies.defvjp(_copies_forward, _copies_backward)


def _find_experts(x_MI, size_E, block: int) -> Array:
    """Returns the expert of each block. Unused blocks, whose gates are 0, have the last one."""
    first_N = jnp.arange(x_MI.shape[0] // block, dtype=size_E.dtype) * block
    return jnp.minimum(jnp.searchsorted(jnp.cumsum(size_E), first_N, side="right"), size_E.shape[0] - 1)


def _split(x_MI, block: int) -> Array:
    return x_MI.reshape(-1, block, x_MI.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def multiply_by_kernel(x_MI: Array, w_EIO: Array, size_E: Array, tile: int, interpret: bool) -> Array:
    """Returns each group of rows times its expert's matrix, in the dtype of the rows."""
    return _multiply(x_MI, w_EIO, size_E, tile, interpret)


def _forward(x_MI, w_EIO, size_E, tile, interpret):
    return multiply_by_kernel(x_MI, w_EIO, size_E, tile, interpret), (x_MI, w_EIO, size_E)


def _backward(tile, interpret, saved, d_MO):
    x_MI, w_EIO, size_E = saved
    d_x_MI = _multiply(d_MO, w_EIO, size_E, tile, interpret, transpose_rhs=True)
    tiles = _choose_tiles(x_MI, d_MO.shape[1], tile)
    experts = w_EIO.shape[0]
    with typed_kernel(x_MI, MEGABLOX) as kernel, jax.numpy_dtype_promotion("standard"):
        d_w_EIO = kernel.tgmm(x_MI.T, d_MO, size_E, w_EIO.dtype, tiles, num_actual_groups=experts, interpret=interpret)
    return d_x_MI, d_w_EIO, None


multiply_by_kernel.defvjp(_forward, _backward)


def _multiply(x_MI, w_EIO, size_E, tile, interpret, transpose_rhs=False):
    tiles = _choose_tiles(x_MI, w_EIO.shape[1 if transpose_rhs else 2], tile)
    with typed_kernel(x_MI, MEGABLOX) as kernel, jax.numpy_dtype_promotion("standard"):
        return kernel.gmm(x_MI, w_EIO, size_E, x_MI.dtype, tiles, transpose_rhs=transpose_rhs, interpret=interpret)


def _choose_tiles(x_MI: Array, outputs: int, tile: int) -> tuple[int, int, int]:
    """Returns the sizes of a tile in rows, inputs and outputs."""
    most = TILE_BYTES // jnp.dtype(x_MI.dtype).itemsize
    return tile, min(most, x_MI.shape[1]), min(most, outputs)
