"""Gradients of adapters over nf4 codes equal PEFT's over the weights that bitsandbytes dequantises, recorded."""

import functools
import json

import jax
import numpy as np
import pytest

from shardformer.convert import hf_settings, peft
from shardformer.convert.leaves import flatten, nest
from shardformer.layout import mesh
from shardformer.model import Model
from tests.asserts import relative
from tests.convert.record_qlora import ALPHA, GOLDEN, MODEL, MODULES, RANK, draw_tokens
from tests.convert.test_hf import FOLDER, params_of
from tests.convert.test_peft import write

MOST = 1e-5


@functools.cache
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN))


def read_factors(tmp_path, kind: str):
    """Returns the configuration with adapters, and recorded factors or gradients in the order of our arrays."""
    folder = tmp_path / kind
    folder.mkdir()
    arrays = {name.split()[1]: array for name, array in golden().items() if name.startswith(kind)}
    write(folder / peft.WEIGHTS, arrays)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(MODULES), "bias": "none"}
    (folder / peft.CONFIG).write_text(json.dumps(settings))
    family, base = hf_settings.read_config(FOLDER / MODEL)
    return peft.split_factors(folder, family, base, peft.read_settings(folder / peft.CONFIG))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """The configuration, and the recorded factors and their gradients as our arrays."""
    folder = tmp_path_factory.mktemp("qlora")
    config, factors = read_factors(folder, "factor")
    return config, factors, read_factors(folder, "gradient")[1]


def gradients(adapters, shape: str, weights: str) -> tuple[float, dict]:
    """Returns the loss and the gradients of the adapters over weights in this form, by name."""
    config, factors, _ = adapters
    tokens = draw_tokens().astype(np.int32)
    sizes = {"mesh": shape, "batch": len(tokens), "seq": tokens.shape[1] - 1, "accum": 1, "lora_dropout": 0.0}
    config = config.replace(weights=weights, **sizes)
    model = Model.on(config, mesh.make(config))
    read = nest(model.read_abstract, params_of(FOLDER / MODEL) | factors)
    params = model.store(
        jax.tree.map(lambda leaf, like: jax.device_put(leaf, like.sharding), read, model.read_abstract)
    )
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    losses, found = jax.jit(model.loss_and_grad)(params, batch, jax.random.key_data(jax.random.key(0)))
    return float(losses.loss), {name: np.asarray(leaf) for name, leaf in flatten(found).items()}


def largest_error(found: dict, expected: dict) -> float:
    assert found.keys() == expected.keys()
    return max(relative(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_gradients_are_those_of_peft(adapters):
    loss, found = gradients(adapters, "2x4", "nf4")
    assert loss == pytest.approx(float(golden()["loss"]), rel=1e-6)
    assert largest_error(found, adapters[2]) < MOST


@pytest.mark.slow
def test_gradients_over_other_weights_are_noticed(adapters):
    assert largest_error(gradients(adapters, "1x1", "float")[1], adapters[2]) > 1000 * MOST
