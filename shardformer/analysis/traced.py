"""Reads a step's collectives and memory traffic from its trace: in seconds, for any number of devices."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardformer.analysis import liveness
from shardformer.analysis.memory import make_trainer
from shardformer.analysis.program_collectives import DTYPES, Collective, groups_over
from shardformer.config import Config
from shardformer.errors import UsageError
from shardformer.exact import jaxprs
from shardformer.layout import Layout
from shardformer.parallel.replicas import Zero
from shardformer.parallel.scattering import IN_ONE_STAGE
from shardformer.training.trainer import Trainer


class Traced(NamedTuple):
    """Loss and gradients of a config's model, traced on a mesh without devices."""

    trainer: Trainer
    bodies: tuple  # the jaxprs of its shard_maps, which are one device's part, without dead operations


@functools.lru_cache(maxsize=4)
def trace(layout: Layout) -> Traced:
    """Traces the loss and its gradients, with blocks instead of a kernel.

    Layers that scan=auto unrolls are traced in a scan: a GPU's compiler drops the updates of full stacks that an
    unrolled trace has, and needs less time and memory than for a scan.
    """
    config, layout = layout.config, layout.without_kernel()
    if config.parallel.scan is None:
        layout = dataclasses.replace(layout, loop=layout.loop._replace(scan=True))
    trainer = make_trainer(config, layout)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    batch = trainer.model.batch_shapes() | trainer.model.constant_shapes()
    traced = jax.make_jaxpr(trainer.model.loss_and_grad)(trainer.abstract.params, batch, key)
    return Traced(trainer, tuple(jaxprs.drop_dead(body) for body in jaxprs.find_shard_maps(traced.jaxpr)))


def check_one_program(config: Config) -> None:
    """Raises UsageError for a step of two or more programs: memory and plan measure one."""
    if config.training.accum != 1 and config.training.accum_mode != "scan":
        raise UsageError(
            f"accum_mode={config.training.accum_mode} is several programs a step, and memory and plan measure one; "
            "give accum_mode=scan"
        )


def traffic_bytes(layout: Layout) -> int:
    """Returns the bytes between a device and its memory for the loss and its gradients."""
    return sum(map(liveness.traffic_bytes, trace(in_one_stage(layout)).bodies))


def in_one_stage(layout: Layout) -> Layout:
    """Returns the layout with one reduce-scatter instead of exchanges or stages, which send as many bytes."""
    if not isinstance(layout.replicas, Zero):
        return layout
    return dataclasses.replace(layout, replicas=dataclasses.replace(layout.replicas, scattering=IN_ONE_STAGE))


def find_collectives(layout: Layout) -> list[Collective]:
    """Returns every tensor that a step sends, with the trips of its loops, without the optimizer's few scalars."""
    check_one_program(layout.config)
    walk = _Walk(layout)
    for body in trace(in_one_stage(layout)).bodies:
        walk.follow(body, [0] * len(body.invars), (1,))
    return walk.collectives


class _Walk:
    """A walk through a jaxpr that collects its collectives.

    A value changes with each run of the innermost loop that it depends on; XLA sends an unchanging value once, before
    the loop. So each value has a depth, 0 outside of all loops, and is computed `trips[depth]` times.
    """

    def __init__(self, layout: Layout):
        self.mesh_shape, self.pipeline = layout.config.parallel.mesh_shape, layout.pipeline
        self.collectives: list[Collective] = []

    def follow(self, jaxpr, depths: list[int], trips: tuple[int, ...]) -> list[int]:
        """Returns the depths of a jaxpr's results from those of its inputs."""
        known = dict(zip(jaxpr.invars, depths, strict=True))

        def depth_of(atom) -> int:
            return 0 if hasattr(atom, "val") else known.get(atom, 0)  # literals have depth 0

        for equation in jaxpr.eqns:
            given = [depth_of(v) for v in equation.invars]
            results = [max(given, default=0)] * len(equation.outvars)
            if equation.primitive.name in jaxprs.COLLECTIVES:
                self._add(equation, trips[results[0]])
            elif loop := jaxprs.read_loop(equation):
                self._follow_loop(loop, given, trips)
            elif inner := jaxprs.bodies(equation):
                # the ticks are the outermost loop of a pipeline, and no other conditional sends anything
                taken = trips
                if self.pipeline and trips == (1, self.pipeline.ticks):
                    taken = (1, self.pipeline.exchanges)
                for body in inner:
                    self.follow(body, given[len(given) - len(body.invars) :], taken)
            elif (function := jaxprs.called(equation)) is not None:
                results = self.follow(function, given, trips)
            known |= dict(zip(equation.outvars, results, strict=True))
        return [depth_of(v) for v in jaxpr.outvars]

    def _follow_loop(self, loop: jaxprs.Loop, given: list[int], trips: tuple[int, ...]) -> None:
        inside, inputs = len(trips), len(loop.body.invars)
        depths = given[len(given) - inputs :][: loop.constants] + [inside] * (inputs - loop.constants)
        self.follow(loop.body, depths, (*trips, trips[-1] * loop.times))

    def _add(self, equation, count: int) -> None:
        pairs = equation.params.get("perm")
        if pairs and all(sender == receiver for sender, receiver in pairs):
            return  # nothing is sent
        groups = groups_over(jaxprs.find_axes(equation), self.mesh_shape)
        if len(groups[0]) > 1:
            for value in equation.outvars:
                operation, dtype = jaxprs.COLLECTIVES[equation.primitive.name], DTYPES[value.aval.dtype.name]
                self.collectives.append(Collective(operation, dtype, value.aval.shape, groups, count > 1, count))
