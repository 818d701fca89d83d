"""An embedding that is split over the vocabulary

The table of embeddings is the largest matrix of a small model. Split its rows over mp: a device holds the vectors of
some tokens only. For a token of another device it contributes zeros, and the sum over mp has exactly one term that is
not zero.

The device at position i along mp, `lax.axis_index("mp")`, holds the rows from i * n to i * n + n - 1, where n is the
number of rows of its block. Beware: `table[index]` clamps an index that is too large, and counts a negative one from
the end. It raises no error.
"""

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

# %% dense
MESHES = ({"dp": 2, "mp": 4}, {"dp": 4, "mp": 2})
IN_SPECS = (P("mp", None), P("dp"))
OUT_SPECS = {"vectors": P("dp", None)}


def dense(table, tokens):
    return {"vectors": table[tokens]}


# %% shard
def on_shard(table, tokens):
    # Blocks: table [vocabulary / mp, d], tokens [rows / dp]; a token is a row of the full table, not of this block.
    # solution
    rows = table.shape[0]
    local = tokens - rows * lax.axis_index("mp")
    is_here = (local >= 0) & (local < rows)
    vectors = lax.psum(jnp.where(is_here[:, None], table[jnp.clip(local, 0, rows - 1)], 0), "mp")
    # hole: Look up the tokens of this device; every other token gives zeros. Then add the devices' vectors.
    return {"vectors": vectors}


# %% checks
def make_arguments(draw, sizes):
    tokens = draw.permutation(16).astype("int32")
    return draw.normal(size=(16, 4)).astype("float32"), tokens


def no_offset(table, tokens):
    """Every device looked up the tokens as if its block began at row 0 of the table: subtract the first row of this
    device, lax.axis_index("mp") times the rows of a block."""
    is_here = tokens < table.shape[0]
    return {"vectors": lax.psum(jnp.where(is_here[:, None], table[tokens % table.shape[0]], 0), "mp")}


def neither_offset_nor_mask(table, tokens):
    """Every device looked up the tokens in its own block as if it were the table. Subtract the first row of this
    device, and give zeros for the tokens of other devices."""
    return {"vectors": lax.psum(table[jnp.clip(tokens, 0, table.shape[0] - 1)], "mp")}


def no_mask_clipped(table, tokens):
    """The tokens of other devices are not masked: an index outside of the block was clamped to its border, and that
    vector was added too."""
    local = tokens - table.shape[0] * lax.axis_index("mp")
    return {"vectors": lax.psum(table[jnp.clip(local, 0, table.shape[0] - 1)], "mp")}


def no_mask_wrapped(table, tokens):
    """The tokens of other devices are not masked: a negative index counts from the end of the block, and an index
    that is too large is clamped. Those vectors were added too."""
    local = tokens - table.shape[0] * lax.axis_index("mp")
    return {"vectors": lax.psum(table[local], "mp")}


def mask_of_the_upper_end(table, tokens):
    """Only tokens above the block are masked. A token below it has a negative index, which counts from the end of the
    block: mask it too."""
    local = tokens - table.shape[0] * lax.axis_index("mp")
    return {"vectors": lax.psum(jnp.where((local < table.shape[0])[:, None], table[local], 0), "mp")}


def mask_of_the_lower_end(table, tokens):
    """Only tokens below the block are masked. A token above it is clamped to the last row: mask it too."""
    local = tokens - table.shape[0] * lax.axis_index("mp")
    return {"vectors": lax.psum(jnp.where((local >= 0)[:, None], table[local], 0), "mp")}


def one_row_too_many(table, tokens):
    """The mask takes one row too many at the end of the block: the rows are 0 to n - 1, so compare with < n."""
    local = tokens - table.shape[0] * lax.axis_index("mp")
    is_here = (local >= 0) & (local <= table.shape[0])
    return {"vectors": lax.psum(jnp.where(is_here[:, None], table[local], 0), "mp")}


def first_row_lost(table, tokens):
    """The mask leaves out the first row of each block: compare with >= 0."""
    local = tokens - table.shape[0] * lax.axis_index("mp")
    is_here = (local > 0) & (local < table.shape[0])
    return {"vectors": lax.psum(jnp.where(is_here[:, None], table[local], 0), "mp")}


def position_along_dp(table, tokens):
    """The first row of a block was computed from the position along dp; the table is split over mp."""
    local = tokens - table.shape[0] * lax.axis_index("dp")
    is_here = (local >= 0) & (local < table.shape[0])
    return {"vectors": lax.psum(jnp.where(is_here[:, None], table[jnp.clip(local, 0, table.shape[0] - 1)], 0), "mp")}


def index_in_the_full_table(table, tokens):
    """The mask is right, but the vector was looked up at the token's row in the full table: subtract the first row of
    this device from the index too."""
    local = tokens - table.shape[0] * lax.axis_index("mp")
    is_here = (local >= 0) & (local < table.shape[0])
    return {"vectors": lax.psum(jnp.where(is_here[:, None], table[jnp.clip(tokens, 0, len(table) - 1)], 0), "mp")}


def devices_for_rows(table, tokens):
    """The number of devices along mp was used in place of the number of rows of a block, table.shape[0]."""
    n = lax.axis_size("mp")
    local = tokens - n * lax.axis_index("mp")
    is_here = (local >= 0) & (local < n)
    return {"vectors": lax.psum(jnp.where(is_here[:, None], table[local], 0), "mp")}


MISTAKES = (
    no_offset, neither_offset_nor_mask, no_mask_clipped, no_mask_wrapped, mask_of_the_upper_end,
    mask_of_the_lower_end, one_row_too_many, first_row_lost, position_along_dp,
    index_in_the_full_table, devices_for_rows,
)  # fmt: skip
