"""gpt-oss' experts in MXFP4: each number as the format's definition has it, against a loop over bits."""

import json
import shutil

import numpy as np
import pytest

from shardformer.__main__ import main
from shardformer.convert import safetensors_files, weight_files
from shardformer.convert.safetensors_files import CreatedTensor
from shardformer.errors import RunError, UsageError
from tests.convert.hf_models import FOLDER
from tests.convert.test_hf import edit, params_of

EXPERTS = ("gate_up_proj", "down_proj")
HUB = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def value_of(bits: int) -> float:
    """Returns the number of four bits: sign, two bits of exponent, one of mantissa."""
    sign, exponent, half = 1 - 2 * (bits >> 3), bits >> 1 & 3, (bits & 1) / 2
    return sign * ((1 + half) * 2.0 ** (exponent - 1) if exponent else half)


def dequantize(codes: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Returns matrices [experts, outputs, inputs]."""
    result = np.zeros((*codes.shape[:2], 32 * codes.shape[2]), np.float32)
    for (e, row, group, byte), code in np.ndenumerate(codes):
        power = 2.0 ** (int(exponents[e, row, group]) - 127)
        first = 32 * group + 2 * byte
        result[e, row, first : first + 2] = value_of(int(code) & 15) * power, value_of(int(code) >> 4) * power
    return result


def pack_folder(target, change=lambda codes, exponents: (codes, exponents), **config):
    """Copies gpt-oss with codes that are drawn for its experts; returns the folder and the values by name."""
    folder, draw, values = shutil.copytree(FOLDER / "gpt_oss", target), np.random.RandomState(0), {}
    arrays = {name: (t.dtype, t.read()) for name, t in weight_files.find_tensors(folder).items()}
    for name in [name for name in arrays if name.endswith(EXPERTS)]:
        experts, inputs, outputs = arrays.pop(name)[1].shape
        codes = draw.randint(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)
        exponents = draw.randint(110, 128, codes.shape[:3]).astype(np.uint8)
        values[name] = dequantize(codes, exponents).swapaxes(1, 2)
        stored = change(codes, exponents)
        arrays |= {f"{name}_{end}": (x.dtype, x) for end, x in zip(("blocks", "scales"), stored, strict=True)}
    made = [CreatedTensor(name, dtype, x.shape, lambda x=x: x) for name, (dtype, x) in arrays.items()]
    safetensors_files.write_tensors(folder, made, 10**9)
    edit(folder, **{"quantization_config": HUB} | config)
    return folder, values


def test_packed_experts_have_the_values_of_the_format(tmp_path):
    folder, values = pack_folder(tmp_path / "src")
    params, plain = params_of(folder), params_of(FOLDER / "gpt_oss")
    for layer in range(2):
        gate_up, down = (values[f"model.layers.{layer}.mlp.experts.{name}"] for name in EXPERTS)
        np.testing.assert_array_equal(params["transformer/layers/expert_gate"][layer], gate_up[..., 0::2])
        np.testing.assert_array_equal(params["transformer/layers/expert_up"][layer], gate_up[..., 1::2])
        np.testing.assert_array_equal(params["transformer/layers/expert_down"][layer], down)
        assert (gate_up[..., 0::2] != gate_up[..., 1::2]).any()
    same = [name for name, leaf in plain.items() if np.array_equal(leaf, params[name])]
    assert plain.keys() - same == {f"transformer/layers/expert_{name}" for name in ("gate", "up", "down")}


def test_packed_folder_becomes_a_run_and_a_folder_of_floats(tmp_path):
    folder, _ = pack_folder(tmp_path / "src")
    assert main(["convert", str(folder), str(tmp_path / "run")]) == 0
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "back"), "format=hf", "dtype=bfloat16"]) == 0
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    expected, found = params_of(folder), params_of(tmp_path / "back")
    for name, leaf in expected.items():  # bfloat16 has all of MXFP4's values
        np.testing.assert_array_equal(found[name], leaf)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda codes, exponents: (codes[..., :8], exponents),
            "_proj_blocks is uint8 [4, 32, 1, 8], and model.layers.",
        ),
        (lambda codes, exponents: (codes.astype(np.int32), exponents), "_proj_blocks is int32 "),
        (lambda codes, exponents: (codes, exponents[..., 0]), "_proj_scales is uint8 [4, 32], and model.layers."),
        (
            lambda codes, exponents: (codes, exponents[:1]),
            "[1, 32, 1]; expected bytes [experts, outputs, groups, 16]",
        ),
    ],
)
def test_other_forms_are_rejected_by_name(change, named, tmp_path):
    folder, _ = pack_folder(tmp_path / "src", change)
    with pytest.raises(UsageError) as rejection:
        params_of(folder)
    assert named in str(rejection.value)


def test_codes_without_powers_are_incomplete(tmp_path):
    folder, _ = pack_folder(tmp_path / "src")
    tensors = weight_files.find_tensors(folder)
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    arrays = {name: (t.dtype, t.read()) for name, t in tensors.items()}  # before their file is replaced
    made = [CreatedTensor(name, dtype, x.shape, lambda x=x: x) for name, (dtype, x) in arrays.items()]
    safetensors_files.write_tensors(folder, made, 10**9)
    with pytest.raises(RunError, match=r"lacks model\.layers\.1\.mlp\.experts\.down_proj;"):
        params_of(folder)


def test_other_quantizations_are_rejected_by_name(tmp_path):
    folder, _ = pack_folder(tmp_path / "src", quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(UsageError, match=r"quantization_config=\{'quant_method': 'awq', 'bits': 4\} is not read here"):
        params_of(folder)
