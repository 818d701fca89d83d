"""`lr_rules`: which parameters learn faster, slower or not at all, by patterns of their names."""

import jax
import jax.numpy as jnp
from jax import tree_util

from shardformer import tables
from shardformer.config import Config
from shardformer.config.parsing import LrRule, parse_lr_rules
from shardformer.errors import UsageError
from shardformer.optim import name_patterns

OTHERS = LrRule("all others", 1.0)


def rate_factors(parameters, config: Config):
    """What the rate of each parameter is multiplied by; 0 where it is frozen."""
    rules = parse_lr_rules(config.lr_rules)
    return name_patterns.map_names(lambda name: _first_match(name, rules).factor, parameters)


def label_frozen(parameters, config: Config):
    """Whether each parameter is "trained" or "frozen"."""
    return jax.tree.map(lambda factor: "trained" if factor else "frozen", rate_factors(parameters, config))


def zero_frozen(tree, config: Config):
    """The tree with zeros for what is frozen."""
    factors = rate_factors(tree, config)
    return jax.tree.map(lambda leaf, factor: leaf if factor else jnp.zeros_like(leaf), tree, factors)


def any_frozen(config: Config) -> bool:
    return any(not rule.factor for rule in parse_lr_rules(config.lr_rules))


def check_rules(parameters, config: Config) -> None:
    """A rule that matches no parameter is a mistake, as nothing would show; so are rules that leave none to train."""
    names = name_patterns.full_names(parameters)
    rules = parse_lr_rules(config.lr_rules)
    used = {_first_match(name, rules) for name in names}
    for rule in rules:
        if rule in used:
            continue
        if any(name_patterns.matches(rule.pattern, name) for name in names):
            raise UsageError(f"lr_rules: earlier rules match all that {rule} would; move it before them")
        closest = ", ".join(name_patterns.closest(rule.pattern, names))
        raise UsageError(
            f"lr_rules: {rule} matches no parameter; a pattern is one or more whole parts of a name, such as "
            f"embed, layers/up or *_bias, and the closest names are {closest}"
        )
    if not any(rule.factor for rule in used):
        raise UsageError(f"lr_rules={config.lr_rules} freezes every parameter; leave some to train")


def format_table(parameters, config: Config) -> str:
    """Which parameters each rule matches, and how many numbers they are; of all others, how many alone."""
    check_rules(parameters, config)
    rules = parse_lr_rules(config.lr_rules)
    matched = {rule: [] for rule in (*rules, OTHERS)}
    for path, leaf in tree_util.tree_leaves_with_path(parameters):
        name = name_patterns.full_name(path)
        matched[_first_match(name, rules)].append((name.removeprefix("transformer/"), leaf.size))
    rows = [
        [str(rule), len(found), sum(size for _, size in found), ", ".join(name for name, _ in found if rule in rules)]
        for rule, found in matched.items()
    ]
    return tables.format_table(rows, ["rule", "arrays", "numbers", "names"])


def _first_match(name: str, rules: tuple[LrRule, ...]) -> LrRule:
    return next((rule for rule in rules if name_patterns.matches(rule.pattern, name)), OTHERS)
