"""`quantize_aware=`: parameters have the values of codes, and the float32 masters move as parameters without it do."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from shardformer import exact
from shardformer.__main__ import main
from shardformer.checkpoint import read_config
from shardformer.config.names import LAYERS
from shardformer.convert import new_folder
from shardformer.convert import runs as stored_runs
from shardformer.convert.leaves import flatten
from shardformer.data import TokenIds
from shardformer.errors import UsageError
from shardformer.quantized.quantized_weights import FORMS
from shardformer.quantized.rounded_weights import describe_rounding
from shardformer.training.run_folder import Run
from tests import runs, shared
from tests.training.test_updates_exactly import (
    MATRICES,
    apply,
    assert_close,
    compute_adamw,
    draw_gradients,
    make_trainer,
)

TABLE = "transformer/embed"


def round_to_int8(w, axis):
    """Returns the values of int8 codes, whose scale is that of the largest value along `axis`."""
    scale = np.abs(w).max(axis, keepdims=True) / 127
    return np.round(w / scale) * scale


def round_by_form(form, trainer, params):
    weights = FORMS[form](trainer.config)

    def round_leaf(path, leaf):
        name = "/".join(key.key for key in path)
        if not weights.is_quantized(name):
            return leaf
        return exact.run(lambda w: weights.dequantize(name, weights.quantize(name, w)), leaf).outputs

    return jax.tree.map_with_path(round_leaf, params)


@pytest.mark.parametrize(("mesh", "zero"), [("1x1", 0), ("2x2", 1)])
def test_masters_move_and_parameters_are_rounded(mesh, zero):
    trainer = make_trainer(quantize_aware="int8", quantize_after=0, mesh=mesh, zero=zero)
    gradients = draw_gradients(trainer)
    states = apply(trainer, gradients)
    first, last = states[0][0], states[-1][0]
    assert sorted(last.masters[LAYERS]) == sorted(MATRICES[1:])
    assert list(last.masters[TABLE]) == ["tokens"]
    start = {module: leaves | first.masters.get(module, {}) for module, leaves in first.params.items()}
    expected = compute_adamw(start, gradients)
    assert_close(last.masters, {m: {n: expected[m][n] for n in leaves} for m, leaves in last.masters.items()})
    rounded = {LAYERS: {name: round_to_int8(w, -2) for name, w in last.masters[LAYERS].items()}}
    rounded[TABLE] = {"tokens": round_to_int8(last.masters[TABLE]["tokens"], -1)}
    for module, leaves in last.params.items():
        assert_close(leaves, expected[module] | rounded.get(module, {}))


@pytest.mark.parametrize("form", ["int4", "nf4"])
def test_parameters_have_the_values_of_four_bits(form):
    trainer = make_trainer(quantize_aware=form, quantize_after=0)
    (first, _), (second, _) = apply(trainer, draw_gradients(trainer, 1))
    for state in (first, second):
        masters = {module: leaves | state.masters.get(module, {}) for module, leaves in state.params.items()}
        assert_close(state.params, round_by_form(form, trainer, masters))
        off = np.abs(state.params[LAYERS]["up"] - state.masters[LAYERS]["up"]).max()
        assert off > 1e-3


@pytest.mark.parametrize(("keys", "first"), [({"quantize_after": 2}, 2), ({"steps": 4}, 3)])
def test_parameters_are_float_before_they_are_rounded(keys, first):
    trainer = make_trainer(quantize_aware="nf4", **keys)
    states = [state for state, _ in apply(trainer, draw_gradients(trainer))]
    off = [np.abs(state.params[LAYERS]["up"] - state.masters[LAYERS]["up"]).max() for state in states]
    assert off[:first] == [0] * first
    assert min(off[first:]) > 1e-3


def train(tmp_path, form, *words, steps=3) -> int:
    np.tile(np.arange(61), 100).astype("<u2").tofile(tmp_path / "ids.bin")
    sizes = [
        "tiny",
        f"data={tmp_path / 'ids.bin'}",
        f"steps={steps}",
        "mesh=1x1",
        "batch=4",
        "layers=1",
        "eval_every=3",
    ]
    return runs.train(*sizes, f"out={tmp_path / 'run'}", f"quantize_aware={form}", "quantize_after=2", *words)


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    """Returns (the form, the folder of a run that was trained for it, with an average of its weights)."""
    folder = tmp_path_factory.mktemp(request.param)
    assert train(folder, request.param, "ema=0.5") == 0
    return request.param, folder / "run"


def read_params(folder, averaged=False) -> dict:
    return read_state(Run.open(folder), averaged=averaged)


def read_state(run, **how) -> dict:
    with stored_runs.open_state(run, 3, with_moments=False, **how) as state:
        return {name: np.asarray(leaf[...]) for name, leaf in state.params.items()}


def assert_near(found, expected):
    assert found.keys() == expected.keys()
    for name, leaf in found.items():
        np.testing.assert_allclose(leaf, expected[name], rtol=3e-7, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    ("trained", "averaged"),
    [
        ("nf4", False),
        pytest.param("nf4", True, marks=pytest.mark.slow),
        pytest.param("int8", False, marks=pytest.mark.slow),
        pytest.param("int4", False, marks=pytest.mark.slow),
    ],
    indirect=["trained"],
)
def test_stored_codes_are_the_weights_that_were_trained(trained, averaged, tmp_path):
    form, run = trained
    words = [f"weights={form}", "step=3", f"ema={str(averaged).lower()}"]
    assert main(["convert", str(run), str(tmp_path / "small"), *words]) == 0
    config = read_config(tmp_path / "small")
    assert (config.stored.weights, config.stored.quantize_aware) == (form, "none")
    assert_near(read_params(tmp_path / "small"), read_params(run, averaged))


@pytest.mark.parametrize("trained", ["nf4"], indirect=True)
def test_converted_average_is_the_one_that_is_evaluated(trained):
    _, folder = trained
    run = Run.open(folder)
    step, evaluated = run.restore_params(runs.trainer(run.config).model, 3, averaged=True)
    assert step == 3
    assert_near(read_params(folder, averaged=True), flatten(jax.tree.map(np.asarray, evaluated)))


@pytest.mark.parametrize("trained", ["nf4"], indirect=True)
def test_converted_average_before_the_rounding_is_float(trained):
    _, folder = trained
    run = Run.open(folder)
    later = dataclasses.replace(run, config=run.config.replace(steps=8))
    later = dataclasses.replace(later, config=later.config.replace(quantize_after=4))
    exact = read_state(run, averaged=True, before_rounding=True)
    assert_near(read_state(later, averaged=True), exact)


@pytest.mark.parametrize("trained", ["nf4"], indirect=True)
def test_resume_goes_on_with_the_masters(trained, tmp_path):
    """In one start and in two, bitwise."""
    form, folder = trained
    assert train(tmp_path, form, "ema=0.5", steps=6) == 0
    continued = shutil.copytree(folder, tmp_path / "continued")
    assert runs.train("--resume", continued, "steps=6") == 0
    assert runs.rows(continued) == runs.rows(tmp_path / "run")


@pytest.mark.parametrize(
    ("named", "keys"),
    [
        ("quantize_aware=int8 trains all weights, got weights=float lora_rank=2", {"lora_rank": 2}),
        (
            "quantize_aware=int8 has masters of its own",
            {"param_dtype": "bfloat16", "dtype": "bfloat16"},
        ),
        ("give param_dtype=float32, offload=none and an", {"offload": "optimizer"}),
        ("optimizer other than lbfgs", {"optimizer": "lbfgs", "clip": 0.0, "weight_decay": 0.0}),
        ("quantize_after=9 is after the last step, steps=8, so that", {"quantize_after": 9, "steps": 8}),
        (
            "each device of mesh=1x1 has an odd number of d_model 15; give quantize_aware=int8",
            {"quantize_aware": "int4", "d_model": 15, "head_dim": 4, "mesh": "1x1"},
        ),
    ],
)
def test_what_cannot_be_combined_is_named(named, keys):
    with pytest.raises(UsageError) as rejection:
        shared.tiny(**{"quantize_aware": "int8"} | keys)
    assert named in str(rejection.value)


def test_steps_that_epochs_count_may_be_rounded_late():
    late = shared.tiny(quantize_aware="int8", quantize_after=30, steps=20, epochs=2.0)
    with pytest.raises(UsageError, match="is after the last step, steps=20"):
        late.replace(epochs=0.0)


@pytest.mark.parametrize(
    ("steps", "line"),
    [
        (40, "weights are rounded for quantize_aware=nf4 after step 30"),
        (80, "weights are rounded for quantize_aware=nf4 after step 60, and not after step 30 as before; "
             "quantize_after=30 keeps it"),
        (20, "weights are rounded for quantize_aware=nf4 after step 15, and not after step 30 as before"),
    ],
)  # fmt: skip
def test_first_rounded_step_is_named(steps, line):
    config = shared.tiny(quantize_aware="nf4", steps=40)
    assert describe_rounding(config, config.replace(steps=steps)) == line


def test_export_names_a_step_before_the_rounding():
    run = Run(shared.tiny(quantize_aware="nf4", steps=8), TokenIds(61), "")
    said = "; step 5 is before the rounding of quantize_aware, which starts after step 6"
    assert (new_folder.describe_rounding(run, 5), new_folder.describe_rounding(run, 6)) == (said, "")
