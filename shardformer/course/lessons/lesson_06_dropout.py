"""Dropout that is the same on every mesh

Dropout sets random values to zero. If each device draws its own mask, the result depends on the mesh, and no one can
compare two meshes. If every device draws from the same key, all devices drop the same places of their blocks.

The mask must be a function of the position in the full array. Here each row has a key of its own: the number of the
row in the full array, folded into the step's key. A device draws the mask of a full row and keeps its own columns. The
draw costs a little more than needed; it costs no communication.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

# %% dense
MESHES = ({"dp": 2, "mp": 4}, {"dp": 4, "mp": 2})
IN_SPECS = (P("dp", "mp"), P())
OUT_SPECS = {"y": P("dp", "mp")}
COLUMNS = 16
KEEP = 0.75


def draw_mask(key, row):
    """Returns the mask [COLUMNS] of one row, which has this number in the full array."""
    return jax.random.bernoulli(jax.random.fold_in(key, row), KEEP, (COLUMNS,))


def dense(x, key):
    masks = jax.vmap(draw_mask, in_axes=(None, 0))(key, jnp.arange(x.shape[0]))
    return {"y": jnp.where(masks, x / KEEP, 0)}


# %% shard
def on_shard(x, key):
    # Blocks: x [rows / dp, COLUMNS / mp]; key is the same on every device.
    rows, columns = x.shape
    # solution
    first_row, first_column = rows * lax.axis_index("dp"), columns * lax.axis_index("mp")
    full = jax.vmap(draw_mask, in_axes=(None, 0))(key, first_row + jnp.arange(rows))
    masks = lax.dynamic_slice_in_dim(full, first_column, columns, axis=1)
    # hole: Compute the masks [rows, columns] of this device's block; lax.dynamic_slice_in_dim takes a traced start.
    return {"y": jnp.where(masks, x / KEEP, 0)}


# %% checks
def make_arguments(draw, sizes):
    return 1 + draw.random(size=(8, COLUMNS)).astype("float32"), jax.random.key(3)


def _drop(x, key, first_row, first_column):
    rows, columns = x.shape
    full = jax.vmap(draw_mask, in_axes=(None, 0))(key, first_row + jnp.arange(rows))
    return jnp.where(lax.dynamic_slice_in_dim(full, first_column, columns, axis=1), x / KEEP, 0)


def no_first_row(x, key):
    """The rows were numbered from 0 on every device: add the number of this device's first row, from
    lax.axis_index("dp")."""
    return {"y": _drop(x, key, 0, x.shape[1] * lax.axis_index("mp"))}


def no_first_column(x, key):
    """Every device took the first columns of the masks: slice the columns of this device, from lax.axis_index("mp")."""
    return {"y": _drop(x, key, x.shape[0] * lax.axis_index("dp"), 0)}


def neither(x, key):
    """Every device drew the same mask: use lax.axis_index("dp") for the rows and lax.axis_index("mp") for the
    columns."""
    return {"y": _drop(x, key, 0, 0)}


def axes_swapped(x, key):
    """The axes are swapped: the rows are split over dp and the columns over mp."""
    return {"y": _drop(x, key, x.shape[0] * lax.axis_index("mp"), x.shape[1] * lax.axis_index("dp"))}


def index_without_size(x, key):
    """The position of the device was used as the number of its first row and column; multiply it by the rows and
    columns of a block."""
    return {"y": _drop(x, key, lax.axis_index("dp"), lax.axis_index("mp"))}


def row_index_without_size(x, key):
    """The position of the device along dp was used as the number of its first row; multiply it by the rows of a
    block."""
    return {"y": _drop(x, key, lax.axis_index("dp"), x.shape[1] * lax.axis_index("mp"))}


def mask_of_the_block(x, key):
    """The mask was drawn in the shape of a block, so it depends on the mesh: draw the masks of full rows, and slice."""
    first = x.shape[0] * lax.axis_index("dp")
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, first + jnp.arange(x.shape[0]))
    masks = jax.vmap(lambda each: jax.random.bernoulli(each, KEEP, (x.shape[1],)))(keys)
    return {"y": jnp.where(masks, x / KEEP, 0)}


def key_of_the_device(x, key):
    """The position of the device was folded into the key, so the mask depends on the mesh: fold in the number of the
    row only."""
    folded = jax.random.fold_in(key, lax.axis_index("mp"))
    return {"y": _drop(x, folded, x.shape[0] * lax.axis_index("dp"), x.shape[1] * lax.axis_index("mp"))}


def key_of_the_row_of_devices(x, key):
    """The position along dp was folded into the key, so the mask depends on the mesh: fold in the number of the row
    only."""
    folded = jax.random.fold_in(key, lax.axis_index("dp"))
    return {"y": _drop(x, folded, 0, x.shape[1] * lax.axis_index("mp"))}


def key_of_the_device_and_first_columns(x, key):
    """The position of the device was folded into the key, so the mask depends on the mesh. Use `key` as it is: draw the
    masks of full rows, then slice the columns of this device."""
    return {"y": _drop(x, jax.random.fold_in(key, lax.axis_index("mp")), x.shape[0] * lax.axis_index("dp"), 0)}


def one_mask_for_all_blocks(x, key):
    """Every device drew a mask of its block from the same key, so all blocks drop the same places. Draw the masks of
    full rows by the numbers of the rows, and slice."""
    return {"y": jnp.where(jax.random.bernoulli(key, KEEP, x.shape), x / KEEP, 0)}


HINTS = {"shapes for broadcasting": " A mask of a full row has COLUMNS columns: slice those of this device."}
MISTAKES = (
    neither, no_first_row, no_first_column, axes_swapped, index_without_size, row_index_without_size,
    mask_of_the_block, key_of_the_device, key_of_the_row_of_devices,
    key_of_the_device_and_first_columns, one_mask_for_all_blocks,
)  # fmt: skip
