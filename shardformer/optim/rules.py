"""`lr_rules`: which parameters learn faster, slower or not at all, by patterns of their names."""

import jax
import jax.numpy as jnp
from jax import tree_util

from shardformer import tables
from shardformer.config import Config
from shardformer.errors import UsageError
from shardformer.optim import name_patterns
from shardformer.parsing import LrRule, parse_lr_rules

OTHERS = LrRule("all others", 1.0)


def factors(parameters, config: Config):
    """What the rate of each parameter is multiplied by; 0 where it is frozen."""
    rules = parse_lr_rules(config.lr_rules)
    return name_patterns.tree_map(lambda name: _rule_of(name, rules).factor, parameters)


def labels(parameters, config: Config):
    """Whether each parameter is "trained" or "frozen"."""
    return jax.tree.map(lambda factor: "trained" if factor else "frozen", factors(parameters, config))


def trained(tree, config: Config):
    """The tree with zeros for what is frozen."""
    return jax.tree.map(lambda leaf, factor: leaf if factor else jnp.zeros_like(leaf), tree, factors(tree, config))


def freezes(config: Config) -> bool:
    return any(not rule.factor for rule in parse_lr_rules(config.lr_rules))


def check(parameters, config: Config) -> None:
    """A rule that catches no parameter is a mistake, as nothing would show; so are rules that leave none to train."""
    every = [name_patterns.of(path) for path, _ in tree_util.tree_leaves_with_path(parameters)]
    rules = parse_lr_rules(config.lr_rules)
    caught = {_rule_of(name, rules) for name in every}
    for rule in rules:
        if rule in caught:
            continue
        if any(name_patterns.matches(rule.pattern, name) for name in every):
            raise UsageError(f"lr_rules: earlier rules catch all that {rule} would; move it before them")
        closest = ", ".join(name_patterns.closest(rule.pattern, every))
        raise UsageError(f"lr_rules: {rule} catches no parameter; the closest names are {closest}")
    if not any(rule.factor for rule in caught):
        raise UsageError(f"lr_rules={config.lr_rules} freezes every parameter; leave some to train")


def table(parameters, config: Config) -> str:
    """How many parameters (arrays, and numbers in them) each rule catches."""
    check(parameters, config)
    rules = parse_lr_rules(config.lr_rules)
    sizes = {rule: [] for rule in (*rules, OTHERS)}
    for path, leaf in tree_util.tree_leaves_with_path(parameters):
        sizes[_rule_of(name_patterns.of(path), rules)].append(leaf.size)
    rows = [[str(rule), len(caught), sum(caught)] for rule, caught in sizes.items()]
    return tables.format_table(rows, ["rule", "parameters", "numbers"])


def _rule_of(name: str, rules: tuple[LrRule, ...]) -> LrRule:
    return next((rule for rule in rules if name_patterns.matches(rule.pattern, name)), OTHERS)
