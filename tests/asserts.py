"""Assertions and distances that tests of several packages share."""

import jax
import numpy as np

from shardformer import exact
from shardformer.analysis import verify, verify_exact


def relative(got, expected) -> float:
    """Returns the norm of the difference of two arrays over the norm of `expected`."""
    scale = float(np.linalg.norm(np.asarray(expected, np.float64)))
    return float(np.linalg.norm(np.asarray(got, np.float64) - np.asarray(expected, np.float64))) / (scale or 1.0)


def worst_relative(got, expected) -> float:
    """Returns the largest `relative` of any leaf of two trees of one structure; 0 for empty trees."""
    return max(jax.tree.leaves(jax.tree.map(relative, got, expected)), default=0.0)


def worst_absolute(got, expected) -> float:
    """Returns the largest difference of any two numbers of two trees."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return max((float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in pairs), default=0.0)


def is_bitwise_equal(got, expected) -> bool:
    """Returns True if two trees hold the same bytes; equal NaNs are equal."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def assert_trees_close(got, expected, most: float) -> None:
    """Fails with the name of the worst leaf if any leaf's relative difference is above `most`."""
    errors = jax.tree.map(relative, got, expected)
    named = {jax.tree_util.keystr(path): error for path, error in jax.tree_util.tree_leaves_with_path(errors)}
    worst = max(named, key=lambda name: named[name])
    assert named[worst] <= most, f"{worst} is off by {named[worst]:.2e} of its norm; at most {most:.0e} is allowed"


def assert_bitwise_equal(got, expected) -> None:
    """Fails with the names of the leaves whose bytes differ."""
    same = jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), got, expected)
    differing = [jax.tree_util.keystr(path) for path, equal in jax.tree_util.tree_leaves_with_path(same) if not equal]
    assert not differing, f"leaves with other bytes: {', '.join(differing)}"


def assert_compiled_is_exact(function, *arguments, most: float = 1e-6) -> None:
    """Fails if the compiled function's float32 results are off by more than `most` of the exact ones' norms."""
    assert_trees_close(jax.jit(function)(*arguments), exact.run(function, *arguments).outputs, most)


def assert_gradients_equal(got, expected) -> None:
    """Fails with the worst leaf if losses or gradients of two exact runs differ by more than rounding in float64."""
    failed = [row for row in verify_exact.compare(got, expected, "the expected run") if not row.passes]
    assert not failed, f"{failed[0].name} is off by {failed[0].relative:.2e} of its norm, and {len(failed) - 1} more"


def assert_compiled_gradients_equal(trainer, params, batch, key, expected) -> None:
    """Fails if a compiled program's loss or gradients differ from an exact run's by more than rounding in float32."""
    params = jax.device_put(params, trainer.model.shardings)
    losses, gradients = jax.jit(lambda *arguments: trainer.model.loss_and_grad(*arguments))(params, batch, key)
    got = jax.tree.map(np.asarray, (losses.loss, gradients))
    rows = verify.compare_loss_and_gradients((expected.loss, expected.gradients), got)
    failed = [row for row in rows if not row.passes]
    assert not failed, f"{failed[0].name} is off by {failed[0].relative:.2e} of its norm, and {len(failed) - 1} more"
