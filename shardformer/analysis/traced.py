"""Reads a step's collectives and memory traffic from its trace: in seconds, for any number of devices."""

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
from shardformer.kernels.staged_scatter import IN_ONE_STAGE, Scattering
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
    bodies: tuple  # the jaxprs of its shard_maps, which are one device's part, without dead operations


@functools.lru_cache(maxsize=4)
def trace(config: Config, way: Scattering = IN_ONE_STAGE) -> Traced:
    """Traces the loss and its gradients, which are scattered in this `way`, by default in one stage."""
    if config.attention == "fused":  # a kernel cannot be traced without its device; blocks are alike
        config = config.replace(attention="blocks")
    trainer = make_trainer(config)
    trainer.model.data_parallel.scatter_in(way)
    tokens = jax.ShapeDtypeStruct((config.batch, config.seq), jnp.int32)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    batch = {"tokens": tokens, "targets": tokens}
    traced = jax.make_jaxpr(trainer.model.loss_and_grad)(trainer.abstract.params, batch, key)
    return Traced(trainer, tuple(liveness.drop_dead(body) for body in liveness.find_shard_maps(traced.jaxpr)))


def make_trainer(config: Config) -> Trainer:
    """Returns a trainer for tracing, on a mesh without devices."""
    return Trainer(config, abstract_mesh(config))  # type: ignore[arg-type]  # its compiled functions cannot run


def abstract_mesh(config: Config) -> AbstractMesh:
    """Returns the config's mesh without devices."""
    names = AXES[: len(config.mesh_shape)]
    return AbstractMesh(config.mesh_shape, names, axis_types=(AxisType.Auto,) * len(names))


def check_one_program(config: Config) -> None:
    """Raises UsageError for a step of several programs: memory and plan measure one."""
    if config.accum != 1 and config.accum_mode != "scan":
        raise UsageError(
            f"accum_mode={config.accum_mode} is several programs a step, and memory and plan measure one; "
            "give accum_mode=scan"
        )


def traffic_bytes(config: Config) -> int:
    """Returns the bytes between a device and its memory for the loss and its gradients."""
    return sum(map(liveness.traffic_bytes, trace(config).bodies))


def find_collectives(config: Config) -> list[Collective]:
    """Returns every tensor that a step sends, with the trips of its loops, without the optimizer's few scalars."""
    check_one_program(config)
    walk = _Walk(config)
    for body in trace(config).bodies:
        walk.follow(body, [0] * len(body.invars), (1,))
    return walk.found


class _Walk:
    """A walk through a jaxpr that collects its collectives.

    A value changes with each run of the innermost loop that it depends on; XLA sends an unchanging value once, before
    the loop. So each value has a depth, 0 outside of all loops, and is computed `trips[depth]` times.
    """

    def __init__(self, config: Config):
        self.mesh_shape = config.mesh_shape
        self.ticks, self.exchanges = _count_exchanges(config)
        self.found: list[Collective] = []

    def follow(self, jaxpr, depths: list[int], trips: tuple[int, ...]) -> list[int]:
        """Returns the depths of a jaxpr's results from those of its inputs."""
        known = dict(zip(jaxpr.invars, depths, strict=True))

        def depth_of(atom) -> int:
            return 0 if hasattr(atom, "val") else known.get(atom, 0)  # literals have depth 0

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
        else:  # the number of a `while`'s iterations is unknown
            given, constants, times = given[params["cond_nconsts"] :], params["body_nconsts"], 1
        inside = len(trips)
        self.follow(body, given[:constants] + [inside] * (len(given) - constants), (*trips, trips[-1] * times))

    def _add(self, equation, count: int) -> None:
        pairs = equation.params.get("perm")
        if pairs and all(sender == receiver for sender, receiver in pairs):
            return  # nothing is sent
        axes = equation.params.get("axes", equation.params.get("axis_name"))
        groups = groups_over((axes,) if isinstance(axes, str) else tuple(axes), self.mesh_shape)
        if len(groups[0]) > 1:
            for value in equation.outvars:
                operation, dtype = OPERATIONS[equation.primitive.name], DTYPES[value.aval.dtype.name]
                self.found.append(Collective(operation, dtype, value.aval.shape, groups, count > 1, count))


def _count_exchanges(config: Config) -> tuple[int, int]:
    """Returns the ticks of a pipeline, and the number of ticks that exchange microbatches with other stages.

    It repeats the condition in `pipeline_schedule.run_stages`.
    """
    ticks = count_ticks(config.accum, config.pp, config.pipeline_rounds)
    return ticks, sum(tick // config.pp % config.pipeline_rounds == 0 for tick in range(ticks))
