"""Names that flax, chex, TensorFlow Probability, optax and haiku have lost, against a recorded list.

record_library_names.py wrote the list from the sources of 54 releases.
"""

import json
from pathlib import Path

import pytest

from shardformer.legacy.removed_library_names import LIBRARY_NAMES
from shardformer.legacy.removed_uses import find_removed_uses

RECORDED = json.loads((Path(__file__).parent / "goldens" / "library_names.json").read_text())
LOST = [(module, name) for library in RECORDED.values() for module, names in library["names"].items()
        for name in names.split()]  # fmt: skip
# Names on the list that do not use a lost thing, with the reason.
EXCEPTIONS = {
    **{f"optax.contrib.{name}.*": "a function of this name lives"
       for name in ("cocob", "dadapt_adamw", "prodigy", "reduce_on_plateau", "sam")},
    **{f"flax.config.{name}": "today's flax.config is an object with this option"
       for name in ("*", "flax_filter_frames", "flax_lazy_rng", "flax_profile", "flax_use_orbax_checkpointing")},
    "tensorflow_probability.substrates.jax.mcmc.sample_halton_sequence.*": "a function of this name lives",
    "tensorflow_probability.substrates.numpy.mcmc.sample_halton_sequence.*": "a function of this name lives",
}  # fmt: skip


def test_check_names_every_lost_name_with_advice():
    unknown = []
    for module, name in LOST:
        uses = find_removed_uses(f"import {module}" if name == "*" else f"from {module} import {name}")
        if f"{module}.{name}" not in EXCEPTIONS and (not uses or uses[0].advice.startswith("not in ")):
            unknown.append(f"{module}.{name}")
    assert unknown == []
    assert len(LOST) > 400


def test_every_row_is_a_recorded_loss():
    lost = {f"{module}.{name}" for module, name in LOST} | {module for module, name in LOST if name == "*"}
    assert {name for name in LIBRARY_NAMES if name not in lost} == set()


@pytest.mark.parametrize(
    ("source", "name", "today"),
    [
        ("from flax import optim\noptim.LARS()", "flax.optim.LARS", "optax.lars"),
        ("import flax\nflax.optim.RMSProp", "flax.optim.RMSProp", "optax.rmsprop"),
        ("from flax.deprecated import nn\nnn.Dense", "flax.deprecated.nn.Dense",
         "flax.deprecated.nn comes back without it: jax.nn for activations, flax.linen for modules"),
        ("from tensorflow_probability.substrates import jax as tfp\ntfp.bijectors.AffineScalar",
         "tensorflow_probability.substrates.jax.bijectors.AffineScalar",
         "bijectors.Shift and bijectors.Scale, chained"),
        ("import optax\noptax.scale_by_fromage", "optax.scale_by_fromage", "optax.fromage"),
    ],
)  # fmt: skip
def test_a_use_has_its_replacement(source, name, today):
    assert find_removed_uses(source)[-1][1:] == (name, "not covered", today)


def test_an_assertion_of_chex_is_covered():
    uses = find_removed_uses("import chex\nchex.assert_tree_all_close(x, y)")
    assert uses[-1][1:] == ("chex.assert_tree_all_close", "covered", "chex.assert_trees_all_close")


def test_living_names_are_not_reported():
    source = "import chex\nfrom flax import linen, struct, serialization\nfrom flax.training import train_state\n"
    source += "from tensorflow_probability.substrates import jax as tfp\n"
    source += "chex.assert_trees_all_close(tfp.distributions.Normal, linen.Dense, struct.dataclass)\n"
    assert find_removed_uses(source) == []
