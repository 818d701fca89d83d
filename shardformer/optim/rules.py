"""Patterns of parameter names ('transformer/layers/q'), and `lr_rules`: factors of the learning rate by pattern."""

import difflib
import fnmatch
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import tree_util

from shardformer.config import Config
from shardformer.config.parsing import LrRule, parse_lr_rules
from shardformer.errors import UsageError

OTHERS = LrRule("all others", 1.0)


def rate_factors(parameters, config: Config):
    """Returns the factor of each parameter's learning rate; 0 if it is frozen."""
    rules = parse_lr_rules(config.optimizer.lr_rules)
    return map_names(lambda name: first_match(name, rules).factor, parameters)


def label_frozen(parameters, config: Config):
    """Labels each parameter "trained" or "frozen"."""
    return jax.tree.map(lambda factor: "trained" if factor else "frozen", rate_factors(parameters, config))


def zero_frozen(tree, config: Config):
    """Replaces frozen leaves by zeros."""
    factors = rate_factors(tree, config)
    return jax.tree.map(lambda leaf, factor: leaf if factor else jnp.zeros_like(leaf), tree, factors)


def drop_frozen(parameters: dict, config: Config) -> dict:
    """Returns the tree {module: {name: leaf}} without frozen leaves."""
    factors = rate_factors(parameters, config)
    trained = {
        module: {name: leaf for name, leaf in leaves.items() if factors[module][name]}
        for module, leaves in parameters.items()
    }
    return {module: leaves for module, leaves in trained.items() if leaves}


def any_frozen(config: Config) -> bool:
    """Returns whether a rule freezes parameters."""
    return any(not rule.factor for rule in parse_lr_rules(config.optimizer.lr_rules))


def check_rules(parameters, config: Config) -> None:
    """Raises UsageError if a rule matches no parameter, or if all parameters are frozen."""
    names = full_names(parameters)
    rules = parse_lr_rules(config.optimizer.lr_rules)
    used = {first_match(name, rules) for name in names}
    for rule in rules:
        if rule in used:
            continue
        if any(matches(rule.pattern, name) for name in names):
            raise UsageError(f"lr_rules: earlier rules match every parameter of {rule!s:.80}; move it before them")
        nearest = ", ".join(closest(rule.pattern, names))
        raise UsageError(
            f"lr_rules: {rule!s:.80} matches no parameter; a pattern is one or more whole parts of a name, such as "
            f"embed, layers/up or *_bias, and the closest names are {nearest}"
        )
    if not any(rule.factor for rule in used):
        raise UsageError(f"lr_rules={config.optimizer.lr_rules:.80} freezes every parameter; leave some to train")


def first_match(name: str, rules: tuple[LrRule, ...]) -> LrRule:
    """Returns the rule that sets a parameter's rate."""
    return next((rule for rule in rules if matches(rule.pattern, name)), OTHERS)


def full_name(path) -> str:
    """Returns the name of a leaf at a path of jax.tree_util."""
    return tree_util.keystr(path, simple=True, separator="/")


def full_names(tree) -> list[str]:
    """Returns the names of all leaves."""
    return [full_name(path) for path, _ in tree_util.tree_leaves_with_path(tree)]


def map_names(function: Callable[[str], object], tree):
    """Returns the tree with `function(name)` instead of every leaf."""
    return tree_util.tree_map_with_path(lambda path, _: function(full_name(path)), tree)


def matches(pattern: str, name: str) -> bool:
    """Returns whether the pattern ('embed', 'layers/up', '*_bias') matches consecutive components of a name."""
    wanted, components = pattern.strip("/").split("/"), name.split("/")
    starts = range(len(components) - len(wanted) + 1)
    return any(all(map(fnmatch.fnmatchcase, components[start:], wanted)) for start in starts)


def closest(pattern: str, names: list[str]) -> list[str]:
    """Returns up to three names that are like the pattern, as a whole or in one word."""

    def unlikeness(name: str) -> float:
        return -max(difflib.SequenceMatcher(None, pattern, text).ratio() for text in (name, *re.split("[/_]", name)))

    return sorted(names, key=unlikeness)[:3]
