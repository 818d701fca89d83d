"""GGUF files: the arrays are those that llama.cpp's own converter would write, and the container reads back."""

import dataclasses
import struct

import numpy as np
import pytest

from shardformer.__main__ import main
from shardformer.config.names import BLOCKS, CODES, LAYERS, SCALES
from shardformer.convert import gguf, gguf_files, hf_settings, runs, weight_files
from shardformer.convert.families.llama_cpp import GGUF, list_settings
from shardformer.convert.gguf_codes import KINDS
from shardformer.quantized import packed_matrix
from shardformer.training.run_folder import Run
from tests.convert.hf_models import FOLDER
from tests.convert.test_hf import params_of
from tests.convert.test_peft import make_adapters, merged_by_hand
from tests.quantized.test_quantized_weights import spread, unpack
from tests.runs import USAGE

MODELS = (
    "gpt2", "gptj", "neox_parallel", "neox_sequential", "llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma",
    "gemma2", "gemma3", "phi", "phi3", "olmo", "olmo2",
)  # fmt: skip
# Names of Hugging Face's modules -> those of llama.cpp's converter.
OUTSIDE = {
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
    "lm_head": "output", "gpt_neox.embed_in": "token_embd", "gpt_neox.final_layer_norm": "output_norm",
    "embed_out": "output", "model.embed_tokens": "token_embd", "model.norm": "output_norm",
    "model.final_layernorm": "output_norm",
}  # fmt: skip
IN_LAYER = {
    "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down", "attn.q_proj": "attn_q", "attn.k_proj": "attn_k",
    "attn.v_proj": "attn_v", "attn.out_proj": "attn_output", "mlp.fc_in": "ffn_up", "mlp.fc_out": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output", "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.dense": "attn_output", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up", "block_sparse_moe.gate": "ffn_gate_inp",
}  # fmt: skip
FOUR_NORMS = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
FOUR_NORMS |= {"pre_feedforward_layernorm": "ffn_norm"}
EXPERTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's LlamaModel.permute: pairs (j, j + K / 2) of each head become neighbours."""
    split = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


def half(array: np.ndarray, dims: int) -> np.ndarray:
    """GPT-J's neighbours (2j, 2j + 1) among the first `dims` rows of each head, as the pairs (j, j + dims / 2)."""
    first = array[:, :dims].reshape(array.shape[0], dims // 2, 2, *array.shape[2:]).swapaxes(1, 2)
    return np.concatenate([first.reshape(array[:, :dims].shape), array[:, dims:]], axis=1)


def expected_arrays(name: str) -> dict[str, np.ndarray]:
    """Converts the folder of a recorded model as llama.cpp's converter does."""
    family, config = hf_settings.read_config(FOLDER / name)
    c, result = config.model, {}
    names = IN_LAYER | (FOUR_NORMS if family in ("gemma2", "gemma3_text", "olmo2") else {})
    experts: dict[str, list[np.ndarray]] = {}
    for key, tensor in weight_files.find_tensors(FOLDER / name).items():
        array = tensor.read().astype(np.float32)
        module, _, kind = key.rpartition(".")
        layer = next((part for part in module.split(".") if part.isdecimal()), None)
        inside = module.partition(f".{layer}.")[2] if layer else ""
        if ".experts." in module:
            experts.setdefault(f"blk.{layer}.{EXPERTS[module.rpartition('.')[2]]}.weight", []).append(array)
            continue
        if family == "gpt2" and array.ndim == 2 and layer:
            array = array.T  # Conv1D
        if family == "gpt_neox" and "query_key_value" in module:
            array = array.reshape(c.heads, 3, -1, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)
        if family in ("llama", "mistral", "mixtral", "olmo") and inside in ("self_attn.q_proj", "self_attn.k_proj"):
            array = permute(array, c.heads if "q_proj" in inside else c.key_value_heads)
        if family == "gptj" and inside in ("attn.q_proj", "attn.k_proj"):
            array = half(array.reshape(c.heads, -1, c.d_model), c.rotary_size).reshape(array.shape)
        if family.startswith("gemma") and array.ndim == 1:
            array = array + np.float32(1)
        result[f"blk.{layer}.{names[inside]}.{kind}" if layer else f"{OUTSIDE[module]}.{kind}"] = array
    result |= {key: np.stack(arrays) for key, arrays in experts.items()}
    if family == "gptj":
        biases = [f"blk.{i}.attn_{part}.bias" for i in range(c.layers) for part in ("q", "k", "v", "output")]
        result |= {key: np.zeros(c.d_model, np.float32) for key in biases}
    return result


def make(name: str, dtype="f32"):
    family, config = hf_settings.read_config(FOLDER / name)
    return gguf.make_arrays(GGUF[family], config, params_of(FOLDER / name), dtype)


@pytest.mark.parametrize("name", MODELS)
def test_arrays_are_those_of_llama_cpps_converter(name):
    found, expected = {array.name: array for array in make(name)}, expected_arrays(name)
    found.pop("rope_freqs.weight", None)
    assert found.keys() == expected.keys()
    for key, array in found.items():
        assert array.shape == array.make().shape == expected[key].shape, key
        np.testing.assert_array_equal(array.make(), expected[key], key)


def test_every_family_of_the_table_is_compared():
    assert {hf_settings.read_config(FOLDER / name)[0] for name in MODELS} == set(GGUF)


def test_the_table_is_the_head_of_a_tied_model_that_needs_one():
    _, config = hf_settings.read_config(FOLDER / "olmo2")
    layouts = gguf.list_layouts(GGUF["olmo2"], config.replace(tied=True))
    (head,) = [layout for layout in layouts if layout.name == "output.weight"]
    assert head.parts[0].parts[0].ours == "transformer/embed/tokens"
    layouts = gguf.list_layouts(dataclasses.replace(GGUF["olmo2"], writes_head=False), config.replace(tied=True))
    assert "output.weight" not in [layout.name for layout in layouts]


def test_factors_of_llama3_divide_the_frequencies():
    """As llama.cpp's converter computes them from the recorded model's scaling: 4, 1, 4 and 12 tokens."""
    (found,) = [array for array in make("llama") if array.name == "rope_freqs.weight"]
    expected = []
    for frequency in 500.0 ** -(np.arange(0, 4, 2) / 4):
        wavelength = 2 * np.pi / frequency
        if wavelength < 12 / 4:
            expected.append(1.0)
        elif wavelength > 12 / 1:
            expected.append(4.0)
        else:
            smooth = (12 / wavelength - 1) / (4 - 1)
            expected.append(1 / ((1 - smooth) / 4 + smooth))
    np.testing.assert_allclose(found.make(), expected, rtol=1e-6)


SETTINGS = {
    "llama": {
        "context_length": 24, "embedding_length": 64, "block_count": 2, "feed_forward_length": 64,
        "attention.head_count": 16, "attention.head_count_kv": 8, "attention.key_length": 4,
        "attention.value_length": 4, "attention.layer_norm_rms_epsilon": 1e-6, "vocab_size": 61,
        "rope.dimension_count": 4, "rope.freq_base": 500.0,
    },
    "mixtral": {
        "rope.scaling.type": "linear", "rope.scaling.factor": 2.0, "expert_count": 4, "expert_used_count": 2,
        "feed_forward_length": 64,
    },
    "mistral": {"context_length": 5},
    "neox_parallel": {"use_parallel_residual": True, "rope.dimension_count": 4, "attention.layer_norm_epsilon": 1e-5},
    "neox_sequential": {"use_parallel_residual": False, "rope.dimension_count": 4},
    "gemma2": {
        "attention.sliding_window": 5, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
    },
    "gpt2": {"attention.layer_norm_epsilon": 1e-5},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_those_of_config_json(name):
    family, config = hf_settings.read_config(FOLDER / name)
    found = list_settings(GGUF[family], config)
    assert SETTINGS[name].items() <= found.items()
    assert found == SETTINGS[name] or name != "llama"


def read_gguf(path) -> tuple[dict, dict[str, tuple[int, tuple[int, ...], bytes]]]:
    """Reads a file by GGUF's specification: its keys, and each array's code of its type, its shape and its bytes."""
    content = path.read_bytes()
    position = 0

    def take(form):
        nonlocal position
        values = struct.unpack_from(f"<{form}", content, position)
        position += struct.calcsize(f"<{form}")
        return values if len(values) > 1 else values[0]

    def take_value(kind):
        nonlocal position
        if kind == 8:
            length = take("Q")
            position += length
            return content[position - length : position].decode()
        if kind == 9:
            inner, count = take("IQ")
            return [take_value(inner) for _ in range(count)]
        return take({4: "I", 5: "i", 6: "f", 7: "?"}[kind])

    magic, version, arrays, keys = take("4sIQQ")
    assert (magic, version) == (b"GGUF", 3)
    found_keys = {}
    for _ in range(keys):
        name = take_value(8)
        found_keys[name] = take_value(take("I"))
    heads = []
    for _ in range(arrays):
        name, axes = take_value(8), take("I")
        sizes = [take("Q") for _ in range(axes)]
        heads.append((name, tuple(reversed(sizes)), *take("IQ")))
    start = position + -position % 32
    result, end = {}, start
    sizes_of = {kind.code: (kind.values, kind.size) for kind in KINDS.values()}
    for name, shape, code, offset in heads:
        assert offset % 32 == 0
        assert start + offset == end  # in the order of the list, each at the next multiple of 32
        values, size = sizes_of[code]
        length = int(np.prod(shape)) // values * size
        result[name] = code, shape, content[end : end + length]
        assert len(result[name][2]) == length
        end += length + -length % 32
    assert end == len(content)
    return found_keys, result


def convert(*words) -> int:
    return main(["convert", *map(str, words)])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf") / "llama"
    assert convert(FOLDER / "llama", folder) == 0
    return folder


def test_a_run_becomes_a_file(base, tmp_path, capsys):
    assert convert(base, tmp_path / "new" / "small.gguf", "dtype=f32") == 0
    assert "0.06M parameters as llama in f32\nit has no tokenizer" in capsys.readouterr().out
    keys, arrays = read_gguf(tmp_path / "new" / "small.gguf")
    assert {"general.architecture": "llama", "general.name": "small", "general.file_type": 0}.items() <= keys.items()
    assert keys["tokenizer.ggml.model"] == "no_vocab"
    assert keys["llama.rope.freq_base"] == 500.0
    expected = expected_arrays("llama")
    assert arrays.keys() - {"rope_freqs.weight"} == expected.keys()
    for name, array in expected.items():
        assert arrays[name] == (0, array.shape, array.tobytes()), name
    assert convert(base, tmp_path / "new" / "small.gguf") == USAGE
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["small.gguf"]


def test_a_folder_that_is_no_run_is_converted_first(tmp_path, capsys):
    assert convert(FOLDER / "llama", tmp_path / "a.gguf") == USAGE
    assert "a.gguf is written from a run only; convert" in capsys.readouterr().err
    assert not (tmp_path / "a.gguf").exists()


def test_values_of_keys_have_the_types_that_llama_cpp_reads(tmp_path):
    keys = {"text": "\u00e4", "count": 7, "share": 0.5, "is": True, "words": ["a", "b"], "kinds": [1, 6], "none": []}
    gguf_files.write_file(tmp_path / "a.gguf", keys | {"scores": [0.0, -1.5]}, [])
    assert read_gguf(tmp_path / "a.gguf") == (keys | {"scores": [0.0, -1.5]}, {})
    content = (tmp_path / "a.gguf").read_bytes()
    assert b"kinds" + struct.pack("<IIQ2i", 9, 5, 2, 1, 6) in content  # of 32 bits with a sign


def test_gguf_of_llama_cpp_reads_the_file(base, tmp_path):
    reader = pytest.importorskip("gguf").GGUFReader
    assert convert(base, tmp_path / "a.gguf", "dtype=q8_0") == 0
    found = {
        tensor.name: (int(tensor.tensor_type), bytes(tensor.data)) for tensor in reader(tmp_path / "a.gguf").tensors
    }
    assert found == {name: (code, content) for name, (code, _, content) in read_gguf(tmp_path / "a.gguf")[1].items()}


@pytest.mark.parametrize("dtype", ["f16", "q8_0", "q4_0"])
def test_matrices_have_the_type_that_was_asked_for(dtype, base, tmp_path):
    assert convert(base, tmp_path / "a.gguf", f"dtype={dtype}") == 0
    keys, arrays = read_gguf(tmp_path / "a.gguf")
    assert keys["general.file_type"] == {"f16": 1, "q8_0": 7, "q4_0": 2}[dtype]
    table = "q8_0" if dtype == "q4_0" else dtype
    for name, array in expected_arrays("llama").items():
        kind = "f32" if array.ndim == 1 else table if name in ("token_embd.weight", "output.weight") else dtype
        encoded = KINDS[kind].encode(array.reshape(-1, array.shape[-1])).tobytes()
        assert arrays[name] == (KINDS[kind].code, array.shape, encoded), name


def test_router_and_positions_are_not_rounded():
    kinds = {array.name: array.kind for array in make("mixtral", "q4_0")}
    assert (kinds["blk.0.ffn_gate_inp.weight"], kinds["blk.1.ffn_up_exps.weight"]) == ("f32", "q4_0")
    assert {array.name: array.kind for array in make("gpt2", "f16")}["position_embd.weight"] == "f32"


def test_matrices_of_narrow_rows_are_in_half_precision():
    config = hf_settings.read_config(FOLDER / "llama")[1].replace(d_ff=40)
    kinds = {array.name: array.kind for array in gguf.make_arrays(GGUF["llama"], config, {}, "q4_0")}
    assert (kinds["blk.0.ffn_down.weight"], kinds["blk.0.ffn_up.weight"]) == ("f16", "q4_0")


def encode_q8_0(values) -> bytes:
    """ggml's quantize_row_q8_0_ref, value by value."""
    result = b""
    for start in range(0, len(values), 32):
        block = values[start : start + 32]
        scale = np.float32(max(abs(value) for value in block)) / np.float32(127)
        inverse = np.float32(1) / scale if scale else np.float32(0)
        codes = []
        for value in block:
            scaled = float(value * inverse)
            codes.append(int(np.floor(abs(scaled) + 0.5)) * (1 if scaled >= 0 else -1))  # roundf
        result += np.float16(scale).tobytes() + np.array(codes, np.int8).tobytes()
    return result


def encode_q4_0(values) -> bytes:
    """ggml's quantize_row_q4_0_ref, value by value."""
    result = b""
    for start in range(0, len(values), 32):
        block = values[start : start + 32]
        largest = absolute = np.float32(0)
        for value in block:
            if absolute < abs(value):
                absolute, largest = abs(value), value
        scale = largest / np.float32(-8)
        inverse = np.float32(1) / scale if scale else np.float32(0)
        codes = [min(15, int(value * inverse + np.float32(8.5))) for value in block]
        result += np.float16(scale).tobytes()
        result += bytes(codes[number] | codes[number + 16] << 4 for number in range(16))
    return result


def draw_values() -> np.ndarray:
    values = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    values[1] = 0
    values[2, 3:] = 0
    values[3] = np.arange(32) - 16  # whole numbers, the largest of which is negative
    values[4, :6] = 127, -127, 0.5, -0.5, 2.5, -2.5  # two of one size, and halves
    values[5] = np.arange(32) * np.float32(127 / 63.5) - 31
    values[6] *= 1e-9
    return values


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_codes_are_ggmls_reference(kind):
    values, expected = draw_values(), {"q8_0": encode_q8_0, "q4_0": encode_q4_0}[kind]
    assert KINDS[kind].encode(values).tobytes() == expected(values.ravel())
    assert KINDS[kind].encode(values.reshape(32, 64)).tobytes() == expected(values.ravel())


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_codes_are_those_of_llama_cpps_package(kind):
    quants = pytest.importorskip("gguf.quants")
    classes = {"q8_0": quants.Q8_0, "q4_0": quants.Q4_0}
    assert KINDS[kind].encode(draw_values()).tobytes() == classes[kind].quantize(draw_values()).tobytes()


REJECTED = {
    "bloom": "for a bloom model with",
    "stablelm": "for a stablelm model with",
    "qwen2": "rotary_scaling=yarn:4,1,32,12",
    "gemma2": "attention_scale=0.333",
    "gemma3": "window_pattern=fw",
    "gpt_neo": "attention_scale=1",
}


@pytest.mark.parametrize("name", REJECTED)
def test_what_llama_cpp_does_not_compute_is_rejected(name, tmp_path, capsys):
    assert convert(FOLDER / name, tmp_path / "run") == 0
    assert convert(tmp_path / "run", tmp_path / "a.gguf") == USAGE
    assert REJECTED[name] in capsys.readouterr().err
    assert not (tmp_path / "a.gguf").exists()


def test_a_weight_too_large_for_half_precision_is_named():
    params = params_of(FOLDER / "llama")
    params["transformer/layers/up"][1, 3, 5] = 70_000
    _, config = hf_settings.read_config(FOLDER / "llama")
    arrays = {array.name: array for array in gguf.make_arrays(GGUF["llama"], config, params, "f16")}
    with pytest.raises(gguf.UsageError, match=r"blk\.1\.ffn_up\.weight has a weight of 70000.*give dtype=f32"):
        arrays["blk.1.ffn_up.weight"].make()


def test_adapters_are_merged(base, tmp_path, capsys):
    adapters = make_adapters(tmp_path / "peft", "llama")
    assert convert(tmp_path / "peft", tmp_path / "run", f"base={base}") == 0
    assert convert(tmp_path / "run", tmp_path / "a.gguf", "dtype=f32") == 0
    assert "adapters merged" in capsys.readouterr().out
    found, expected = read_gguf(tmp_path / "a.gguf")[1], merged_by_hand("llama", adapters)
    for layer in range(2):
        values = np.frombuffer(found[f"blk.{layer}.ffn_gate.weight"][2], np.float32)
        wanted = expected[f"model.layers.{layer}.mlp.gate_proj.weight"]
        np.testing.assert_allclose(values, wanted.ravel(), rtol=0, atol=1e-6)


def test_codes_are_dequantised(base, tmp_path):
    assert convert(base, tmp_path / "run", "weights=nf4") == 0
    assert convert(tmp_path / "run", tmp_path / "a.gguf", "dtype=f32") == 0
    found = read_gguf(tmp_path / "a.gguf")[1]
    with runs.open_state(Run.open(tmp_path / "run"), 0, False, with_codes=True) as state:
        params = {name: np.asarray(leaf) for name, leaf in state.params.items()}
    for ours, theirs in {"up": "ffn_up", "down": "ffn_down", "v": "attn_v"}.items():
        codes, scales, blocks = (params[f"{LAYERS}/{ours}{suffix}"] for suffix in (CODES, SCALES, BLOCKS))
        assert blocks.shape == (2, 2)  # in each layer the scale of all scales, and their mean
        exact = packed_matrix.dynamic_levels()[scales] * blocks[:, :1, None] + blocks[:, 1:, None]
        matrix = spread(exact, codes) * np.array(packed_matrix.NF4_LEVELS)[unpack(codes)]
        for layer in range(2):
            code, _, content = found[f"blk.{layer}.{theirs}.weight"]
            assert code == 0
            values = np.frombuffer(content, np.float32)
            np.testing.assert_allclose(values, matrix[layer].T.ravel(), rtol=1e-6, atol=1e-7)


# Those without gelu, of which llama.cpp computes a table in half precision: their logits differ by 1e-3.
LIVE = ("llama", "mixtral", "qwen3", "olmo", "olmo2", "mistral")


@pytest.mark.parametrize("name", LIVE)
def test_llama_cpp_computes_the_recorded_logits(name, tmp_path):
    llama_cpp = pytest.importorskip("xllamacpp")
    family, config = hf_settings.read_config(FOLDER / name)
    architecture = GGUF[family].architecture
    letters = [chr(letter) for letter in range(ord("!"), ord("!") + config.model.vocab - 1)]
    keys = {"general.architecture": architecture, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"}
    keys |= {f"{architecture}.{key}": value for key, value in list_settings(GGUF[family], config).items()}
    keys |= {"tokenizer.ggml.tokens": ["\u010a", *letters], "tokenizer.ggml.merges": []}
    gguf_files.write_file(tmp_path / "a.gguf", keys, make(name))
    params = llama_cpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(tmp_path / "a.gguf"), 256, 1, False
    params.cache_type_k = params.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = llama_cpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server, golden = llama_cpp.Server(params), np.load(FOLDER / name / "golden.npz")
    for count in (3, 4) if name == "mistral" else (4, 11, 19):
        logits = golden["logits"][0, count - 1].astype(np.float64)
        request = {"prompt": golden["tokens"][0, :count].tolist(), "n_predict": 1, "n_probs": config.model.vocab}
        answer = server.handle_completions(request | {"temperature": 0.0})["choices"][0]["logprobs"]["content"][0]
        found = {entry["id"]: entry["logprob"] for entry in answer["top_logprobs"]}
        expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        assert len(found) == len(expected)
        assert max(abs(found[token] - expected[token]) for token in found) < 1e-4
