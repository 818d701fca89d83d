"""Adapters are merged a layer at a time, as files of single layers ask for them."""

import numpy as np
import pytest

from shardformer.config.names import LAYERS, LORA_IN, LORA_OUT
from shardformer.convert import merge, stored_weights
from shardformer.convert.leaves import Readable, State
from shardformer.data.vocabulary import Bytes
from shardformer.training.run_folder import Run
from tests import shared

SHAPES = {"q": (3, 8, 8), f"q{LORA_IN}": (3, 8, 2), f"q{LORA_OUT}": (3, 2, 8), "v": (3, 8, 8)}


class Stack:
    """Stacked parameters on a disk, and a log of the layers that were read."""

    def __init__(self):
        draw = np.random.default_rng(0).normal
        self.values = {f"{LAYERS}/{name}": draw(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
        self.read: list[tuple[str, range]] = []
        self.leaves = {name: self._make_leaf(name) for name in self.values}

    def _make_leaf(self, name: str) -> Readable:
        def read(bounds):
            self.read.append((name.removeprefix(f"{LAYERS}/"), range(*bounds[0])))
            return self.values[name][tuple(slice(*bound) for bound in bounds)]

        return Readable(self.values[name].shape, np.dtype(np.float32), read)


CONFIG = shared.tiny(lora_rank=2, lora_targets="q")


@pytest.mark.parametrize("as_stored", [False, True])
def test_a_layer_is_merged_without_the_others(as_stored):
    stack = Stack()
    leaves = stored_weights.dequantize(stack.leaves, CONFIG) if as_stored else stack.leaves
    merged = merge.merge_adapters(Run(CONFIG, Bytes(), ""), State(0, leaves))[1].params
    whole = {name: np.asarray(leaf) for name, leaf in merged.items()}
    assert whole.keys() == {f"{LAYERS}/q", f"{LAYERS}/v"}
    for name, adapted in ((f"{LAYERS}/q", ["q", f"q{LORA_IN}", f"q{LORA_OUT}"]), (f"{LAYERS}/v", ["v"])):
        for layer in range(3):
            stack.read.clear()
            np.testing.assert_array_equal(merged[name][layer], whole[name][layer])
            assert stack.read == [(one, range(layer, layer + 1)) for one in adapted]


def test_merged_matrices_have_their_adapters_added():
    stack = Stack()
    merged = merge.merge_adapters(Run(CONFIG, Bytes(), ""), State(0, stack.leaves))[1].params
    q, first, second, v = stack.values.values()
    expected = q[1] + CONFIG.lora.adapter_scale("q") * first[1] @ second[1]
    np.testing.assert_allclose(merged[f"{LAYERS}/q"][1], expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(merged[f"{LAYERS}/v"][1], v[1])
