"""What a step sends and moves, read from its trace: in seconds, without a compiler and for any number of devices."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from shardformer.analysis import liveness
from shardformer.analysis.collectives import Collective, groups_over
from shardformer.config import Config
from shardformer.config.names import AXES
from shardformer.errors import UsageError
from shardformer.kernels.pipeline_schedule import count_ticks
from shardformer.training.step import Trainer

OPERATIONS = {
    "psum": "all-reduce", "psum_invariant": "all-reduce", "psum2": "all-reduce", "pmax": "all-reduce",
    "pmin": "all-reduce", "all_gather": "all-gather", "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all", "ppermute": "collective-permute",
}  # fmt: skip
DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int32": "s32", "uint32": "u32", "bool": "pred"}


class Traced(NamedTuple):
    """Loss and gradients of a config's model, traced on a mesh without devices."""

    trainer: Trainer
    bodies: tuple  # the jaxprs of its shard_maps, without what is dead: one device's part


@functools.lru_cache(maxsize=4)
def trace(config: Config) -> Traced:
    if config.attention == "fused":  # traced as in blocks, because a kernel cannot be traced without its device
        config = config.replace(attention="blocks")
    trainer = Trainer(config, abstract_mesh(config))
    tokens = jax.ShapeDtypeStruct((config.batch, config.seq), jnp.int32)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    batch = {"tokens": tokens, "targets": tokens}
    traced = jax.make_jaxpr(trainer.model.loss_and_grad)(trainer.abstract.params, batch, key)
    return Traced(trainer, tuple(liveness.drop_dead(body)[0] for body in liveness.find_shard_maps(traced.jaxpr)))


def abstract_mesh(config: Config) -> AbstractMesh:
    """The config's mesh without devices."""
    names = AXES[: len(config.mesh_shape)]
    return AbstractMesh(config.mesh_shape, names, axis_types=(AxisType.Auto,) * len(names))


def check_one_program(config: Config) -> None:
    """Refuses a step of several programs, each of which reduces its gradients or reads the sums of the others."""
    if config.accum != 1 and config.accum_mode != "scan":
        raise UsageError(
            f"accum_mode={config.accum_mode} is several programs a step, and memory and plan measure one; "
            "give accum_mode=scan"
        )


def traffic_bytes(config: Config) -> int:
    """Between a device and its memory, by the loss and its gradients."""
    return sum(map(liveness.traffic_bytes, trace(config).bodies))


def find_collectives(config: Config) -> list[Collective]:
    """Every tensor that a step sends, loops counted with their trips; but not the few scalars of the optimizer."""
    check_one_program(config)
    walk = _Walk(config)
    for body in trace(config).bodies:
        walk.follow(body, [0] * len(body.invars), (1,))
    return walk.found


class _Walk:
    """Through a jaxpr, to its collectives.

    A value changes with each run of the innermost loop that it depends on; XLA sends what does not change once, before
    the loop. So each value has a depth, 0 outside of all loops, and `trips[depth]` is how often it is computed.
    """

    def __init__(self, config: Config):
        self.mesh_shape = config.mesh_shape
        self.ticks, self.exchanges = _count_exchanges(config)
        self.found: list[Collective] = []

    def follow(self, jaxpr, depths: list[int], trips: tuple[int, ...]) -> list[int]:
        """The depths of what a jaxpr returns, from those of its inputs."""
        known = dict(zip(jaxpr.invars, depths, strict=True))
        depth_of = lambda v: 0 if hasattr(v, "val") else known.get(v, 0)
        for equation in jaxpr.eqns:
            given = [depth_of(v) for v in equation.invars]
            results = [max(given, default=0)] * len(equation.outvars)
            if equation.primitive.name in OPERATIONS:
                self._add(equation, trips[results[0]])
            elif equation.primitive.name in liveness.LOOPS:
                self._follow_loop(equation, given, trips)
            elif inner := liveness.bodies(equation):
                # the ticks are the outermost loop of a pipeline, and no other conditional sends anything
                taken = (1, self.exchanges) if trips == (1, self.ticks) else trips
                for body in inner:
                    self.follow(body, given[len(given) - len(body.invars) :], taken)
            elif (function := liveness.called(equation)) is not None:
                results = self.follow(function, given, trips)
            known |= dict(zip(equation.outvars, results, strict=True))
        return [depth_of(v) for v in jaxpr.outvars]

    def _follow_loop(self, equation, given: list[int], trips: tuple[int, ...]) -> None:
        params, (body,) = equation.params, liveness.bodies(equation)
        if equation.primitive.name == "scan":
            constants, times = liveness.count_constants_and_carried(equation)[0], params["length"]
        else:  # nobody knows how often a `while` runs
            given, constants, times = given[params["cond_nconsts"] :], params["body_nconsts"], 1
        inside = len(trips)
        self.follow(body, given[:constants] + [inside] * (len(given) - constants), (*trips, trips[-1] * times))

    def _add(self, equation, count: int) -> None:
        pairs = equation.params.get("perm")
        if pairs and all(sender == receiver for sender, receiver in pairs):
            return  # every device keeps its own
        axes = equation.params.get("axes", equation.params.get("axis_name"))
        groups = groups_over((axes,) if isinstance(axes, str) else tuple(axes), self.mesh_shape)
        if len(groups[0]) > 1:
            for value in equation.outvars:
                operation, dtype = OPERATIONS[equation.primitive.name], DTYPES[value.aval.dtype.name]
                self.found.append(Collective(operation, dtype, value.aval.shape, groups, count > 1, count))


def _count_exchanges(config: Config) -> tuple[int, int]:
    """(ticks of a pipeline, those of them that bring a microbatch and take one back): with several rounds
    `pipeline_schedule.run_stages` does so under this condition.
    """
    ticks = count_ticks(config.accum, config.pp, config.pipeline_rounds)
    return ticks, sum(tick // config.pp % config.pipeline_rounds == 0 for tick in range(ticks))
