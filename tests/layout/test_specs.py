"""Parameter name -> PartitionSpec: one rule for each, by name alone, and the optimizer follows."""

import fnmatch

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardformer import optim
from shardformer.config import presets
from shardformer.config.names import LORA_IN, LORA_OUT
from shardformer.layout import specs
from shardformer.model.task_on_mesh import choose_task

OPTIONS = [
    {}, {"block": "sequential"}, {"norm": "rmsnorm"}, {"positions": "learned"}, {"positions": "t5"},
    {"positions": "none"}, {"bias": "none"}, {"bias": "all"}, {"scan": False}, {"remat": "full"},
    {"tied": True},
    {"objective": "reward"}, {"objective": "mtp"},
    {"block": "sequential", "positions": "learned", "bias": "all", "norm": "rmsnorm"},
    {"embed": "bias"}, {"embed": "norm", "positions": "alibi"}, {"positions": "sinusoids"},
    {"lora_rank": 2, "lora_targets": "q,k,v,o,up,down"},
    {"qk_norm": "head"}, {"qk_norm": "all"}, {"qk_norm": "rotated_head"},
    {"block": "sequential_four_norms"}, {"block": "sequential_post_norms"},
    {"block": "sequential_sum_norms", "embed_dim": 8},
    {"norm": "plain_layernorm", "bias": "none"}, {"sinks": True}, {"previous_tokens": 2},
    {"kv_latent": 8, "q_latent": 8, "rotary_dims": 2},
    {"activation": "swiglu", "lora_rank": 2, "lora_targets": "gate"},
    {"experts": 4, "bias": "none", "activation": "swiglu", "shared_width": 8, "shared_gate": True, "balance_rate": 0.1,
     "expert_bias": True},
    {"experts": 4, "bias": "none", "activation": "swiglu", "shared_width": 8, "lora_rank": 2,
     "lora_targets": "expert_up,shared_up,shared_gate,shared_down"},
]  # fmt: skip


def parameters(preset, **overrides):
    """(settings, {full name: shape}, tree)."""
    settings = presets.preset(preset).replace(**{"mesh": "1x4", "vocab": 61} | overrides)
    tree = choose_task(settings).abstract_parameters(settings)
    return (
        settings,
        {f"{module}/{name}": leaf for module, leaves in tree.items() for name, leaf in leaves.items()},
        tree,
    )


WITH_EXPERTS = specs.list_rules(presets.preset("tiny").replace(experts=4, bias="none"))


def rules_for(name):
    """Returns the patterns of a name's rules; an adapter's factor follows its matrix."""
    matrix = name.removesuffix(LORA_IN).removesuffix(LORA_OUT)
    return [pattern for pattern, _ in WITH_EXPERTS if fnmatch.fnmatchcase(matrix, pattern)]


def every_name():
    return {name for options in OPTIONS for name in parameters("tiny", **options)[1]}


MP = {"smollm2_135m": 3, "gpt2_xl": 5}  # which divide their 9 and 25 heads, as published; 4 for the others


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_every_parameter_of_a_preset_has_one_rule_and_divides(preset):
    mp = MP.get(preset, 4)
    settings, leaves, _ = parameters(preset, mesh=f"1x{mp}", vocab_multiple=128 * mp)
    for name, leaf in leaves.items():
        assert len(rules_for(name)) == 1, name
        for size, axis in zip(leaf.shape, specs.parameter_spec(name, settings), strict=False):
            assert axis is None or size % settings.parallel.mp == 0, name


def test_every_parameter_of_every_option_has_one_rule():
    names = every_name()
    assert {name: len(rules_for(name)) for name in names} == dict.fromkeys(names, 1)


def test_no_rule_is_idle():
    hit = {pattern for name in every_name() for pattern in rules_for(name)}
    assert hit == {pattern for pattern, _ in WITH_EXPERTS} | {"*/embed/tokens"}


@pytest.mark.parametrize("name", ["transformer/layers/query", "transformer/layers/gate_bias", "head/w", "tokens"])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(KeyError, match="no rule"):
        specs.parameter_spec(name, presets.preset("tiny"))


def test_a_spec_depends_on_the_name_and_not_on_the_shape():
    """q and o are both [L, D, D], the table and the head's matrix could be square."""
    settings, leaves, _ = parameters("tiny")
    q, o = "transformer/layers/q", "transformer/layers/o"
    assert leaves[q].shape == leaves[o].shape
    assert specs.parameter_spec(q, settings) != specs.parameter_spec(o, settings)
    assert parameters("tiny", d_model=64)[1]["transformer/embed/tokens"].shape == (64, 64)


def test_count():
    _, leaves, tree = parameters("tiny")
    assert specs.count_parameters(tree) == sum(int(np.prod(leaf.shape)) for leaf in leaves.values())


@pytest.mark.parametrize("options", [{}, {"clip": 0.0}, {"weight_decay": 0.0}])
def test_the_optimizers_moments_lie_as_their_parameters(options):
    settings, _, tree = parameters("tiny", **options)
    expected = specs.parameter_specs(tree, settings)
    optimizer = optim.make_optimizer(settings)
    state = optim.state_specs(optimizer, tree, expected)
    structure = jax.tree.structure(expected)
    found = jax.tree.leaves(state, is_leaf=lambda node: jax.tree.structure(node) == structure)
    assert found.count(expected) == 2  # mu and nu
    assert all(leaf == P() for leaf in found if leaf != expected)


def test_stages_split_the_layers_alone():
    """Whatever else splits them; only layers lead with L."""
    for options in OPTIONS:
        settings, shapes, _ = parameters("tiny", **options)
        piped = settings.replace(mesh="1x4x2", accum=2)
        for name in shapes:
            before, after = (specs.parameter_spec(name, c) for c in (settings, piped))
            assert after == (P("pp", *before[1:]) if name.startswith("transformer/layers/") else before), name
