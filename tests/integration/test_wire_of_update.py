"""The wire of an update on eight meshes, by formula: two norms, and muon's exchange of parts for full matrices."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardformer.analysis import program_collectives
from shardformer.model import Loss, with_shardings
from shardformer.parallel.layer_exchange import apply_to_full_matrices
from tests import sharded, shared, wire

LAYERS = 8
MESHES = {
    "8x1": {"optimizer": "muon", "zero": 1},
    "4x2": {"optimizer": "muon", "zero": 3},
    "2x4": {"optimizer": "muon"},
    "1x8": {},
    "4x1": {},
    "2x2": {"zero": 1},
    "2x2x2": {"optimizer": "muon", "zero": 1},
    "1x2x4": {"zero": 0},
}


def new_trainer(mesh):
    accum = {"accum": int(mesh.split("x")[2])} if mesh.count("x") == 2 else {}
    return shared.trainer(mesh=mesh, layers=LAYERS, **accum, **MESHES[mesh])


def sent_by_update(t):
    """Returns the collectives of the optimizer, the guard and the norms, without the model's."""
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    grads = with_shardings(t.model.shapes, jax.tree.map(t.model.sharding, t.model.grad_specs))
    update = jax.jit(t.update.apply, out_shardings=(t.shardings, t.model.sharding(P())))
    step = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = update.lower(t.abstract, Loss(scalar, scalar, scalar), grads, step).compile()
    return program_collectives.parse_collectives(compiled.as_text())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_update_sends_two_norms_and_muon_s_matrices(mesh):
    t = new_trainer(mesh)
    found = sent_by_update(t)
    is_split = t.config.parallel.zero or t.config.parallel.mp > 1 or t.config.parallel.pp > 1
    assert Counter(c.shape for c in found if not c.shape) == (wire.NORMS if is_split else {})
    arrays = [c for c in found if c.shape]
    assert {c.operation for c in arrays} == ({"all-to-all"} if t.config.optimizer.name == "muon" else set())
    exchanged, gathered = wire.muon_bytes(t) if t.config.optimizer.name == "muon" else (0, 0)
    assert sum(map(program_collectives.wire_bytes, arrays)) == pytest.approx(exchanged)
    assert exchanged <= 1.1 * gathered


@pytest.mark.parametrize("layers", [1, 2, 3, 8])
@pytest.mark.parametrize("spec", [P(None, None, "mp"), P(None, "dp", "mp"), P(None, ("mp", "dp"))], ids=str)
def test_full_matrices_reach_the_function_in_order(layers, spec):
    """Each row is numbered, so that a part in another part's place is seen."""
    matrices = np.arange(layers * 8 * 8, dtype=np.float32).reshape(layers, 8, 8)

    def transform(full):
        assert full.shape[1:] == (8, 8)
        return full * full[:, :1, :1] + jnp.cumsum(full, axis=1)

    def on_parts(parts):
        return apply_to_full_matrices(transform, parts, spec)

    got = sharded.on_mesh(on_parts, (4, 2), (spec,), spec)(matrices)
    expected = matrices * matrices[:, :1, :1] + np.cumsum(matrices, axis=1)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
