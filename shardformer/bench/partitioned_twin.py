"""The plain model under `jit` with NamedShardings: the compiler chooses the collectives."""

import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer.bench import reference
from shardformer.bench.contenders import Contender
from shardformer.config import Config
from shardformer.layout import mesh, specs
from shardformer.model import ROWS


def partitioned(c: Config, batch) -> Contender:
    """Returns the step; each parameter and its two moments are split as ours, by Megatron's rules."""
    devices = mesh.make(c)
    optimizer, update = reference.make_step(c)
    params = reference.initial_parameters(c)
    moments = optimizer.init(params)

    def shard(spec):
        return NamedSharding(devices, spec)

    trainable = jax.tree.map(shard, plain_specs(params, c))
    followed = optax.tree.map_params(optimizer, lambda _, like: like, moments, trainable,
                                     transform_non_params=lambda _: shard(P()))  # fmt: skip
    shardings = trainable, followed
    step = jax.jit(update, in_shardings=(shardings, shard(ROWS)), out_shardings=(shardings, shard(P())),
                   donate_argnums=0)  # fmt: skip
    state, batch = jax.device_put((params, moments), shardings), jax.device_put(batch, shard(ROWS))
    compiled = step.lower(state, batch).compile()
    return Contender(
        f"partitioned {c.parallel.mesh}", c.parallel.devices, lambda state, _: compiled(state, batch), state, [compiled]
    )


def plain_specs(params, c: Config):
    """Returns our spec of each plain parameter, without the leading L of stacked layers."""

    def spec_of(module, name):
        top, layers, rest = module.partition("/layers_")
        if not layers:
            return specs.parameter_spec(f"{module}/{name}", c)
        inner = rest.partition("/")[2]
        return P(*specs.parameter_spec("/".join(filter(None, (f"{top}/layers", inner, name))), c)[1:])

    return {module: {name: spec_of(module, name) for name in leaves} for module, leaves in params.items()}
