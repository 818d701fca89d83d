"""llama.cpp, through the package xllamacpp, with the weights of a model of ours in a GGUF file.

Codes become those of the format of as many bits, which rounds their values again.
"""

import importlib.util
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from shardformer.config import Config
from shardformer.convert import gguf, gguf_files, stored_weights
from shardformer.convert.leaves import Leaves, flatten
from shardformer.errors import UsageError

# Our codes -> those of the file.
KINDS = {"int8": "q8_0", "int4": "q4_0", "nf4": "q4_0"}


def why_not(c: Config) -> str:
    """Returns the reason why llama.cpp cannot continue tokens of this model; empty if it can."""
    try:
        gguf.choose_family(c)
    except UsageError as error:
        return str(error)
    if jax.default_backend() != "cpu":
        return f"xllamacpp's wheel computes on CPUs, and this is a {jax.default_backend()}"
    return "" if importlib.util.find_spec("xllamacpp") else "xllamacpp is not installed; pip install xllamacpp"


def load_llama_cpp(c: Config, params, rows: int) -> Callable[[np.ndarray, int], np.ndarray]:
    """Returns a function that continues up to `rows` rows of ids at once, on all cores."""
    import xllamacpp

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "random.gguf")
        _write(path, c, params)
        settings = xllamacpp.CommonParams()
        settings.model.path, settings.verbosity = str(path), 0
        settings.n_parallel, settings.n_ctx = rows, rows * c.model.seq
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = os.cpu_count() or 1
        if c.parallel.dtype == "float32":  # as our caches; its own are float16
            settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        server = xllamacpp.Server(settings)

    def continue_ids(prompts, tokens):
        request = {"prompt": prompts.tolist(), "n_predict": tokens, "temperature": 0.0}
        answer = server.handle_completions(request | {"ignore_eos": True, "cache_prompt": False})
        rows = sorted(answer["choices"], key=lambda choice: choice["index"])
        return np.array([[int(number) for number in re.findall(r"<(\d+)>", row["text"])] for row in rows])

    return continue_ids


def _write(path: Path, c: Config, params) -> None:
    """Writes the model with a token <N> for each id N, as the server answers with texts."""
    leaves: Leaves = {name: np.asarray(leaf) for name, leaf in flatten(jax.device_get(params)).items()}
    kind = "f32" if c.parallel.dtype == "float32" else "f16"
    if c.stored.quantized:
        kind = KINDS[c.stored.weights]
        leaves, c = stored_weights.dequantize(leaves, c), c.replace(weights="float")
    family = gguf.choose_family(c)
    keys = gguf.list_model_keys(family, c)
    # The only kind of tokenizer without an end of text: the server never chooses one, if told to continue beyond it.
    keys |= {
        "tokenizer.ggml.model": "rwkv",
        "tokenizer.ggml.tokens": [f"<{number}>" for number in range(c.model.vocab)],
    }
    gguf_files.write_file(path, keys, gguf.make_arrays(family, c, leaves, kind))
