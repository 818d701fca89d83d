"""Experts: every mesh gives exactly the losses, gradients and routes of one device and of the dense reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import exact
from shardformer.analysis import traced, verify_exact
from shardformer.experts import expert_layer, grouped_product
from shardformer.model import model as model_module
from shardformer.model.measuring import measure_routes
from shardformer.parallel.replicas import Replicated
from tests import asserts, meshes, shared, tiers

KEYS = {
    "experts": 4, "bias": "none", "block": "sequential", "activation": "swiglu", "d_ff": 32, "balance_loss": 0.1,
    "router_z_loss": 0.01, "balance_rate": 0.001, "shared_width": 8, "shared_gate": True,
}  # fmt: skip
LOSS, GRADIENT = 1e-6, 1e-5  # of compiled programs, in float32
MESHES = (
    ("1x8", {"sequence_parallel": True}),  # mp does not divide the experts: their widths are split
    ("2x4", {"accum": 4, "zero": 3, "scan": False, "remat": "dots"}),
    ("2x2x2", {"accum": 4}),
    ("4x1", {"expert_axes": "dp", "zero": 3, "accum": 2}),
    ("dp2.cp2.mp2", {"expert_axes": "dp", "zero": 1, "sequence_parallel": True, "remat": "full"}),
)
STEPPED = MESHES[3]  # whose routers' biases are updated by counts over dp


@functools.cache
def parameters():
    """Returns parameters with which the routers are far from ties, and the fourth expert of layer 0 has no tokens."""
    params = shared.drawn(shared.tiny(mesh="1x1", **KEYS), 0)
    layers = dict(params["transformer/layers"])
    draw = np.random.default_rng(0)
    layers["router"] = draw.normal(size=layers["router"].shape).astype(np.float32) * 0.3
    bias = np.zeros_like(layers["router_bias"])
    bias[0, 3], bias[1, 1] = -9, 0.05
    layers["router_bias"] = bias
    return params | {"transformer/layers": layers}


def run(mesh, **options) -> verify_exact.Result:
    """Returns the results on a mesh."""
    return meshes.compute_gradients(shared.tiny(mesh=mesh, **KEYS | options), shared.batch(0), parameters())


@functools.cache
def run_on_one_device() -> verify_exact.Result:
    return run("1x1")


@functools.cache
def run_densely() -> verify_exact.Result:
    return verify_exact.compute_dense(shared.tiny(mesh="1x1", **KEYS), parameters(), shared.batch(0), None)


def routes(mesh, **options):
    """Returns the tokens of each expert on a mesh."""
    model = traced.make_trainer(shared.tiny(mesh=mesh, **KEYS | options)).model
    arguments = parameters(), shared.batch(0), np.zeros(2, np.uint32)
    return exact.run(functools.partial(measure_routes, model), *arguments).outputs


def find_wrong(result: verify_exact.Result) -> set[str]:
    """Returns the names of results that are not those of the dense reference."""
    rows = verify_exact.compare(result, run_densely(), "dense")
    return {row.name.rpartition("/")[2] for row in rows if not row.relative <= meshes.EXACT}


def test_device_equals_the_dense_reference():
    assert find_wrong(run_on_one_device()) == set()


@pytest.mark.parametrize(("mesh", "options"), MESHES, ids=str)
def test_mesh_equals_one_device_and_the_dense_reference(mesh, options):
    """With other parameters: the first expert of each layer has no tokens."""
    meshes.assert_equals_one_device(with_steps=(mesh, options) == STEPPED, mesh=mesh, **KEYS | options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [MESHES[3], tiers.at_night(MESHES[1])],
    ids=str,  # experts over dp, and over mp
)
def test_compiled_mesh_equals_the_dense_reference(mesh, options):
    model = shared.trainer(mesh=mesh, **KEYS | options).model
    params, key = jax.device_put(parameters(), model.shardings), np.zeros(2, np.uint32)
    losses, gradients = jax.jit(model.loss_and_grad)(params, shared.batch(0), key)
    assert abs(float(losses.loss) / float(run_densely().loss) - 1) < LOSS
    asserts.assert_trees_close(shared.on_host(gradients), run_densely().gradients, GRADIENT)
    counts = jax.jit(functools.partial(measure_routes, model))(params, shared.batch(0), key)
    np.testing.assert_array_equal(counts, routes("1x1"))


@pytest.mark.parametrize(("mesh", "options"), MESHES, ids=str)
def test_routes_are_equal_on_every_mesh(mesh, options):
    counts = routes(mesh, **options)
    np.testing.assert_array_equal(counts, routes("1x1"))
    assert (counts.sum(1) == 2 * shared.batch(0)["tokens"].size).all()


def test_expert_without_tokens_has_zero_gradients():
    gradients, counts = run_on_one_device().gradients, routes("1x1")
    assert counts[0, 3] == 0
    assert (counts[1] > 0).all()
    layers = gradients["transformer/layers"]
    for name in ("expert_up", "expert_gate", "expert_down"):
        assert (layers[name][0, 3] == 0).all()
        assert np.isfinite(layers[name]).all()
        assert (layers[name][1, 3] != 0).any()


def scale_experts(gradients):
    layers = gradients["transformer/layers"]
    return gradients | {"transformer/layers": layers | {"expert_up": 2 * layers["expert_up"]}}


def test_expert_gradient_scaled_by_its_group_is_noticed(broken):
    """Each expert has the gradients of the tokens of all shards of dp; their mean is over all tokens."""
    run_densely()
    mean = Replicated.mean

    def scale(self, gradients):
        return scale_experts(mean(self, gradients))

    broken(Replicated, "mean", scale)
    assert find_wrong(run("2x1", expert_axes="dp")) == {"expert_up"}


def test_balance_of_each_microbatch_is_noticed(broken):
    run_densely()
    broken(model_module, "choose_counts", lambda config: model_module.count_nothing)
    assert "router" in find_wrong(run("1x1", accum=2))


def test_dropped_token_is_noticed(broken):
    run_densely()
    group_tokens = grouped_product.group_tokens

    def drop(*arguments):
        groups = group_tokens(*arguments)
        return groups._replace(row_NC=groups.row_NC.at[0, 0].set(groups.token_M.shape[0]))

    broken(grouped_product, "group_tokens", drop)
    assert "loss" in find_wrong(run("1x1"))


def test_bias_in_the_gate_is_noticed(broken):
    run_densely()
    broken(expert_layer.jnp, "take_along_axis", lambda score, choice, axis: _biased(score, choice))
    assert "expert_up" in find_wrong(run("1x1"))


def _biased(score, choice):
    E = score.shape[-1]
    one_hot = (choice[..., None] == jnp.arange(E).reshape(1, 1, 1, E)).astype(score.dtype)
    return ((score + 0.05 * jnp.arange(E, dtype=score.dtype).reshape(1, 1, E))[:, :, None] * one_hot).sum(-1)
