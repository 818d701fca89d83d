"""A step that is wrong by a millionth is reported, in its gradients and in its update."""

from shardformer.analysis import verify_exact
from shardformer.model import Model
from shardformer.parallel.replicas import Replicated, map_named
from tests import shared

CONFIG = shared.tiny(mesh="2x2", layers=1, d_model=16, heads=4, seq=4, batch=2)
FACTOR = 1 + 1e-6


def find_failed() -> set[str]:
    """Returns the programs and the arrays that differ from those of one device."""
    return {row.name for row in verify_exact.verify_exactly(CONFIG) if not row.passes}


def test_right_step_passes():
    assert find_failed() == set()


def test_gradient_that_is_a_millionth_too_large_is_noticed(broken):
    mean = Replicated.mean

    def scale(self, grads):
        return map_named(lambda name, g: g * FACTOR if name.endswith("/q") else g, mean(self, grads))

    broken(Replicated, "mean", scale)
    assert "gradient of transformer/layers/q" in find_failed()


def test_metric_that_is_a_millionth_too_large_is_noticed(broken):
    """Only on the mesh: one device has the right one."""
    norm = Model.norm

    def scale(self, grads):
        return norm(self, grads) * (FACTOR if self.config.parallel.devices > 1 else 1)

    broken(Model, "norm", scale)
    failed = find_failed()
    assert failed
    assert not any(name.startswith("gradient") for name in failed)
