"""From xmap to shard_map

Code of 2021 wrote the shard view with `jax.experimental.maps.xmap`:

  def loss(w, x, y):                       # x [d] and y []: one row
      return lax.pmean(jnp.square(x @ w - y), "batch")

  xmap(loss, in_axes=({}, {0: "batch"}, {0: "batch"}), out_axes={}, axis_resources={"batch": "dp"})

Its axis "batch" has as many positions as there are rows, and only then is split over the devices of dp: xmap maps the
rows within a device as well. `shard_map` splits over devices only. A shard function gets a block of rows, with the
axis still there. So one axis of xmap becomes two: `jax.vmap(..., axis_name="rows")` over the block, and dp over the
devices. A collective over "batch" becomes one over both. (The command `legacy --migrate` rewrites xmap in this way.)
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

# %% dense
MESHES = ({"dp": 4}, {"dp": 2})
IN_SPECS = (P(), P("dp", None), P("dp"))
OUT_SPECS = {"loss": P(), "centred": P("dp")}


def dense(w, x, y):
    errors = jnp.square(x @ w - y)
    return {"loss": errors.mean(), "centred": errors - errors.mean()}


# %% shard
def on_shard(w, x, y):
    # Blocks: w [d] in full, x [rows / dp, d], y [rows / dp]. xmap gave x [d] and y [].
    def of_one_row(x, y):
        error = jnp.square(x @ w - y)
        # solution
        mean = lax.pmean(error, ("dp", "rows"))
        # hole: Compute the mean of `error` over all rows: those of the block ("rows") and of the devices ("dp").
        return mean, error - mean

    # solution
    means, centred = jax.vmap(of_one_row, axis_name="rows")(x, y)
    loss = means[0]
    # hole: Apply of_one_row to each row of the block with jax.vmap, and name its axis "rows".
    # hole: Then set loss (a number, the same for each row) and centred [rows / dp].
    return {"loss": loss, "centred": centred}


# %% checks
def make_arguments(draw, sizes):
    shapes = (4,), (24, 4), (24,)
    return tuple(draw.normal(size=shape).astype("float32") for shape in shapes)


def _with(mean_of):
    def on_shard(w, x, y):
        def of_one_row(x, y):
            error = jnp.square(x @ w - y)
            mean = mean_of(error)
            return mean, error - mean

        means, centred = jax.vmap(of_one_row, axis_name="rows")(x, y)
        return {"loss": means[0], "centred": centred}

    return on_shard


def over_devices_only(w, x, y):
    """The mean was taken over dp only: it mixes the rows at the same place of each device's block. The axis of xmap is
    ("dp", "rows") here."""
    return _with(lambda error: lax.pmean(error, "dp"))(w, x, y)


def over_rows_only(w, x, y):
    """The mean was taken over the rows of this device's block only. The axis of xmap is ("dp", "rows") here."""
    return _with(lambda error: lax.pmean(error, "rows"))(w, x, y)


def summed(w, x, y):
    """The errors were added over all rows; xmap's pmean divides by their number."""
    return _with(lambda error: lax.psum(error, ("dp", "rows")))(w, x, y)


def divided_by_devices(w, x, y):
    """The errors were added over all rows, but divided by the devices of dp only: xmap's axis has as many positions as
    there are rows."""
    return _with(lambda error: lax.psum(error, ("dp", "rows")) / lax.axis_size("dp"))(w, x, y)


def divided_by_rows_of_a_block(w, x, y):
    """The errors were added over all rows, but divided by the rows of one block only."""
    return _with(lambda error: lax.psum(error, ("dp", "rows")) / lax.axis_size("rows"))(w, x, y)


def no_mean(w, x, y):
    """There is no mean: each row used its own error. Take lax.pmean over ("dp", "rows")."""
    return _with(lambda error: error)(w, x, y)


HINTS = {"unbound axis name": ' Apply of_one_row with jax.vmap(of_one_row, axis_name="rows").'}
MISTAKES = (over_devices_only, over_rows_only, summed, divided_by_devices, divided_by_rows_of_a_block, no_mean)
