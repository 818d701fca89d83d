"""Sharded against dense: what is right passes, and of what is wrong the right leaf is named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardformer.__main__ import main
from shardformer.report import verify
from tests import shared

SPECS = {"up": P(None, "mp"), "down": P("mp", None), "bias": P()}


def parameters():
    random = np.random.default_rng(0)
    normal = lambda *shape: random.normal(size=shape).astype(np.float32)
    return {"up": normal(8, 16), "down": normal(16, 8), "bias": normal(8)}, {"x": normal(4, 8)}


def dense(p, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ p["up"]) @ p["down"] + p["bias"][None]) ** 2)


def sharded(p, batch):
    y = lax.psum(jnp.tanh(batch["x"] @ p["up"]) @ p["down"], "mp") + p["bias"][None]
    return lax.pmean(jnp.mean(y**2), "dp")


def without_psum(p, batch):
    y = jnp.tanh(batch["x"] @ p["up"]) @ p["down"] + p["bias"][None]
    return lax.pmean(jnp.mean(y**2), ("dp", "mp"))


def with_the_bias_before_the_sum(p, batch):
    y = lax.psum(jnp.tanh(batch["x"] @ p["up"]) @ p["down"] + p["bias"][None], "mp")
    return lax.pmean(jnp.mean(y**2), "dp")


def check(function, specs=SPECS, **options):
    device_mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "mp"))
    return verify.verify_function(dense, function, *_with_specs(specs), device_mesh, **options)


def _with_specs(specs):
    values, batch = parameters()
    return values, specs, batch, {"x": P("dp")}


def test_a_right_module_passes():
    rows = check(sharded)
    assert all(row.passes for row in rows)
    assert {row.name for row in rows} == {"loss", "up", "down", "bias"}


def test_a_bias_before_the_sum_is_named():
    """Of the loss and the gradients, the bias's own is wrong by the most."""
    failed = [row.name for row in check(with_the_bias_before_the_sum) if not row.passes]
    assert failed[0] == "bias"
    assert "loss" in failed


def test_a_dropped_sum_is_seen_in_what_it_should_have_summed():
    failed = [row.name for row in check(without_psum) if not row.passes]
    assert failed[0] in ("up", "down")
    assert "loss" in failed


def test_a_wrong_spec_is_refused_or_named():
    with pytest.raises(ValueError, match=r"varying|replicat|mp"):
        check(lambda p, batch: jnp.mean((jnp.tanh(batch["x"] @ p["up"]) @ p["down"]) ** 2))
    swapped = SPECS | {"bias": P("mp")}

    def each_its_own_columns(p, batch):  # what a module does that takes its slice for the whole
        return sharded(p | {"bias": jnp.concatenate([p["bias"], p["bias"]])}, batch)

    failed = [row.name for row in check(each_its_own_columns, swapped, check_vma=False) if not row.passes]
    assert failed[0] == "bias"


def test_this_package_s_model():
    rows = verify.verify_config(shared.tiny(mesh="4x2", zero=1))
    assert all(row.passes for row in rows)
    assert rows[-1].name == "losses of 10 steps"
    assert len(rows) == 2 + len(jax.tree.leaves(shared.trainer().model.shapes))


def test_the_table_names_the_worst_first_and_what_fails():
    rows = verify.compare_loss_and_gradients(
        (1.0, {"a": np.ones(3), "b": np.ones(3)}), (1.0, {"a": np.ones(3), "b": 2 * np.ones(3)})
    )
    text = verify.format_differences(rows)
    assert text.splitlines()[1].split() == ["b", "1.0e+00", "1e-05", "NO"]
    assert text.endswith("sharded and dense differ; the worst is b")
    assert not verify.Difference("nan", float("nan"), 1.0).passes


def test_the_exit_status(monkeypatch, capsys):
    for relative, status in ((0.0, 0), (1.0, 1)):
        monkeypatch.setattr(verify, "verify_config", lambda _, r=relative: [verify.Difference("q", r, 1e-5)])
        assert main(["verify", "tiny", "mesh=4x2"]) == status
    assert capsys.readouterr().out.endswith("sharded and dense differ; the worst is q\n")
    assert main(["verify", "tiny", "mesh=1x1"]) == 2
    assert "mesh=1x1 is the dense model itself" in capsys.readouterr().err
