"""flax.optim and flax.nn: put back into a flax that lacks them, with the steps that flax 0.5.3 took on jax 0.4.13."""

import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.legacy import flax_optim
from shardformer.legacy.install import installed
from shardformer.legacy.removed_uses import find_removed_uses

# After two steps at the optimizer's own rate and one at 0.02: the bias, then the weights.
GOLDENS = {
    "Adafactor": ([-9.523e-06, -4.8332e-05], [1.613993, 0.3806178, 0.9155264, 2.1398818, 1.7946439, -0.9631027]),
    "GradientDescent": ([0.14853962, -0.10691653], [1.6073686, 0.3967688, 0.7942569, 2.2494366, 1.8209318, -1.0335521]),
    "Momentum": ([0.2437156, -0.20975399], [1.3977349, 0.39904869, 0.63053995, 2.217766, 1.7600008, -1.1703115]),
    "Adam": ([-0.0041447598, -0.035576764], [1.7187052, 0.41324013, 0.96125835, 2.2302554, 1.8242518, -0.98702043]),
    "LAMB": ([0.0, 0.0], [1.6813426, 0.42079103, 0.93929768, 2.2269719, 1.7889682, -0.99140811]),
}  # fmt: skip
DEFINITIONS = {
    "Adafactor": lambda: flax_optim.Adafactor(0.1, beta1=0.9, weight_decay_rate=0.01, min_dim_size_to_factor=2),
    "GradientDescent": lambda: flax_optim.GradientDescent(0.1),
    "Momentum": lambda: flax_optim.Momentum(0.1, 0.8, weight_decay=0.01, nesterov=True),
    "Adam": lambda: flax_optim.Adam(0.01, weight_decay=0.1),
    "LAMB": lambda: flax_optim.LAMB(0.01, weight_decay=0.1),
}
# A flax without optim and nn, whose serialization keeps what is registered.
FLAX = {
    "__init__.py": "from flax import serialization\nprint('flax runs')\n",
    "serialization.py": """
        registered = {}

        def register_serialization_state(kind, to_state, from_state, override=False):
            registered[kind] = to_state, from_state

        def to_state_dict(x):
            return registered[type(x)][0](x) if type(x) in registered else x

        def from_state_dict(x, state):
            return registered[type(x)][1](x, state) if type(x) in registered else state
    """,
}


@pytest.fixture
def flax_folder(tmp_path, monkeypatch):
    """Puts a flax without the removed names first on the path."""
    (tmp_path / "flax").mkdir()
    for name, text in FLAX.items():
        (tmp_path / "flax" / name).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "flax"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "flax"]:
        del sys.modules[name]


def take_steps(definition, count=3):
    """Returns an optimizer after `count` steps, the third at another learning rate."""
    random = np.random.RandomState(0)

    def draw(*shape):
        return jnp.asarray(random.randn(*shape), jnp.float32)

    optimizer = definition.create({"w": draw(3, 2), "b": jnp.zeros(2)})
    step = jax.jit(lambda optimizer, gradient, **rate: optimizer.apply_gradient(gradient, **rate))
    for number in range(count):
        gradient = {"w": draw(3, 2), "b": draw(2)}
        optimizer = step(optimizer, gradient, **({"learning_rate": 0.02} if number == 2 else {}))
    return optimizer


def distance(optimizer, name):
    bias, weights = GOLDENS[name]
    found = np.concatenate([optimizer.target["b"], np.ravel(optimizer.target["w"])])
    return np.abs(found - np.array([*bias, *weights])).max()


@pytest.mark.parametrize("name", GOLDENS)
def test_optimizer_takes_the_steps_of_flax(name):
    optimizer = take_steps(DEFINITIONS[name]())
    assert distance(optimizer, name) < 1e-6
    assert int(optimizer.state.step) == 3


def test_another_weight_decay_gives_other_steps():
    assert distance(take_steps(flax_optim.Adam(0.01)), "Adam") > 1e-3


def test_full_averages_give_other_steps():
    assert distance(take_steps(flax_optim.Adafactor(0.1, beta1=0.9, weight_decay_rate=0.01)), "Adafactor") > 1e-3


def test_gradient_and_results_of_the_loss():
    optimizer = flax_optim.GradientDescent(0.5).create(jnp.array([1.0, 2.0]))
    new, loss, doubled = optimizer.optimize(lambda x: (jnp.sum(x**2), 2 * x))
    assert (float(loss), doubled.tolist(), new.target.tolist()) == (5.0, [2.0, 4.0], [0.0, 0.0])


def test_step_without_a_learning_rate_is_rejected():
    with pytest.raises(ValueError, match="got no learning rate; pass learning_rate="):
        take_steps(flax_optim.Adam())


class Part:
    """A Traversal of flax over the parameters of some names."""

    def __init__(self, *names):
        self.names = names

    def iterate(self, inputs):
        yield from (inputs[name] for name in sorted(inputs) if name in self.names)


def test_each_part_is_trained_by_its_optimizer():
    adam, momentum = DEFINITIONS["Adam"](), DEFINITIONS["Momentum"]()
    both = take_steps(flax_optim.MultiOptimizer((Part("w"), adam), (Part("b"), momentum)))
    np.testing.assert_allclose(both.target["w"], take_steps(adam).target["w"], rtol=1e-6)
    np.testing.assert_allclose(both.target["b"], take_steps(momentum).target["b"], rtol=1e-6)
    assert int(both.state.step) == 3


def test_a_parameter_of_no_part_stays():
    with_focus = flax_optim.GradientDescent(0.5).create({"b": jnp.ones(2), "w": jnp.ones(2)}, focus=Part("w"))
    new = with_focus.apply_gradient({"b": jnp.ones(2), "w": jnp.ones(2)}, hyper_params=[flax_optim._Rate(1.0)])
    assert (new.target["b"].tolist(), new.target["w"].tolist()) == ([1, 1], [0, 0])
    assert new.state.param_states["b"] is None


def test_parts_that_overlap_are_rejected():
    definition = flax_optim.MultiOptimizer((Part("w", "b"), DEFINITIONS["Adam"]()), (Part("b"), DEFINITIONS["LAMB"]()))
    with pytest.raises(ValueError, match="parts that overlap"):
        definition.create({"b": jnp.ones(2), "w": jnp.ones(2)})


def test_install_completes_flax_when_it_is_imported(flax_folder, capsys):
    with installed():
        assert "flax" not in sys.modules
        import flax
        from flax import optim
        from flax.optim import Adam

        assert capsys.readouterr().out == "flax runs\n"
        assert flax.optim is optim
        assert Adam is flax_optim.Adam
        assert flax.nn.relu(-1.0) == 0.0
        with pytest.raises(AttributeError, match=r"flax\.nn\.Module was removed.*write flax\.linen"):
            _ = flax.nn.Module
        from flax.deprecated import nn
        from flax.nn import relu

        assert nn is flax.deprecated.nn is flax.nn
        assert relu is jax.nn.relu
        with pytest.raises(ImportError, match=r"flax\.optim\.LARS was removed.*write optax\.lars"):
            from flax.optim import LARS  # noqa: F401
    assert not hasattr(flax, "optim")
    assert not hasattr(flax, "deprecated")
    assert "flax.optim" not in sys.modules


def test_install_completes_flax_that_is_imported_already(flax_folder):
    import flax

    with installed():
        from flax import optim

        assert optim is flax.optim is flax_optim


def test_checkpoint_holds_target_and_state(flax_folder):
    with installed():
        from flax import serialization

        optimizer = take_steps(flax_optim.Adam(0.01), 2)
        stored = serialization.to_state_dict(optimizer)
        assert sorted(stored) == ["state", "target"]
        assert sorted(stored["state"]) == ["param_states", "step"]
        assert int(serialization.from_state_dict(take_steps(flax_optim.Adam(0.01), 1), stored).state.step) == 2


def test_check_reports_flax_optim(flax_folder):
    uses = find_removed_uses("from flax import optim\noptim.Adafactor(0.1)\noptim.LARS()\n")
    assert [(use.line, use.name, use.status) for use in uses] == [
        (1, "flax.optim", "covered"),
        (2, "flax.optim.Adafactor", "covered"),
        (3, "flax.optim.LARS", "not covered"),
    ]


def test_check_and_install_agree_on_flax_nn(flax_folder):
    names = ["BatchNorm", "Dense", "Module", "Model", "relu", "softmax", "tanh", "gelu", "stateful", "initializers"]
    with installed():
        import flax

        for home in ("flax.nn", "flax.deprecated.nn"):
            for name in names:
                use = find_removed_uses(f"import {home}\n{home}.{name}")[-1]
                assert (use.status == "covered") == hasattr(flax.nn, name), use
