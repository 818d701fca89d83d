"""PEFT's adapters of experts give PEFT's result: W + alpha / r * einsum("ore,eri->eoi", B, A)."""

import json

import numpy as np
import pytest

from shardformer.adapters import adapter_keys, lora
from shardformer.adapters.adapter_keys import scale_of
from shardformer.convert import hf_settings, peft, runs
from shardformer.convert.leaves import flatten
from shardformer.errors import UsageError
from shardformer.model import Model
from shardformer.training.run_folder import Run
from tests.convert.hf_models import FOLDER
from tests.convert.test_peft import arrays, convert, write
from tests.runs import USAGE

E, D = 4, 32
INNER, OUTER = "mlp.experts.base_layer", "mlp.experts"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "run"
    assert convert(FOLDER / "mixtral", folder) == 0
    return folder


def update_of_peft(a, b, scale) -> np.ndarray:
    """Returns the change of a parameter [experts, outputs, inputs], by the formula of PEFT's ParamWrapper."""
    return scale * np.einsum("ore,eri->eoi", b.reshape(len(b), -1, E), a.reshape(E, -1, a.shape[-1]))


def make_adapters(folder, width: int, **changes) -> dict[str, np.ndarray]:
    """Writes what PEFT saves: gate_up_proj's adapters are inside of the module of down_proj's."""
    random, created = np.random.RandomState(0), {}
    for layer in range(2):
        for module, inputs, outputs, rank in ((INNER, D, 2 * width, 2), (OUTER, width, D, 3)):
            at = f"base_model.model.model.layers.{layer}.{module}.lora_"
            created[f"{at}A.weight"] = random.normal(0, 0.2, (E * rank, inputs)).astype(np.float32)
            created[f"{at}B.weight"] = random.normal(0, 0.2, (outputs, rank * E)).astype(np.float32)
    folder.mkdir()
    write(folder / "adapter_model.safetensors", created)
    settings = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": [],
        "target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"],
        "rank_pattern": {"experts.down_proj": 3},
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings | changes))
    return created


def merged_factors(config, factors) -> dict[str, np.ndarray]:
    """Returns the change of each of our matrices of experts, [layers, experts, inputs, outputs]."""
    return {
        name: config.lora.adapter_scale(name)
        * factors[f"{peft.LAYERS}{name}{lora.IN}"] @ factors[f"{peft.LAYERS}{name}{lora.OUT}"]
        for name in config.lora.lora_names
    }  # fmt: skip


def test_experts_of_peft_are_read_and_written_bitwise(base, tmp_path):
    width = Run.open(base).config.mixture.expert_size
    created = make_adapters(tmp_path / "peft", width)
    assert convert(tmp_path / "peft", tmp_path / "run", f"base={base}") == 0
    run = Run.open(tmp_path / "run")
    with runs.open_state(run, 0, with_moments=False) as state:
        changes = merged_factors(run.config, {name: np.asarray(leaf) for name, leaf in state.params.items()})
    for layer in range(2):
        at = f"base_model.model.model.layers.{layer}."
        a, b = (created[f"{at}{INNER}.lora_{factor}.weight"] for factor in "AB")
        gate, up = np.split(update_of_peft(a, b, 3.0), 2, axis=1)
        down = update_of_peft(*(created[f"{at}{OUTER}.lora_{factor}.weight"] for factor in "AB"), 2.0)
        for name, expected in (("expert_gate", gate), ("expert_up", up), ("expert_down", down)):
            np.testing.assert_allclose(changes[name][layer].swapaxes(1, 2), expected, atol=1e-6)
            assert np.abs(changes[name][1 - layer].swapaxes(1, 2) - expected).max() > 0.1
    assert convert(tmp_path / "run", tmp_path / "back", "format=peft") == 0
    back = arrays(tmp_path / "back", "adapter_model.safetensors")
    assert {key: array.tobytes() for key, array in back.items()} == {k: x.tobytes() for k, x in created.items()}


def test_separate_adapters_of_gate_and_up_are_joined(base):
    config = Run.open(base).config.replace(lora_rank=2, lora_targets="expert_gate:1:5,expert_up,expert_down:3")
    random, shapes = np.random.RandomState(0), flatten(Model.abstract_parameters(config))
    factors = {name: random.normal(size=leaf.shape).astype(np.float32) for name, leaf in shapes.items()
               if adapter_keys.is_adapter(name)}  # fmt: skip
    joined, values = peft.join_factors(hf_settings.choose_family(config.replace(lora_rank=0)), config, factors)
    changes, adapter = merged_factors(config, factors), values["mlp.experts.gate_up_proj"]
    a, b = (joined[f"base_model.model.model.layers.1.{INNER}.lora_{factor}.weight"] for factor in "AB")
    gate, up = np.split(update_of_peft(a, b, scale_of(*adapter, rslora=False)), 2, axis=1)
    np.testing.assert_allclose(changes["expert_gate"][1].swapaxes(1, 2), gate, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(changes["expert_up"][1].swapaxes(1, 2), up, rtol=1e-4, atol=1e-4)
    assert values["mlp.experts.down_proj"].rank == 3


def test_shape_of_another_model_is_rejected(base, tmp_path, capsys):
    make_adapters(tmp_path / "peft", Run.open(base).config.mixture.expert_size + 1)
    assert convert(tmp_path / "peft", tmp_path / "run", f"base={base}") == USAGE
    assert "which no layer of the base has a place for" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["granitemoe", "gpt_oss"])
def test_adapters_without_a_form_in_peft_are_refused(name):
    """Their files have the experts of a layer together, for which PEFT's parameters have no names here."""
    family, config = hf_settings.read_config(FOLDER / name)
    config = config.replace(lora_rank=2, lora_targets="q,expert_up,expert_down")
    with pytest.raises(UsageError, match=rf"adapters of expert_up, expert_down of a {family} model have no form in"):
        peft.join_factors(family, config, {})
