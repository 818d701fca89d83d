"""`convert RUN FILE.gguf`: a run as one file of llama.cpp's format, with its tokenizer and its chat template."""

import contextlib
import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardformer.config import Config, parsing
from shardformer.convert import gguf_files, gguf_tokenizer, hf_settings, hf_state, merge, runs
from shardformer.convert.convert_options import ToGguf
from shardformer.convert.families import FAMILIES, Stored
from shardformer.convert.families.llama_cpp import (
    GGUF,
    IN_LAYER,
    OUTSIDE,
    Gguf,
    find_frequency_factors,
    list_differences,
    list_settings,
    store,
)
from shardformer.convert.gguf_codes import KINDS
from shardformer.convert.gguf_files import CreatedArray
from shardformer.convert.leaves import Leaves, flatten
from shardformer.convert.new_folder import describe_average, describe_rounding, describe_size, describe_source
from shardformer.errors import RunError, UsageError
from shardformer.files import replacing
from shardformer.model import Model
from shardformer.training.run_folder import Run

SUFFIX = ".gguf"
QUANTIZATION_VERSION = 2
EXACT = ("blk.{}.ffn_gate_inp.weight", "position_embd.weight")  # arrays that llama.cpp has in f32 in every file
TABLES = ("token_embd.weight", "output.weight")  # in q8_0 at least


class Layout(NamedTuple):
    """An array of the file: the parts that are joined to it, and what is added to its values."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Stored, ...]
    plus: float = 0.0


def run_to_gguf(source: Path, target: Path, arguments: list[str]) -> str:
    options = parsing.parse_options(arguments, ToGguf)
    run = Run.open(source)
    gguf = choose_family(run.config.with_factors().replace(lora_rank=0), run.special_tokens.config.get("model_type"))
    with contextlib.ExitStack() as stack:
        state = stack.enter_context(runs.open_state(run, options.step, False, options.ema))
        merged, params = run, state.params
        if run.config.lora.lora_rank:
            merged, state = merge.merge_adapters(run, state)
            params = state.params
        config = merged.config.with_factors()
        arrays = make_arrays(gguf, config, hf_state.fold_embedding_bias(params), options.dtype)
        keys = list_model_keys(gguf, config) | {
            "general.type": "model",
            "general.name": target.name.removesuffix(SUFFIX),
            "general.file_type": KINDS[options.dtype].file_code,
            "general.quantization_version": QUANTIZATION_VERSION,
        }
        keys |= gguf_tokenizer.list_keys(run) if options.tokenizer else gguf_tokenizer.NONE
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with replacing(target) as temporary:
                gguf_files.write_file(temporary, keys, arrays)
        except OSError as error:
            raise RunError(f"cannot write {target}: {error.strerror or error}") from None  # a full disk
    return (
        f"{target}: step {state.step}, {describe_size(params)} as {gguf.architecture} in {options.dtype}"
        f"{', adapters merged' if merged is not run else ''}{describe_source(run)}"
        f"{describe_rounding(run, state.step)}{describe_average(run, options.ema)}"
        f"{_describe_notes(gguf, config, arrays, options, keys)}"
    )


def choose_family(config: Config, published: str | None = None) -> Gguf:
    """Returns a family of llama.cpp that computes what a model computes; the error names how the closest differs."""
    problems = {
        name: [*hf_settings.list_differences(FAMILIES[name], config), *list_differences(gguf, config)]
        for name, gguf in GGUF.items()
    }
    closest = min(problems, key=lambda name: (len(problems[name]), name != published))
    if problems[closest]:
        whose = f"a {published} model" if published and published not in GGUF else "a model"
        raise UsageError(
            f"llama.cpp's format is not written for {whose} with {' '.join(problems[closest])}; the closest of "
            f"{', '.join(GGUF)}, {closest}, differs there"
        )
    return GGUF[closest]


def list_model_keys(gguf: Gguf, config: Config) -> dict[str, Any]:
    """Returns the keys of a file that describe the model."""
    settings = {f"{gguf.architecture}.{name}": value for name, value in list_settings(gguf, config).items()}
    return {"general.architecture": gguf.architecture} | settings


def list_layouts(gguf: Gguf, config: Config) -> list[Layout]:
    """Lists the arrays of a file."""
    names = {
        name.removeprefix("transformer/"): leaf.shape
        for name, leaf in flatten(Model.abstract_parameters(config)).items()
        if not name.endswith("embed/bias")
    }
    outside = {ours: shape for ours, shape in names.items() if not ours.startswith("layers/")}
    layers = {ours.removeprefix("layers/"): shape[1:] for ours, shape in names.items() if ours.startswith("layers/")}
    result = [_lay_out(gguf, config, OUTSIDE[ours], {ours: outside[ours]}) for ours in outside]
    if "head/w" not in outside and gguf.writes_head:
        table = _lay_out(gguf, config, "output.weight", {"embed/tokens": outside["embed/tokens"]})
        result.append(table)
    for layer in range(config.model.layers):
        left = dict(layers)
        for joined, matrices in gguf.joined.items():
            for ending, kind in (("", "weight"), ("_bias", "bias")):
                group = {name: left.pop(name) for name in (f"{one}{ending}" for one in matrices) if name in left}
                if group:
                    result.append(_lay_out(gguf, config, f"blk.{{}}.{joined}.{kind}", group, layer))
        result += [_lay_out(gguf, config, IN_LAYER[ours], {ours: shape}, layer) for ours, shape in left.items()]
        for bias in gguf.zeros:
            size = layers[bias.removesuffix("_bias")][-1]
            result.append(Layout(IN_LAYER[bias].format(layer), (size,), ()))
    return result


def _lay_out(gguf: Gguf, c: Config, name: str, ours: dict[str, tuple[int, ...]], layer: int | None = None) -> Layout:
    """Returns one array of the file, made of `ours`: names and shapes."""
    prefix = "transformer/" if layer is None else "transformer/layers/"
    name, parts = name if layer is None else name.format(layer), []
    for one, shape in ours.items():
        stored = store(gguf, c, one, name)
        prefixed = tuple(part._replace(ours=f"{prefix}{part.ours}") for part in stored.parts)
        turned = stored.shape or (shape if one == "embed/positions" else (*shape[:-2], *shape[-2:][::-1]))
        row = None if layer is None else c.mixture.layers_of(one).index(layer)
        parts.append(stored._replace(parts=prefixed, row=row, shape=turned))
    rows = sum(part.shape[0] for part in parts)
    is_norm = next(iter(ours)).endswith("scale")
    plus = 1.0 if is_norm and c.model.norm == "rmsnorm_plus_one" else 0.0
    return Layout(name, (rows, *parts[0].shape[1:]), tuple(parts), plus)


def make_arrays(gguf: Gguf, config: Config, params: Leaves, dtype: str) -> list[CreatedArray]:
    """Returns the arrays to write, each of which is computed when it is written."""
    arrays = []
    for layout in list_layouts(gguf, config):
        kind = _choose_kind(layout, dtype)
        arrays.append(CreatedArray(layout.name, layout.shape, kind, functools.partial(_make, layout, params, kind)))
    if (factors := find_frequency_factors(config)) is not None:
        arrays.append(CreatedArray("rope_freqs.weight", factors.shape, "f32", lambda: factors))
    return arrays


def _make(layout: Layout, params: Leaves, kind: str) -> np.ndarray:
    if not layout.parts:
        return np.zeros(layout.shape, np.float32)
    parts = [hf_state.compute_array(params, part) for part in layout.parts]
    array = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if kind != "f32":
        hf_state.check_float16(array, layout.name, "f32")
    return array + np.float32(layout.plus) if layout.plus else array


def _choose_kind(layout: Layout, dtype: str) -> str:
    number = layout.name.split(".")[1]
    if len(layout.shape) == 1 or layout.name.replace(f".{number}.", ".{}.") in EXACT:
        return "f32"
    if dtype == "q4_0" and layout.name in TABLES:
        dtype = "q8_0"
    return dtype if layout.shape[-1] % KINDS[dtype].values == 0 else "f16"


def _describe_notes(gguf: Gguf, c: Config, arrays: list[CreatedArray], options: ToGguf, keys: dict) -> str:
    """Returns a line for each thing that a user may not expect."""
    notes = []
    if options.dtype.startswith("q") and (rest := [array for array in arrays if array.kind == "f16"]):
        notes.append(f"{len(rest)} matrices are in f16, as their rows are no multiples of 32 values")
    if keys["tokenizer.ggml.model"] == gguf_tokenizer.NONE["tokenizer.ggml.model"]:
        notes.append("it has no tokenizer: llama.cpp takes token ids only")
    context = keys[f"{gguf.architecture}.context_length"]
    if context < c.model.seq:
        notes.append(
            f"its context is the window of {context} tokens, as llama.cpp has no window in {gguf.architecture}"
        )
    if c.model.activation == "gelu_exact":
        notes.append("llama.cpp computes gelu's tanh form for activation=gelu_exact: logits differ by about 1e-3")
    return "".join(f"\n{note}" for note in notes)
