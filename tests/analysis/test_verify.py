"""Sharded against dense: right modules pass, and wrong ones fail with the right leaf named."""

import ast
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardformer import collectives, jax_releases
from shardformer.__main__ import main
from shardformer.analysis import dense_reference, verify
from shardformer.layout import mesh, specs
from shardformer.model import Model
from shardformer.shards import layer
from shardformer.shards import parameters as shard_parameters
from shardformer.shards.projection import ProjectionShard
from tests import shared

SPECS = {"up": P(None, "mp"), "down": P("mp", None), "bias": P()}


def parameters():
    random = np.random.default_rng(0)

    def normal(*shape):
        return random.normal(size=shape).astype(np.float32)

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
    return verify.compare_functions(dense, function, *_with_specs(specs), device_mesh, **options)


def _with_specs(specs):
    values, batch = parameters()
    return values, specs, batch, {"x": P("dp")}


def test_a_right_module_passes():
    rows = check(sharded)
    assert all(row.passes for row in rows)
    assert {row.name for row in rows} == {"loss", "up", "down", "bias"}


def test_a_bias_before_the_sum_is_named():
    """The bias's gradient is further off than the loss and the other gradients."""
    failed = [row.name for row in check(with_the_bias_before_the_sum) if not row.passes]
    assert failed[0] == "bias"
    assert "loss" in failed


def test_dropped_sum_is_named():
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


OURS = shared.tiny(mesh="2x2", layers=1, bias="all")


@pytest.fixture(scope="module")
def dense_of_ours():
    config = OURS.replace(mesh="1x1")
    model = Model.on(config, mesh.make(config))
    parameters, batch = jax.tree.map(np.asarray, model.init(0)), verify.random_batch(config)
    return parameters, batch, verify.loss_and_gradients(model, parameters, batch)[:2]


def failed_of_ours(dense_of_ours) -> list[str]:
    """The worst first."""
    parameters, batch, expected = dense_of_ours
    got = verify.loss_and_gradients(Model.on(OURS, mesh.make(OURS)), parameters, batch)[:2]
    return [row.name for row in verify.compare_loss_and_gradients(expected, got) if not row.passes]


@pytest.mark.slow
def test_a_bias_before_the_sum_of_our_layer_is_named(dense_of_ours, broken):
    """It is zero in a new model, so only its gradient tells."""

    def branch(self, partial_BTD, products, *_, **__):
        for name in products:
            bias = shard_parameters.zeros(f"{name}_bias", self.config.model.d_model)
            partial_BTD = shard_parameters.add_bias(partial_BTD, bias)
        return collectives.reduce(partial_BTD)

    assert failed_of_ours(dense_of_ours) == []
    broken(layer.TransformerLayerShard, "branch", branch)
    assert set(failed_of_ours(dense_of_ours)) == {"transformer/layers/o_bias", "transformer/layers/down_bias"}


@pytest.mark.slow
def test_a_dropped_sum_of_our_layer_is_named(dense_of_ours, broken):
    """Each shard of the model goes on with its own part; the head and the embedding are whole again behind it."""
    broken(collectives, "reduce", lambda x, *_: x)
    with pytest.raises((ValueError, TypeError), match=r"varying|manual_axis_type|vma"):
        failed_of_ours(dense_of_ours)

    def keep_first_part(x, *_):  # the same in a form that JAX's types allow
        return lax.psum(jnp.where(lax.axis_index("mp") == 0, x, jnp.zeros_like(x)), "mp")

    broken(collectives, "reduce", keep_first_part)
    assert failed_of_ours(dense_of_ours)[0].startswith("transformer/layers/")


@pytest.mark.slow
def test_a_wrong_spec_of_our_model_is_named(monkeypatch, capsys):
    wrong = tuple((name, P(None, None, "mp") if name == "*/layers/o" else spec) for name, spec in specs.RULES)
    monkeypatch.setattr(specs, "RULES", wrong)
    assert main(["verify", "tiny", "mesh=2x2", "vocab=61", "layers=1"]) == 1
    said = capsys.readouterr().err
    assert "the sharded model cannot be traced" in said
    assert "layers/o" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_model_of_the_package_passes():
    """Its gradients are compared in float32: those of grad_dtype=bfloat16 differ from the dense ones by 4e-3."""
    keys = {"zero": 3, "accum": 2, "accum_mode": "manual", "dropout": 0.1, "grad_dtype": "bfloat16"}
    rows = verify.verify_config(shared.tiny(mesh="2x2", **keys))
    assert all(row.passes for row in rows)
    assert rows[-1].name == "losses of 10 steps"
    assert len(rows) == 2 + len(jax.tree.leaves(shared.trainer().model.shapes))


def test_the_table_names_the_worst_first_and_what_fails():
    rows = verify.compare_loss_and_gradients(
        (1.0, {"a": np.ones(3), "b": np.ones(3)}), (1.0, {"a": np.ones(3), "b": 2 * np.ones(3)})
    )
    text = verify.format_differences(rows)
    assert text.splitlines()[1].split() == ["b", "dense", "1.0e+00", "1e-05", "NO"]
    assert text.endswith("sharded and dense differ; the worst is b")
    assert not verify.Difference("nan", float("nan"), 1.0).passes


def test_the_exit_status(monkeypatch, capsys):
    for relative, status in ((0.0, 0), (1.0, 1)):
        monkeypatch.setattr(verify, "verify_config", lambda _, r=relative: [verify.Difference("q", r, 1e-5)])
        assert main(["verify", "tiny", "mesh=4x2"]) == status
    verdict, fault = "sharded and dense differ; the worst is q\n", jax_releases.describe_faults()
    assert capsys.readouterr().out.endswith(f"{verdict}{fault}\n" if fault else verdict)
    assert main(["verify", "tiny", "mesh=1x1"]) == 2
    assert "mesh=1x1 is the dense model itself" in capsys.readouterr().err


def test_late_nan_loss_does_not_pass():
    nan = np.float32("nan")
    assert np.isnan(verify.find_worst([np.float32(4), np.float32(3)], [np.float32(4), nan]))


WEIGHTED = shared.tiny(mesh="2x2", layers=1, dropout=0.2, documents="masked", accum=2)


@pytest.fixture(scope="module")
def weighted():
    parameters = jax.tree.map(np.asarray, Model.on(WEIGHTED, mesh.make(WEIGHTED)).init(0))
    batch, key = verify.weighted_batch(WEIGHTED), np.array([3, 4], np.uint32)
    return parameters, batch, key, verify.reference_loss_and_gradients(WEIGHTED, parameters, batch, key)


def assert_verify_passes(weighted, passes: bool) -> None:
    parameters, batch, key, expected = weighted
    got = verify.loss_and_gradients(Model.on(WEIGHTED, mesh.make(WEIGHTED)), parameters, batch, key)[:2]
    rows = verify.compare_loss_and_gradients(expected, got)
    assert all(row.passes for row in rows) == passes, verify.format_differences(rows)


@pytest.mark.nightly
def test_verify_passes_weights_dropout_and_documents(weighted):
    assert_verify_passes(weighted, True)


@pytest.mark.slow
def test_verify_sees_a_mean_of_means(weighted, broken):
    """Each shard divides by its own number of targets."""
    loss = ProjectionShard.loss

    def mean_of_shard(self, x, targets, table=None, weights=None):
        return loss(self, x, targets, table, weights / weights.mean())

    broken(ProjectionShard, "loss", mean_of_shard)
    assert_verify_passes(weighted, False)


def imports_of_the_package(source: str) -> list[str]:
    """Returns the modules of the package that a source imports; "." is a relative import."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names.append(node.module if node.module and not node.level else ".")
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return [name for name in names if name == "." or name.partition(".")[0] == "shardformer"]


def test_dense_reference_imports_nothing_of_the_package():
    assert imports_of_the_package(inspect.getsource(dense_reference)) == []


def test_import_of_the_package_is_noticed():
    assert imports_of_the_package("import jax, shardformer.shards") == ["shardformer.shards"]
    assert imports_of_the_package("def f():\n    from shardformer import shards") == ["shardformer"]
    assert imports_of_the_package("from . import verify") == ["."]


@pytest.mark.slow
def test_rounding_noise_of_zero_gradients_passes():
    """The bias of k has none but rounding errors, as a softmax ignores a sum that is the same for all keys."""
    config = shared.tiny(mesh="2x1", layers=1, bias="all", positions="none")
    parameters, batch = (
        jax.tree.map(np.asarray, Model.on(config, mesh.make(config)).init(0)),
        verify.random_batch(config),
    )
    expected = verify.reference_loss_and_gradients(config, parameters, batch)
    got = verify.loss_and_gradients(Model.on(config, mesh.make(config)), parameters, batch)[:2]
    assert all(row.passes for row in verify.compare_loss_and_gradients(expected, got))
