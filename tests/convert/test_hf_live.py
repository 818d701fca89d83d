"""Against transformers itself, where it is installed (pip install transformers torch): it loads what we write."""

import json

import jax
import numpy as np
import pytest

from shardformer import exact
from shardformer.__main__ import main
from shardformer.analysis import traced
from shardformer.convert import mxfp4, reward_heads, safetensors_files
from shardformer.convert.families import FAMILIES
from shardformer.convert.safetensors_files import CreatedTensor
from shardformer.model import Decoder
from tests.convert import hf_models, test_hf, test_mxfp4
from tests.convert.test_hf import SAME

transformers = pytest.importorskip("transformers")
pytest.importorskip("torch")
convert_moe_packed_tensors = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors


def convert(*words) -> int:
    return main(["convert", *map(str, words)])


@pytest.mark.parametrize("name", [name for name in hf_models.MODELS if name not in hf_models.OTHER_TYPES])
def test_transformers_loads_what_we_write(name, tmp_path):
    theirs = hf_models.make_model(name, seed=1)
    theirs.save_pretrained(tmp_path / "src")
    assert main(["convert", str(tmp_path / "src"), str(tmp_path / "run")]) == 0
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "back"), "format=hf"]) == 0
    back = hf_models.load(tmp_path / "back")
    tokens = np.random.RandomState(1).randint(0, hf_models.VOCAB, (2, hf_models.SEQ))
    np.testing.assert_array_equal(hf_models.compute(back, tokens), hf_models.compute(theirs, tokens))


def test_families_of_classifiers_are_those_of_transformers():
    known = transformers.models.auto.modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    named = {name for name, family in FAMILIES.items() if known.get(name) == reward_heads.name_class(family)}
    assert named == reward_heads.FAMILIES


# transformers' float32 logits of the first are up to 5.8e-6 from its float64 logits. Ours are 1.3e-6 from those. On an
# Intel Xeon with AVX-512, its float32 logits of the others are up to 3.5e-6 from ours.
IN_FLOAT64 = {("qwen2_moe", 0), ("minimax_m2", 1), ("hy_v3", 1), ("mellum", 0)}
SETTINGS = [(name, i) for name, settings in hf_models.SETTINGS.items() for i in range(len(settings))]


@pytest.mark.parametrize(("name", "number"), SETTINGS)
def test_unusual_settings_of_a_family(name, number, tmp_path):
    theirs = hf_models.make_model(name, seed=5, **hf_models.SETTINGS[name][number])
    back = convert_there_and_back(theirs, tmp_path, in_float64=(name, number) in IN_FLOAT64)
    assert type(back) is type(theirs)


WRAPPED = [("gemma3", "Gemma3", "Gemma3ForCausalLM", changes) for changes in ({}, *hf_models.SETTINGS["gemma3"][1:])]
WRAPPED += [("llama4", "Llama4", "Llama4ForCausalLM", changes) for changes in ({}, hf_models.SETTINGS["llama4"][2])]
WRAPPED += [
    (name, "Mistral3", f"{model}ForCausalLM", changes)
    for name, model in (("mistral", "Mistral"), ("ministral3", "Ministral3"), ("mistral4", "Mistral4"))
    for changes in ({}, hf_models.SETTINGS[name][1])
]


@pytest.mark.parametrize(("name", "wrapper", "model", "changes"), WRAPPED, ids=str)
def test_text_model_of_a_wrapper(name, wrapper, model, changes, tmp_path):
    """The setting that is left out bounds logits, which the wrapper does not do: it is rejected by name."""
    theirs = hf_models.make_model(name, seed=5, wrapper=wrapper, **changes)
    assert type(theirs) is getattr(transformers, f"{wrapper}ForConditionalGeneration")
    back = convert_there_and_back(theirs, tmp_path)
    assert type(back) is getattr(transformers, model)


def convert_there_and_back(theirs, tmp_path, in_float64=False):
    """Compares logits on three meshes; returns the model that transformers loads from what we write."""
    theirs.save_pretrained(tmp_path / "src")
    tokens = np.random.RandomState(1).randint(0, hf_models.VOCAB, (2, hf_models.SEQ)).astype(np.int32)
    expected = hf_models.compute(theirs, tokens)
    wanted = hf_models.compute(hf_models.to_float64(theirs), tokens) if in_float64 else expected
    compute = compute_exactly if in_float64 else compute_compiled
    config, params = test_hf.hf_settings.read_config(tmp_path / "src")[1], test_hf.params_of(tmp_path / "src")
    for shape in ("1x1", "4x2", "1x8") if config.model.heads % 8 == 0 else ("1x1",):
        logits = compute(config.replace(mesh=shape, batch=8), params, np.tile(tokens, (4, 1)))
        assert np.abs(logits[:2, :, : hf_models.VOCAB] - wanted).max() <= SAME, shape
    assert convert(tmp_path / "src", tmp_path / "run") == 0
    assert convert(tmp_path / "run", tmp_path / "back", "format=hf") == 0
    back = hf_models.load(tmp_path / "back")
    np.testing.assert_array_equal(hf_models.compute(back, tokens), expected)
    return back


def compute_compiled(config, params, tokens):
    ours = test_hf.Model.on(config, test_hf.mesh.make(config))
    return np.asarray(jax.jit(Decoder(ours).logits)(test_hf.on_devices(ours, params), tokens))


def compute_exactly(config, params, tokens):
    """Returns our logits in float64."""
    ours = traced.make_trainer(config).model
    return exact.run(Decoder(ours).logits, test_hf.runs.nest(ours.shapes, params), tokens).outputs


def test_experts_in_mxfp4_are_those_of_transformers(tmp_path):
    """All bytes and all powers; then a folder, whose logits are those of the model that transformers loads."""
    import torch

    codes = np.random.RandomState(0).randint(0, 256, (2, 8, 32, 16)).astype(np.uint8)
    powers = np.arange(512, dtype=np.int32).astype(np.uint8).reshape(2, 8, 32)
    made = [
        CreatedTensor(name, x.dtype, x.shape, lambda x=x: x) for name, x in (("w_blocks", codes), ("w_scales", powers))
    ]
    safetensors_files.write_file(tmp_path / "model.safetensors", made)
    ours = mxfp4.unpack(safetensors_files.read_header(tmp_path / "model.safetensors"))["w"]
    theirs = convert_moe_packed_tensors(torch.from_numpy(codes), torch.from_numpy(powers), dtype=torch.float32)
    np.testing.assert_array_equal(ours.read(), theirs.numpy())
    np.testing.assert_array_equal(ours.read(slice(1, 2)), theirs.numpy()[1:])

    folder, _ = test_mxfp4.pack_folder(tmp_path / "src")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    ).eval()  # fmt: skip
    tokens = np.random.RandomState(1).randint(0, hf_models.VOCAB, (2, hf_models.SEQ)).astype(np.int32)
    config = test_hf.hf_settings.read_config(folder)[1].replace(mesh="1x1", batch=2)
    logits = compute_exactly(config, test_hf.params_of(folder), tokens)  # float32 would be rounded by up to 3.4e-6
    wanted = hf_models.compute(hf_models.to_float64(loaded), tokens)
    assert np.abs(logits[..., : hf_models.VOCAB] - wanted).max() <= SAME


def test_gpt2_with_its_own_vocabulary(tmp_path):
    theirs = hf_models.make_model("gpt2", vocab_size=50_257)
    theirs.save_pretrained(tmp_path / "src")
    _, config = test_hf.hf_settings.read_config(tmp_path / "src")
    assert (config.model.vocab, config.model.padded_vocab) == (50_257, 50_264)
    settings = config.replace(mesh="1x8", batch=2)
    ours = test_hf.Model.on(settings, test_hf.mesh.make(settings))
    tokens = np.random.RandomState(1).randint(0, 50_257, (2, hf_models.SEQ)).astype(np.int32)
    params = test_hf.on_devices(ours, test_hf.params_of(tmp_path / "src"))
    logits = np.asarray(Decoder(ours).logits(params, tokens))[..., :50_257]
    assert np.abs(logits - hf_models.compute(theirs, tokens)).max() <= SAME


PEFT_MODULES = {
    "gpt2": ["c_attn", "mlp.c_proj"],
    "qwen3": ["q_proj", "k_proj", "up_proj"],
    "phi3": ["qkv_proj", "gate_up_proj", "o_proj"],
    "mixtral": ["q_proj"],
    "qwen3_moe": [],
}
PEFT_PARAMETERS = {  # of experts
    "mixtral": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "qwen3_moe": ["mlp.experts.down_proj"],
}


@pytest.mark.parametrize("name", PEFT_MODULES)
def test_peft_loads_our_adapters_and_we_load_its(name, tmp_path):
    peft = pytest.importorskip("peft")
    import torch

    from shardformer.training.run_folder import Run
    from tests.convert.test_peft import logits_of

    theirs = hf_models.make_model(name, seed=2)
    theirs.save_pretrained(tmp_path / "src")
    assert main(["convert", str(tmp_path / "src"), str(tmp_path / "base")]) == 0
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=PEFT_MODULES[name], fan_in_fan_out=name == "gpt2",
        target_parameters=PEFT_PARAMETERS.get(name), rank_pattern={"experts.down_proj": 3},
    )  # fmt: skip
    adapted = peft.get_peft_model(theirs, config).eval()
    torch.manual_seed(0)
    for key, parameter in adapted.named_parameters():
        if "lora_" in key:
            parameter.data.normal_(std=0.2)
    adapted.save_pretrained(tmp_path / "peft")
    tokens = np.random.RandomState(1).randint(0, hf_models.VOCAB, (2, hf_models.SEQ)).astype(np.int32)
    expected = hf_models.compute(adapted, tokens)

    assert convert(tmp_path / "peft", tmp_path / "run", f"base={tmp_path / 'base'}") == 0
    assert Run.open(tmp_path / "run").config.lora.lora_rank == (3 if name == "qwen3_moe" else 4)
    assert np.abs(logits_of(tmp_path / "run", tokens) - expected).max() <= 5e-6
    assert np.abs(logits_of(tmp_path / "base", tokens) - expected).max() > 0.1

    assert convert(tmp_path / "run", tmp_path / "back", "format=peft", f"base_name={tmp_path / 'src'}") == 0
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "src", attn_implementation="eager")
    again = peft.PeftModel.from_pretrained(plain, tmp_path / "back").eval()
    np.testing.assert_array_equal(hf_models.compute(again, tokens), expected)


TRAINED = {  # the adapters of q, k and v are joined after training
    "gpt2": {
        "rank_pattern": {"attn.c_attn": 6},
        "alpha_pattern": {"attn.c_attn": pytest.approx(8 * 3**0.5), "mlp.c_proj": 3},
    },
    "qwen3": {"rank_pattern": {"self_attn.q_proj": 2}, "alpha_pattern": {"mlp.up_proj": 3}},
}


@pytest.mark.parametrize("name", TRAINED)
def test_ranks_alphas_and_rslora_are_those_of_peft(name, tmp_path):
    """Checks trained values too: a trained run survives the round trip."""
    peft = pytest.importorskip("peft")
    import torch

    from tests import runs
    from tests.convert.test_peft import logits_of

    theirs = hf_models.make_model(name, seed=2)
    theirs.save_pretrained(tmp_path / "src")
    first, *_, last = PEFT_MODULES[name]
    patterns = {"rank_pattern": {first: 2}, "alpha_pattern": {last: 3}, "use_rslora": True, "lora_dropout": 0.25}
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=PEFT_MODULES[name], fan_in_fan_out=name == "gpt2", **patterns
    )
    adapted = peft.get_peft_model(theirs, config).eval()
    torch.manual_seed(0)
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_" in parameter_name:
            parameter.data.normal_(std=0.2)
    adapted.save_pretrained(tmp_path / "peft")
    tokens = np.random.RandomState(1).randint(0, hf_models.VOCAB, (2, hf_models.SEQ)).astype(np.int32)
    expected = hf_models.compute(adapted, tokens)
    assert convert(tmp_path / "src", tmp_path / "base") == 0
    assert convert(tmp_path / "peft", tmp_path / "run", f"base={tmp_path / 'base'}") == 0
    assert np.abs(logits_of(tmp_path / "run", tokens) - expected).max() <= 1e-5

    np.tile(np.arange(61), 100).astype("<u2").tofile(tmp_path / "ids.bin")
    words = [f"data={tmp_path / 'ids.bin'}", "steps=2", "warmup=0", "lr=0.02", "mesh=1x1"]
    assert runs.train("--resume", tmp_path / "run", *words) == 0
    assert convert(tmp_path / "run", tmp_path / "back", "format=peft", "step=2") == 0
    settings = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert {key: settings[key] for key in patterns} == patterns | TRAINED[name]
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "src", attn_implementation="eager")
    trained = hf_models.compute(peft.PeftModel.from_pretrained(plain, tmp_path / "back").eval(), tokens)
    assert np.abs(logits_of(tmp_path / "run", tokens, step=2) - trained).max() <= 1e-5
    assert np.abs(trained - expected).max() > 0.01


def test_adapters_trained_here_are_loaded_by_peft(tmp_path):
    """The separate adapters of q and v become one adapter of GPT-2's c_attn, with the sum of their ranks."""
    peft = pytest.importorskip("peft")
    from tests import runs
    from tests.convert.test_peft import logits_of

    hf_models.make_model("gpt2", seed=3).save_pretrained(tmp_path / "src")
    np.tile(np.arange(61), 100).astype("<u2").tofile(tmp_path / "ids.bin")
    words = [f"base={tmp_path / 'src'}", f"data={tmp_path / 'ids.bin'}", "steps=4", "lr=0.05", "warmup=1", "batch=8",
             "mesh=1x1", "lora_rank=2", "lora_targets=q,v,down", f"out={tmp_path / 'run'}"]  # fmt: skip
    assert runs.train(*words) == 0
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "peft"), "format=peft", "step=4"]) == 0
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "src", attn_implementation="eager").eval()
    tokens = np.random.RandomState(1).randint(0, hf_models.VOCAB, (2, hf_models.SEQ)).astype(np.int32)
    before = hf_models.compute(plain, tokens)
    adapted = hf_models.compute(peft.PeftModel.from_pretrained(plain, tmp_path / "peft").eval(), tokens)
    assert np.abs(logits_of(tmp_path / "run", tokens, step=4) - adapted).max() <= 5e-6
    assert np.abs(before - adapted).max() > 0.05


def test_what_is_tuned_here_is_better_there(tmp_path):
    """On rows of a text that training never saw."""
    from tests import runs

    hf_models.make_model("gpt2", seed=4).save_pretrained(tmp_path / "src")
    np.tile(np.arange(61), 200).astype("<u2").tofile(tmp_path / "ids.bin")
    words = [f"base={tmp_path / 'src'}", f"data={tmp_path / 'ids.bin'}", "steps=8", "lr=0.01", "warmup=1", "batch=8",
             "mesh=1x1", "eval_every=8", f"out={tmp_path / 'run'}"]  # fmt: skip
    assert runs.train(*words) == 0
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "back"), "format=hf"]) == 0
    held_out = ((np.arange(4)[:, None] * 17 + np.arange(hf_models.SEQ)) % 61).astype(np.int64)

    def loss(folder):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        logits = hf_models.compute(model, held_out)[:, :-1]
        logprob = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        return -np.take_along_axis(logprob, held_out[:, 1:, None], axis=-1).mean()

    assert loss(tmp_path / "back") < loss(tmp_path / "src") - 0.5
