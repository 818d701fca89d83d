"""`lr_rules`: factors of the learning rate by patterns of parameter names; a factor of 0 freezes."""

import jax
import jax.numpy as jnp

from shardformer.config import Config
from shardformer.config.parsing import LrRule, parse_lr_rules
from shardformer.errors import UsageError
from shardformer.optim import name_patterns

OTHERS = LrRule("all others", 1.0)


def rate_factors(parameters, config: Config):
    """Returns the factor of each parameter's learning rate; 0 if it is frozen."""
    rules = parse_lr_rules(config.lr_rules)
    return name_patterns.map_names(lambda name: first_match(name, rules).factor, parameters)


def label_frozen(parameters, config: Config):
    """Labels each parameter "trained" or "frozen"."""
    return jax.tree.map(lambda factor: "trained" if factor else "frozen", rate_factors(parameters, config))


def zero_frozen(tree, config: Config):
    """Replaces frozen leaves by zeros."""
    factors = rate_factors(tree, config)
    return jax.tree.map(lambda leaf, factor: leaf if factor else jnp.zeros_like(leaf), tree, factors)


def any_frozen(config: Config) -> bool:
    """Returns whether a rule freezes parameters."""
    return any(not rule.factor for rule in parse_lr_rules(config.lr_rules))


def check_rules(parameters, config: Config) -> None:
    """Raises UsageError if a rule matches no parameter, or if all parameters are frozen."""
    names = name_patterns.full_names(parameters)
    rules = parse_lr_rules(config.lr_rules)
    used = {first_match(name, rules) for name in names}
    for rule in rules:
        if rule in used:
            continue
        if any(name_patterns.matches(rule.pattern, name) for name in names):
            raise UsageError(f"lr_rules: earlier rules match every parameter of {rule}; move it before them")
        closest = ", ".join(name_patterns.closest(rule.pattern, names))
        raise UsageError(
            f"lr_rules: {rule} matches no parameter; a pattern is one or more whole parts of a name, such as "
            f"embed, layers/up or *_bias, and the closest names are {closest}"
        )
    if not any(rule.factor for rule in used):
        raise UsageError(f"lr_rules={config.lr_rules} freezes every parameter; leave some to train")


def first_match(name: str, rules: tuple[LrRule, ...]) -> LrRule:
    """Returns the rule that sets a parameter's rate."""
    return next((rule for rule in rules if name_patterns.matches(rule.pattern, name)), OTHERS)
