"""Every parameter as aligned text: how it is split, and which rule of lr_rules it matches."""

import math

from jax import tree_util
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer import tables
from shardformer.config import Config
from shardformer.config.names import AXES
from shardformer.config.parsing import LrRule, parse_lr_rules
from shardformer.layout import specs
from shardformer.optim import rules


def find_splits(parameters, config: Config) -> dict:
    """Returns the spec of every parameter of the language model."""
    by_name = specs.parameter_specs(parameters, config)
    return specs.split_over_dp(by_name, specs.zero_dimensions(parameters, by_name, config), config)


def format_splits(parameters, split: dict, config: Config) -> str:
    """Formats every parameter's name, global shape, spec and one device's part; the last row adds up."""
    rows, total = [], 0
    for module, leaves in parameters.items():
        for name, leaf in leaves.items():
            spec = split[module][name]
            part = _local_shape(leaf.shape, spec, config)
            total += math.prod(part)
            rows.append([f"{module}/{name}", _join(leaf.shape), str(spec), _join(part)])
    rows.append(["all", f"{specs.count_parameters(parameters):,}", "", f"{total:,}"])
    return tables.format_table(rows, ["parameter", "shape", "spec", "on one device"])


def format_rules(parameters, config: Config) -> str:
    """Formats the parameters that each rule matches and their sizes; for the rest, only the sizes."""
    rules.check_rules(parameters, config)
    given = parse_lr_rules(config.optimizer.lr_rules)
    matched: dict[LrRule, list[tuple[str, int]]] = {rule: [] for rule in (*given, rules.OTHERS)}
    for path, leaf in tree_util.tree_leaves_with_path(parameters):
        name = rules.full_name(path)
        matched[rules.first_match(name, given)].append((name.removeprefix("transformer/"), leaf.size))
    rows = [
        [
            str(rule),
            len(leaves),
            sum(size for _, size in leaves),
            ", ".join(name for name, _ in leaves if rule in given),
        ]
        for rule, leaves in matched.items()
    ]
    return tables.format_table(rows, ["rule", "arrays", "numbers", "names"])


def _local_shape(shape: tuple, spec: P, config: Config) -> tuple[int, ...]:
    mesh = AbstractMesh(config.parallel.mesh_shape, AXES[: len(config.parallel.mesh_shape)])
    return NamedSharding(mesh, spec).shard_shape(shape)


def _join(shape) -> str:
    return "x".join(map(str, shape))
