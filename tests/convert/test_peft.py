"""PEFT's adapters give PEFT's result, W + alpha / r * B A for each matrix, under PEFT's names."""

import functools
import json
import shutil

import jax
import numpy as np
import pytest

from shardformer.__main__ import main
from shardformer.convert import hf_settings, peft, runs, safetensors_files
from shardformer.layout import mesh
from shardformer.model import Decoder, Model
from shardformer.training.run_folder import Run
from tests.convert.hf_models import FOLDER
from tests.runs import FAILED, USAGE

RANK, ALPHA = 3, 12.0
# Of each family: the modules that get adapters, and whether the weights are [inputs, outputs].
MODULES = {
    "gptj": (["attn.q_proj", "attn.v_proj", "attn.out_proj"], False),
    "gpt2": (["attn.c_attn", "mlp.c_proj"], True),
    "gpt_neo": (["attn.attention.k_proj", "mlp.c_fc"], False),
    "neox_parallel": (["attention.query_key_value", "mlp.dense_4h_to_h"], False),
    "llama": (["self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj"], False),
}
MATRIX_OF = {  # in a layer; GPT-2's first one contains three
    "gptj": "transformer.h.{}.", "gpt2": "transformer.h.{}.", "gpt_neo": "transformer.h.{}.",
    "neox_parallel": "gpt_neox.layers.{}.", "llama": "model.layers.{}.",
}  # fmt: skip


def convert(*words) -> int:
    return main(["convert", *map(str, words)])


def arrays(folder, name="model.safetensors") -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in safetensors_files.read_header(folder / name).items()}


def write(path, arrays) -> None:
    made = [
        safetensors_files.CreatedTensor(name, array.dtype, array.shape, functools.partial(lambda array: array, array))
        for name, array in arrays.items()
    ]
    safetensors_files.write_file(path, made)


def make_adapters(folder, name, **changes) -> dict[str, np.ndarray]:
    """As PEFT would save them."""
    modules, is_conv1d = MODULES[name]
    weights, random, found = arrays(FOLDER / name), np.random.RandomState(0), {}
    for layer in range(2):
        for module in modules:
            full = MATRIX_OF[name].format(layer) + module
            first, second = weights[f"{full}.weight"].shape
            inputs, outputs = (first, second) if is_conv1d else (second, first)
            for factor, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                array = random.normal(0, 0.2, shape).astype(np.float32)
                found[f"base_model.model.{full}.lora_{factor}.weight"] = array
    folder.mkdir()
    write(folder / "adapter_model.safetensors", found)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"lora_dropout": 0.1} | changes))
    return found


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")

    @functools.cache
    def base(name):
        assert convert(FOLDER / name, folder / name) == 0
        return folder / name

    return base


def merged_by_hand(name, adapters, scale=ALPHA / RANK) -> dict[str, np.ndarray]:
    found = {key: array.astype(np.float32) for key, array in arrays(FOLDER / name).items()}
    for key in adapters:
        if key.endswith("lora_A.weight"):
            b, module = adapters[key.replace("lora_A", "lora_B")], key.removeprefix("base_model.model.")
            product = scale * (b.astype(np.float64) @ adapters[key])
            found[module.replace("lora_A.", "")] += product.T if MODULES[name][1] else product
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if number else []) for number, name in enumerate(MODULES)]
)
def test_merged_they_are_the_weights_that_peft_would_merge(name, bases, tmp_path):
    adapters = make_adapters(tmp_path / "peft", name)
    assert convert(tmp_path / "peft", tmp_path / "run", f"base={bases(name)}") == 0
    assert convert(tmp_path / "run", tmp_path / "merged", "merge_lora=true") == 0
    assert convert(tmp_path / "merged", tmp_path / "hf", "format=hf") == 0
    found, expected = arrays(tmp_path / "hf"), merged_by_hand(name, adapters)
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_allclose(found[key], array, atol=1e-6, err_msg=key)
    half = merged_by_hand(name, adapters, scale=ALPHA / RANK / 2)
    assert any(np.abs(found[key] - array).max() > 1e-2 for key, array in half.items())


def cut_ranks(settings, found):
    """A rank of 1 for one kind of module: PEFT's rank_pattern."""
    for name, array in found.items():
        if "attn.c_attn" in name:
            found[name] = array[:1].copy() if "lora_A" in name else array[:, :1].copy()
    settings["rank_pattern"] = {"attn.c_attn": 1}


def scale_one_module(settings, found):
    """A factor of 5 / 12 for one module of one layer, which no power of 2 is."""
    settings["alpha_pattern"] = {"h.1.mlp.c_proj": 5}


def adapt_one_layer(settings, found):
    settings["layers_to_transform"] = [1]
    for name in [name for name in found if ".h.0." in name]:
        del found[name]


def divide_by_root(settings, found):
    cut_ranks(settings, found)
    settings["use_rslora"] = True


PATTERNS = [cut_ranks, scale_one_module, adapt_one_layer, divide_by_root]


@pytest.mark.parametrize("change", PATTERNS, ids=lambda change: change.__name__)
def test_patterns_go_in_and_out_again_bitwise(change, bases, tmp_path):
    found = make_adapters(tmp_path / "peft", "gpt2")
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    change(settings, found)
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(settings))
    write(tmp_path / "peft" / "adapter_model.safetensors", found)
    assert convert(tmp_path / "peft", tmp_path / "run", f"base={bases('gpt2')}") == 0
    assert convert(tmp_path / "run", tmp_path / "back", "format=peft") == 0
    back = arrays(tmp_path / "back", "adapter_model.safetensors")
    assert {key: array.tobytes() for key, array in back.items()} == {k: a.tobytes() for k, a in found.items()}
    theirs = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert theirs == settings | {"base_model_name_or_path": None}


def test_weights_that_were_trained_for_codes_take_adapters(bases, tmp_path, monkeypatch):
    make_adapters(tmp_path / "peft", "gpt2")
    base = shutil.copytree(bases("gpt2"), tmp_path / "base")
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(settings | {"quantize_aware": "int4"}))
    monkeypatch.setattr(Run, "check_config", lambda *_: None)  # its checkpoint was not trained
    assert convert(tmp_path / "peft", tmp_path / "run", f"base={base}") == 0
    config = Run.open(tmp_path / "run").config
    assert (config.lora.lora_rank, config.stored.quantize_aware) == (RANK, "none")


@pytest.mark.nightly
def test_adapters_that_were_trained_are_not_those_published(bases, tmp_path):
    """A trained run writes the trained adapters, although it stores the published files."""
    make_adapters(tmp_path / "peft", "gpt2", alpha_pattern={"h.1.mlp.c_proj": 5})
    assert convert(tmp_path / "peft", tmp_path / "run", f"base={bases('gpt2')}") == 0
    np.tile(np.arange(61), 100).astype("<u2").tofile(tmp_path / "ids.bin")
    words = [f"data={tmp_path / 'ids.bin'}", "steps=1", "warmup=0", "lr=0.1", "mesh=1x1"]
    assert main(["train", "--resume", str(tmp_path / "run"), *words]) == 0
    assert convert(tmp_path / "run", tmp_path / "back", "format=peft", "step=1") == 0
    before, after = (arrays(tmp_path / name, "adapter_model.safetensors") for name in ("peft", "back"))
    assert max(np.abs(after[name].sum() - before[name].sum()) for name in before if name in after) > 1e-3


@pytest.mark.parametrize("name", MODULES)
def test_in_and_out_again_they_are_the_same(name, bases, tmp_path):
    adapters = make_adapters(tmp_path / "peft", name)
    assert convert(tmp_path / "peft", tmp_path / "run", f"base={bases(name)}") == 0
    assert convert(tmp_path / "run", tmp_path / "back", "format=peft", "base_name=org/model") == 0
    found = arrays(tmp_path / "back", "adapter_model.safetensors")
    assert {key: array.tobytes() for key, array in found.items()} == {k: a.tobytes() for k, a in adapters.items()}
    settings = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (RANK, ALPHA)
    assert settings["target_modules"] == sorted(MODULES[name][0])
    assert settings["base_model_name_or_path"] == "org/model"
    assert settings["rank_pattern"] == settings["alpha_pattern"] == {}
    assert settings["fan_in_fan_out"] == MODULES[name][1]


@pytest.mark.parametrize("name", ["gpt2", "neox_parallel"])
def test_adapters_of_their_own_for_q_and_v_join_in_one_matrix(name, bases, tmp_path):
    """As a run here trains them: their products are those of the joined matrix, and k has none."""
    base = Run.open(bases(name)).config
    config = base.replace(lora_rank=2, lora_targets="q,v,down", lora_alpha=8.0, base="x", out="")
    shapes = runs.flatten(Model.abstract_parameters(config))
    random = np.random.RandomState(1)
    factors = {
        key: random.normal(0, 0.2, leaf.shape).astype(np.float32) for key, leaf in shapes.items() if "_lora_" in key
    }
    family = hf_settings.choose_family(base)
    found, numbers = peft.join_factors(family, config, factors)
    module = MODULES[name][0][0]
    assert numbers[module] == (4, 16.0)
    settings = peft._write_settings(family, config, numbers)
    assert settings["rank_pattern"] == {module: 4}
    assert settings["alpha_pattern"] == {module: 16.0}
    assert settings["r"] == 2
    (tmp_path / "peft").mkdir()
    write(tmp_path / "peft" / "adapter_model.safetensors", found)
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(settings))
    again, split = peft.split_factors(
        tmp_path / "peft", family, base, peft.read_settings(tmp_path / "peft" / peft.CONFIG)
    )
    assert again.lora.lora_names == ("q", "k", "v", "down")
    assert again.lora.lora_alpha / again.lora.lora_rank == 4
    for matrix in ("q", "k", "v", "down"):
        at = "transformer/layers/" + matrix
        product = split[f"{at}_lora_in"] @ split[f"{at}_lora_out"]
        expected = factors[f"{at}_lora_in"] @ factors[f"{at}_lora_out"] if matrix != "k" else np.zeros_like(product)
        np.testing.assert_allclose(product, expected, atol=1e-6)


def test_adapters_beside_are_adapters_merged(bases, tmp_path):
    make_adapters(tmp_path / "peft", "llama")
    assert convert(tmp_path / "peft", tmp_path / "beside", f"base={bases('llama')}") == 0
    assert convert(tmp_path / "beside", tmp_path / "merged", "merge_lora=true") == 0
    tokens = np.random.RandomState(0).randint(0, 61, (2, 24)).astype(np.int32)
    logits = [logits_of(tmp_path / name, tokens) for name in ("beside", "merged")]
    logits.append(logits_of(bases("llama"), tokens))
    beside, merged, without = (np.asarray(it, np.float64) for it in logits)
    assert np.linalg.norm(beside - merged) <= 1e-6 * np.linalg.norm(merged)
    assert np.linalg.norm(beside - without) > 0.1 * np.linalg.norm(merged)


def logits_of(folder, tokens, step=0):
    run = Run.open(folder, {"mesh": "1x1"})
    model = Model.on(run.config, mesh.make(run.config))
    _, params = run.restore_params(model, step)
    return np.asarray(jax.jit(Decoder(model).logits)(params, tokens))[..., : run.config.model.vocab]


@pytest.mark.parametrize("rslora", [False, True])
def test_ranks_and_scales_of_single_matrices(rslora, bases, tmp_path):
    """A run stores the same values, trains as PEFT would, and exports the same values."""
    patterns = {"rank_pattern": {"attn.q_proj": 2}, "alpha_pattern": {"attn.v_proj": 24.0}, "use_rslora": rslora}
    found = make_adapters(tmp_path / "peft", "gptj", **patterns)
    found = {
        key: array[:2].copy() if "q_proj.lora_A" in key else array[:, :2].copy() if "q_proj" in key else array
        for key, array in found.items()
    }
    write(tmp_path / "peft" / "adapter_model.safetensors", found)
    family, base = "gptj", Run.open(bases("gptj")).config
    settings = peft.read_settings(tmp_path / "peft" / peft.CONFIG)
    config, split = peft.split_factors(tmp_path / "peft", family, base, settings)
    assert (config.lora.lora_rank, config.lora.lora_alpha, config.lora.rslora, config.lora.lora_dropout) == (
        RANK,
        ALPHA,
        rslora,
        0.1,
    )
    assert config.lora.lora_targets == f"q:2,v:{RANK}:24,o"
    for name, module, rank, alpha in (("q", "attn.q_proj", 2, ALPHA), ("v", "attn.v_proj", RANK, 24.0)):
        a, b = (found[f"base_model.model.transformer.h.1.{module}.lora_{it}.weight"] for it in "AB")
        factors = [split[f"transformer/layers/{name}_lora_{it}"][1] for it in ("in", "out")]
        np.testing.assert_array_equal(factors[0], a.T)
        np.testing.assert_array_equal(factors[1], b.T)
        assert config.lora.adapter_scale(name) == pytest.approx(alpha / (rank**0.5 if rslora else rank))
    arrays_again, numbers = peft.join_factors(family, config, split)
    assert {key: array.tobytes() for key, array in arrays_again.items()} == {k: a.tobytes() for k, a in found.items()}
    again = peft._write_settings(family, config, numbers)
    assert {name: again[name] for name in patterns} == patterns
    assert (again["r"], again["lora_alpha"], again["lora_dropout"]) == (RANK, ALPHA, 0.1)


def edit(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rename(folder, old, new):
    found = arrays(folder, "adapter_model.safetensors")
    write(folder / "adapter_model.safetensors", {key.replace(old, new): array for key, array in found.items()})


@pytest.mark.parametrize(
    ("status", "message", "harm"),
    [
        (USAGE, "peft_type='LOHA' is not computed here", lambda it: edit(it, peft_type="LOHA")),
        (USAGE, "use_dora=true is not computed here: DoRA divides", lambda it: edit(it, use_dora=True)),
        (USAGE, "bias='all' is not computed here", lambda it: edit(it, bias="all")),
        (USAGE, "init_lora_weights='pissa' is not computed", lambda it: edit(it, init_lora_weights="pissa")),
        (USAGE, "modules_to_save=['lm_head'] is not known", lambda it: edit(it, modules_to_save=["lm_head"])),
        (USAGE, "alpha_pattern has 'x.*'", lambda it: edit(it, alpha_pattern={"x.*": 2})),
        (FAILED, "ranks and alphas are numbers above 0", lambda it: edit(it, r="8")),
        (FAILED, "ranks and alphas are numbers above 0", lambda it: edit(it, alpha_pattern={"c_attn": -1})),
        (FAILED, "adapter_config.json is damaged", lambda it: edit(it, rank_pattern=[1])),
        (FAILED, "lora_dropout is a number from 0, below 1", lambda it: edit(it, lora_dropout="x")),
        (FAILED, "lora_dropout is a number from 0, below 1", lambda it: edit(it, lora_dropout=10**400)),
        (FAILED, "is damaged", lambda it: (it / "adapter_config.json").write_text("[" * 10**5)),
        (FAILED, "is damaged", lambda it: (it / "adapter_model.safetensors").write_bytes(b"\xff" * 99)),
        (USAGE, "expected adapter_model.safetensors or adapter_model.bin",
         lambda it: (it / "adapter_model.safetensors").unlink()),
        (USAGE, "which no layer of the base has a place for", lambda it: rename(it, "h.1.", "h.7.")),
        (USAGE, "which no layer of the base has a place for", lambda it: rename(it, "mlp.c_proj", "lm_head")),
        (FAILED, "has only one of the two arrays of", lambda it: rename(it, "h.1.mlp.c_proj.lora_B", "x")),
        (USAGE, "has adapters of [3, 64] and [32, 3], and the base makes them",
         lambda it: rename(it, "mlp.c_proj", "attn.c_proj")),
    ],
)  # fmt: skip
def test_hostile_or_foreign_adapters_are_refused_in_one_line(status, message, harm, bases, tmp_path, capsys):
    make_adapters(tmp_path / "peft", "gpt2")
    harm(tmp_path / "peft")
    capsys.readouterr()
    assert convert(tmp_path / "peft", tmp_path / "run", f"base={bases('gpt2')}") == status
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_what_has_no_adapters_or_no_base_is_said(bases, tmp_path, capsys):
    make_adapters(tmp_path / "peft", "gpt2")
    assert convert(tmp_path / "peft", tmp_path / "run") == USAGE
    assert "give the run with the weights: base=RUN" in capsys.readouterr().err
    assert convert(bases("gpt2"), tmp_path / "out", "format=peft") == USAGE
    assert "has no adapters" in capsys.readouterr().err


def test_of_two_patterns_that_fit_the_first_counts(tmp_path):
    modules = {f"transformer.h.{i}.attn.v_proj": 4 for i in range(2)}
    patterns = {"h.1.attn.v_proj": 24, "attn.v_proj": 6}
    found = peft._find_rank_alphas(tmp_path, {"lora_alpha": 8, "alpha_pattern": patterns}, modules)
    assert list(found.values()) == [(4, 6.0), (4, 24.0)]
