"""Random models with experts on many meshes, against a reference in NumPy and float64 that goes token by token."""

import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest

from shardformer import exact
from shardformer.analysis import traced
from shardformer.model import Model
from shardformer.model.measuring import measure_routes
from tests import meshes, shared
from tests.integration.expert_reference import FAULTS, Reference

# Relative to the loss, and to the norm of a gradient. A program has constants of float32; slopes are differences.
LOSS, SLOPE = 1e-9, 1e-7
GAP = 3e-5  # between the scores of a chosen expert and of another: the step of a slope must not decide
# Each row draws its model from its index. accum_mode=multisteps has the same gradients of microbatches as manual.
ROWS = [
    ("1x1", {}), ("4x2", {"zero": 1, "accum": 2}), ("2x4", {"zero": 3, "accum": 4}),
    ("1x8", {"sequence_parallel": True}), ("2x2x2", {"accum": 4, "zero": 1}), ("dp2.cp2.mp2", {"zero": 3}),
    ("2x4", {"accum": 4, "accum_mode": "manual"}), ("dp2.cp2.mp2", {"accum": 2, "sequence_parallel": True}),
]  # fmt: skip
SHORT = 1, 3, 5


class Result(NamedTuple):
    """The loss, the gradients and the routes of a mesh, and their parameters in float64."""

    loss: float
    gradients: dict
    routes: np.ndarray
    params: dict


def draw_options(row: int) -> dict:
    """Returns the keys of a row: the mesh is the row's, the model is drawn."""
    mesh, options = ROWS[row]
    draw = np.random.default_rng(row)

    def choose(*values):
        return values[draw.integers(len(values))]

    experts = choose(3, 4, 5, 8)
    keys = {
        "experts": experts, "experts_per_token": choose(*range(1, min(experts, 4))), "expert_width": choose(8, 16),
        "shared_width": choose(0, 8), "router": choose("softmax", "sigmoid"), "router_norm": choose(True, False),
        "balance_loss": choose(0.05, 0.5), "router_z_loss": choose(0.0, 0.1), "balance_rate": choose(0.0, 0.1),
        "activation": choose("gelu", "swiglu", "geglu"), "block": choose("parallel", "sequential"),
        "norm": choose("layernorm", "rmsnorm"), "positions": choose("none", "learned"), "scan": choose(True, False),
        "remat": choose("none", "dots", "full"), "kv_heads": choose(None, 2),
    }  # fmt: skip
    keys["router_scale"] = 2.5 if row % 2 else 1.0
    keys["shared_gate"] = bool(keys["shared_width"] and choose(True, False))
    keys["layers"] = 2 if keys["scan"] or mesh == "2x2x2" else 1  # two unrolled layers take long to compile
    if keys["layers"] == 2 and row % 3 == 1:  # dense layers, in every stage alike
        pattern = choose({"dense_first": 1}, {"expert_pattern": "de"}, {"expert_pattern": "ed"})
        keys |= {"expert_pattern": "de", "layers": 4} if mesh == "2x2x2" else pattern
        keys["d_ff"] = 24
    return keys | options | {"mesh": mesh, "seq": 8, "batch": 8, "bias": "none", "z_loss": 0.01}


def batch() -> dict:
    return shared.batch(0, rows=8, seq=8)


@functools.cache
def parameters(row: int) -> dict:
    """Returns float32 parameters far from near-ties, with which every part of the objective matters."""
    config = shared.tiny(**draw_options(row))
    for seed in range(100):
        draw = np.random.default_rng([row, seed])

        def fill(path, leaf, draw=draw):
            name = path[-1].key
            scale = {"tokens": 1.0, "router": 0.4, "router_bias": 0.2, "scale": 0.1}.get(name, 0.2)
            return (scale * draw.normal(size=leaf.shape) + (name == "scale")).astype(np.float32)

        params = jax.tree.map_with_path(fill, Model.abstract_parameters(config))
        if Reference(config, batch()).run(in_float64(params))[3] > GAP:
            return params
    raise AssertionError("every draw has a near-tie")


def in_float64(params):
    return jax.tree.map(lambda p: np.asarray(p, np.float64), params)


@functools.cache
def run(row: int) -> Result:
    """Runs a row on its mesh."""
    config, params = shared.tiny(**draw_options(row)), parameters(row)
    if config.training.accum_mode == "scan":
        result = meshes.compute_gradients(config, batch(), params)
        loss, gradients = result.loss, result.gradients
    else:
        model, key = traced.make_trainer(config).model, np.zeros(2, np.uint32)
        parts = [
            exact.run(model.loss_and_grad_of_part, params, batch(), key, np.int32(i)).outputs
            for i in range(config.training.accum)
        ]
        losses, gradients = jax.tree.map(lambda *x: sum(x) / len(x), *parts)
        loss = losses.loss
    routes = exact.run(functools.partial(measure_routes, traced.make_trainer(config).model), params, batch()).outputs
    return Result(float(loss), gradients, np.asarray(routes), in_float64(params))


def measure_errors(row: int, result: Result, fault: str = "") -> dict[str, float]:
    """Returns the relative errors of the loss and of the worst slopes, and the number of wrong counts."""
    config = shared.tiny(**draw_options(row))
    reference, draw = Reference(config, batch(), fault), np.random.default_rng(row)
    nats, _, routes, _ = reference.run(result.params)
    errors = {"loss": abs(result.loss / nats - 1), "routes": float(np.abs(result.routes - routes).sum())}
    for module, leaves in result.gradients.items():
        for name, leaf in leaves.items():
            gradient = np.asarray(leaf, np.float64)
            norm = np.linalg.norm(gradient)
            if name == "router_bias":  # its gradient is by definition each expert's mean excess of pairs
                excess = (routes * config.experts.experts - routes.sum(1, keepdims=True)) / len(batch()["tokens"])
                errors[name] = float(np.abs(gradient - excess).max())
                continue
            signs = draw.choice([-1.0, 1.0], gradient.shape)
            for kind, direction in (("along", gradient / norm), ("signs", signs / np.sqrt(signs.size))):
                slope = reference.slope(result.params, module, name, direction)
                errors[f"{module}/{name}, {kind}"] = abs((gradient * direction).sum() - slope) / norm
    return errors


def is_right(errors: dict[str, float]) -> bool:
    slopes = [error for name, error in errors.items() if name not in ("loss", "routes", "router_bias")]
    same_routes = errors["routes"] == 0 and errors.get("router_bias", 0.0) < 1e-12
    return same_routes and errors["loss"] < LOSS and max(slopes) < SLOPE


@pytest.mark.parametrize(
    "row", [*SHORT, *(pytest.param(row, marks=pytest.mark.slow) for row in range(len(ROWS)) if row not in SHORT)]
)
def test_mesh_equals_numpy(row):
    errors = measure_errors(row, run(row))
    assert is_right(errors), sorted(errors.items(), key=lambda item: -item[1])[:5]


def test_rows_have_every_kind_of_model():
    drawn = [draw_options(row) for row in range(len(ROWS))]
    for name in ("router", "router_norm", "block", "scan", "activation", "shared_gate"):
        assert len({keys[name] for keys in drawn}) > 1, name
    on_mp = [shared.tiny(**keys) for keys in drawn if not keys["mesh"].endswith("x1")]
    splits = {config.mixture.splits_experts for config in on_mp}
    assert splits == {True, False}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_experts_are_noticed(fault):
    row = next(row for row in SHORT if draw_options(row)["balance_rate"])
    assert not is_right(measure_errors(row, run(row), fault))


def test_gradient_scaled_by_the_mesh_is_noticed():
    result = run(1)
    layers = result.gradients["transformer/layers"]
    scaled = layers | {"expert_up": 4 * layers["expert_up"]}
    assert not is_right(measure_errors(1, result._replace(gradients={"transformer/layers": scaled})))


def test_some_rows_have_dense_layers():
    configs = [shared.tiny(**draw_options(row)) for row in range(len(ROWS))]
    mixed = [config.parallel.mesh for config in configs if config.mixture.mixes_layers]
    assert len(mixed) > 1
    assert any(config.parallel.pp > 1 for config in configs if config.mixture.mixes_layers)
