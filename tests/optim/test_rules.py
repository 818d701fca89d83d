"""lr_rules: which parameters a rule catches, what it does to them on every mesh, and what is refused."""

import re

import jax
import numpy as np
import optax
import pytest

from shardformer import optim
from shardformer.analysis import parameter_tables
from shardformer.config import Config
from shardformer.errors import UsageError
from shardformer.optim import rules
from tests import shared
from tests.optim import trees

RULES = "*bias=10x,embed=0.1x,norm=frozen,up=frozen"
FACTORS = {
    "transformer/embed": {"tokens": 0.1},
    "transformer/layers": {"q": 1.0, "up": 0.0, "up_bias": 10.0, "down": 1.0},
    "transformer/layers/norm": {"scale": 0.0},
    "transformer/head": {"w": 1.0, "bias": 10.0},
}
DECAYED = {"tokens", "q", "down", "w"}
FROZEN = ("transformer/layers/up", "transformer/layers/norm/scale")


def test_the_first_rule_that_matches_wins():
    assert optim.rules.rate_factors(trees.tree(0), Config.of(lr_rules=RULES)) == FACTORS
    swapped = "up*=frozen,*bias=10x,embed=0.1x,norm=frozen"
    assert optim.rules.rate_factors(trees.tree(0), Config.of(lr_rules=swapped)) == FACTORS | {
        "transformer/layers": FACTORS["transformer/layers"] | {"up_bias": 0.0}
    }


@pytest.mark.parametrize(
    ("pattern", "caught"),
    [
        ("bias", {"transformer/head/bias"}),
        ("up", {"transformer/layers/up"}),
        ("layers/norm", {"transformer/layers/norm/scale"}),
        ("norm/", {"transformer/layers/norm/scale"}),
        ("*", {f"{module}/{name}" for module, leaves in FACTORS.items() for name in leaves}),
        ("*/embed/*", {"transformer/embed/tokens"}),
        ("*bias", {"transformer/layers/up_bias", "transformer/head/bias"}),
        ("*/bias", {"transformer/head/bias"}),
        ("layers/[qu]*", {"transformer/layers/q", "transformer/layers/up", "transformer/layers/up_bias"}),
        ("transformer/layers/?", {"transformer/layers/q"}),
        ("head", {"transformer/head/w", "transformer/head/bias"}),
    ],
)
def test_a_pattern_matches_whole_parts_of_a_name(pattern, caught):
    factors = optim.rules.rate_factors(trees.tree(0), Config.of(lr_rules=f"{pattern}=3x"))
    named = {f"{module}/{name}": factor for module, leaves in factors.items() for name, factor in leaves.items()}
    assert {name for name, factor in named.items() if factor == 3} == caught


@pytest.mark.parametrize("pattern", ["o", "k", "s", "ro", "transf", "layers/norm/scal", "embed/q", "*/*/*/*/*"])
def test_a_piece_of_a_word_matches_nothing(pattern):
    """'o' once matched every parameter: it is in 'transformer'."""
    with pytest.raises(UsageError, match="matches no parameter; a pattern is one or more whole parts of a name"):
        optim.rules.check_rules(trees.tree(0), Config.of(lr_rules=f"{pattern}=2x"))


LEARNING = jax.tree.map(bool, FACTORS)


def adamw(factor, counted=LEARNING):
    """Runs optax's optimizer at one rate, on gradients clipped by the norm of the trained ones."""
    settings = trees.config()
    schedule = optim.learning_rate(settings)
    decayed = {module: {name: name in DECAYED for name in leaves} for module, leaves in FACTORS.items()}
    return optax.chain(
        optax.masked(optax.clip_by_global_norm(settings.optimizer.clip), counted),
        optax.adamw(lambda step: factor * schedule(step), settings.optimizer.beta1, settings.optimizer.beta2,
                    weight_decay=settings.optimizer.weight_decay, mask=decayed),
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected():
    """A tree of each rate, and from each what learns at it."""
    at = {factor: trees.plain(adamw(factor)) for factor in (0.1, 1.0, 10.0)} | {0.0: trees.tree(0)}
    return {
        module: {name: at[factor][module][name] for name, factor in leaves.items()}
        for module, leaves in FACTORS.items()
    }


@pytest.mark.slow
def test_five_steps_equal_plain_adamw_at_each_rate(expected):
    """On one mesh; tests/integration/test_cookbook.py takes the steps of a trainer exactly, on all four."""
    settings = trees.config(mesh="2x4", lr_rules=RULES)
    got, state = trees.ours(settings)
    assert max(trees.errors(got, expected).values()) < 1e-5
    momentum = optax.tree.get(state, "mu")["transformer/layers"]["q"]
    assert momentum.addressable_shards[0].data.shape == (2, 8, 8 // settings.parallel.mp)
    moved = trees.errors(got, trees.tree(0))
    assert {name for name, distance in moved.items() if not distance} == set(FROZEN)
    for name in FROZEN:
        module, _, leaf = name.rpartition("/")
        np.testing.assert_array_equal(got[module][leaf], trees.tree(0)[module][leaf])


@pytest.mark.slow
def test_frozen_gradients_in_the_norm_would_clip_the_others(expected):
    """The twin: all gradients counted, as if every parameter learned."""
    wrong = trees.plain(adamw(1.0, counted=jax.tree.map(lambda _: True, FACTORS)))
    assert trees.errors(wrong, expected)["transformer/head/w"] > 1e-4


def test_what_is_frozen_would_decay_if_it_were_not(expected):
    got, _ = trees.ours(trees.config(lr_rules="*bias=10x,embed=0.1x,norm=frozen"))
    assert trees.errors(got, expected)["transformer/layers/up"] > 1e-2


def test_what_is_frozen_has_no_state():
    settings = trees.config(lr_rules=RULES)
    state = jax.eval_shape(optim.make_optimizer(settings).init, trees.tree(0))
    kept = {rules.full_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)}
    assert any(name.endswith("mu/transformer/layers/q") for name in kept)
    assert not [name for name in kept if name.endswith(FROZEN)]


def test_without_rules_the_state_is_what_it_always_was():
    """Checkpoints of runs without rules must stay readable."""
    plain = jax.eval_shape(optim.make_optimizer(trees.config()).init, trees.tree(0))
    faster = jax.eval_shape(optim.make_optimizer(trees.config(lr_rules="bias=10x")).init, trees.tree(0))
    assert jax.tree.structure(plain) == jax.tree.structure(faster)
    assert isinstance(plain[1], optax.ScaleByAdamState)


def test_a_rule_that_matches_nothing_names_what_is_near():
    message = "lr_rules: bais=10x matches no parameter; .* the closest names are transformer/head/bias, "
    for act in (optim.rules.check_rules, parameter_tables.format_rules):
        with pytest.raises(UsageError, match=message):
            act(trees.tree(0), Config.of(lr_rules="bais=10x"))


def test_a_rule_in_the_shadow_of_others_says_so():
    with pytest.raises(UsageError, match=re.escape("earlier rules match every parameter of tokens=3x; move it before")):
        optim.rules.check_rules(trees.tree(0), Config.of(lr_rules="embed=0.1x,tokens=3x"))
    optim.rules.check_rules(trees.tree(0), Config.of(lr_rules="tokens=3x,transformer=0.1x"))


def test_a_wrong_rule_ends_a_trainer_before_it_begins():
    with pytest.raises(UsageError, match="matches no parameter"):
        shared.trainer(lr_rules="nothing=2x")


@pytest.mark.parametrize("text", ["bias", "bias=", "bias=10", "=10x", "bias=x", "bias=-1x", "bias=infx", "bias=nanx",
                                  "bias=ten x", "bias=10x,", ",", "bias=10x;up=2x", "bias=Frozen"])  # fmt: skip
def test_malformed_rules(text):
    with pytest.raises(UsageError, match="lr_rules takes PATTERN=FACTORx or PATTERN=frozen, such as bias=10x; got '"):
        Config.of(lr_rules=text)


def test_two_rules_for_one_pattern():
    with pytest.raises(UsageError, match="lr_rules has two rules for 'up', of which the first would win"):
        Config.of(lr_rules="up=2x,bias=3x,up=frozen")


def test_spaces_and_zero():
    assert Config.of(lr_rules="up=0x, bias=1e1x").optimizer.lr_rules
    assert (
        parameter_tables.format_rules(trees.tree(0), Config.of(lr_rules="up=0x, head=0.5x"))
        .splitlines()[1]
        .startswith("up=frozen")
    )


def test_rules_that_freeze_everything_are_refused():
    message = "lr_rules=transformer=frozen freezes every parameter; leave some to train"
    with pytest.raises(UsageError, match=re.escape(message)):
        optim.rules.check_rules(trees.tree(0), Config.of(lr_rules="transformer=frozen"))
