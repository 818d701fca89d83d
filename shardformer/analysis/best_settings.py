"""The fastest settings that fit on chips that need not exist: mesh, zero, remat and accum, chosen together.

Tracing a step takes seconds, and a slice has hundreds of settings. Bounds by formula leave out those whose state,
gradients or stored activations are too large, and order the rest by time. The first of them are then estimated by a
trace: their bytes, and if they fit, their time, which needs another trace.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax.numpy as jnp

from shardformer.analysis import memory, plan, roofline
from shardformer.analysis.plan import MARGIN, Plan
from shardformer.config import Config
from shardformer.devices.chips import Slice
from shardformer.errors import UsageError
from shardformer.layout import specs
from shardformer.layout.mesh import candidates
from shardformer.model import flops
from shardformer.model.task_on_mesh import choose_task
from shardformer.parallel.replicas import Zero3
from shardformer.tables import format_bytes, format_table

CHOSEN = ("zero", "remat", "accum")  # besides the mesh
BEST = 3
MOST_TRACES = 16
SLOWER_BY_ACCUM = 0.002  # of two settings with the same bound, the one with fewer microbatches comes first


class Candidate(NamedTuple):
    """A setting with lower bounds of its seconds and bytes."""

    config: Config
    seconds: float
    bytes: int


def choose(config: Config, chips: Slice, free: tuple[str, ...], show: Callable[[str], object]) -> list[Plan]:
    """Returns at most three plans that fit, the fastest by the forecast first; [] if none is found.

    `free` are those of CHOSEN that may change. The mesh is chosen too.
    """
    limit = chips.chip.memory / MARGIN
    waiting = sorted(list_candidates(config, chips, free), key=lambda each: (each.seconds, each.bytes))
    result: list[Plan] = []
    fitting = set[Config]()  # the settings with accum=1 of the plans that fit: more microbatches are slower
    traces, traced = 0, dict[Config, tuple[int, int]]()  # by the settings with accum=1: (accum, temporaries)
    for candidate in waiting:
        slowest = max((each.times.seconds for each in result), default=math.inf)
        if traces >= MOST_TRACES or (len(result) >= BEST and candidate.seconds > slowest):
            break
        settings = candidate.config.replace(accum=1)
        before = traced.get(settings)
        stored, accum = memory.predict_bytes(candidate.config).total, candidate.config.training.accum
        bound = stored + before[0] * before[1] // accum if before else 0  # each microbatch has a share of the rows
        if settings in fitting or max(candidate.bytes, bound) > limit:
            continue
        traces += 1
        traced[settings] = accum, (temporaries := plan.estimate_temporaries(candidate.config, chips))
        if stored + temporaries <= limit:
            fitting.add(settings)
            estimated = plan.estimate(candidate.config, chips)
            # With zero=3 and a fused kernel, remat=none and remat=dots are one program: it is listed once.
            if not any(_are_equal(estimated, other) for other in result):
                result.append(estimated)
        show(f"{describe(candidate.config)}: {format_bytes(stored + temporaries)} of {format_bytes(chips.chip.memory)}")
    return sorted(result, key=lambda each: each.forecast)[:BEST]


def _are_equal(a: Plan, b: Plan) -> bool:
    """Returns whether two plans need the same bytes and time on the same mesh."""
    return (a.config.parallel.mesh, a.estimate, a.times) == (b.config.parallel.mesh, b.estimate, b.times)


def list_candidates(config: Config, chips: Slice, free: tuple[str, ...]) -> Iterator[Candidate]:
    """Yields every setting of the slice that the configuration allows, with its bounds."""
    levels = (0, 1, 3) if "zero" in free else (config.parallel.zero,)
    remats = ("none", "dots", "full") if "remat" in free else (config.parallel.remat,)
    for zero in levels:
        changed = config.replace(mesh="auto", zero=zero, **({"accum": 0} if "accum" in free else {}))
        state, gradients = dict[str, int](), dict[str, int]()
        for candidate in filter(plan.splits_reward_model, candidates(changed, chips.count)):
            if zero and candidate.parallel.dp == 1:
                continue
            if candidate.training.accum & (candidate.training.accum - 1) and "accum" in free:
                continue  # powers of two are enough
            name = candidate.parallel.mesh
            if name not in state:
                state[name] = memory.predict_bytes(candidate.replace(accum=1)).total
                gradients[name] = bound_gradients(candidate.replace(accum=1))
            if state[name] > chips.chip.memory:
                continue
            for remat in remats:
                with contextlib.suppress(UsageError):
                    each = candidate.replace(remat=remat)
                    needed = state[name] + max(bound_activations(each), gradients[name])
                    yield Candidate(each, bound_seconds(each, chips), needed)


def bound_gradients(config: Config) -> int:
    """Returns the bytes of the gradients that zero=1 holds, at least, before it scatters them."""
    if config.parallel.zero != 1:
        return 0
    return memory.predict_bytes(config.replace(zero=0)).gradients - memory.predict_bytes(config).gradients


def bound_activations(config: Config) -> int:
    """Returns the bytes of the activations that a backward pass needs at least: those that remat= stores."""
    c, p = config.model, config.parallel
    tokens = config.microbatch_rows * c.seq // (p.cp * p.pp)
    width = jnp.dtype(p.dtype).itemsize
    entered = c.d_model // (p.mp if p.sequence_parallel else 1)
    keys = c.key_value_heads * (c.head_size + c.value_size)
    products = (c.heads * c.head_size + keys + (1 + c.gated) * c.ff_size) // p.mp
    stored = {"full": entered, "dots": entered + products, "none": 2 * entered + products + c.ff_size // p.mp}
    return c.layers // p.pp * tokens * stored[p.remat] * width


def bound_seconds(config: Config, chips: Slice) -> float:
    """Returns the seconds of a step at least: the arithmetic, and the wire that XLA does not hide."""
    p, tokens = config.parallel, config.training.batch * config.model.seq
    _, forward = flops.layer_flops_per_token(config)
    work = flops.flops_per_token(config) + (forward if p.remat == "full" else 0)
    compute = tokens * work / (p.devices * chips.chip.flops)
    wire = 0.0
    if p.mp > 1:
        sums = (1 if config.model.block.startswith("parallel") else 2) * (3 if p.remat == "full" else 2)
        local = tokens // (p.dp * p.cp * p.pp) * config.model.d_model * jnp.dtype(p.dtype).itemsize
        sent = config.model.layers * sums * local * 2 * (p.mp - 1) / p.mp
        wire += sent / roofline.axis_bandwidth("mp", config, chips)
    if p.dp > 1:
        parameters = specs.count_parameters(choose_task(config).abstract_parameters(config))
        gradient = parameters * jnp.dtype(p.grad_dtype).itemsize / p.mp
        sent = (1 if p.zero else 2) * gradient * (p.dp - 1) / p.dp
        wire += sent / roofline.axis_bandwidth("dp", config, chips) if not _is_exchanged(config, chips) else 0.0
    return (compute + wire) * (1 + SLOWER_BY_ACCUM * math.log2(config.training.accum))


def _is_exchanged(config: Config, chips: Slice) -> bool:
    """Returns whether the chip overlaps the scatter of gradients with the backward pass."""
    replicas = plan.resolve_on(config, chips).replicas
    return isinstance(replicas, Zero3) and replicas.scattering.exchange


def describe(config: Config) -> str:
    """Formats the settings as arguments of `train`."""
    return " ".join(f"{name}={config.get(name)}" for name in ("mesh", *CHOSEN))


def format_best(plans: list[Plan], tokens: float | None, price: float | None) -> str:
    """Formats the plans in a table, with the time and the cost of a number of tokens."""
    header = ["settings", "together", "ms a step", "tokens/s", "MFU"]
    if tokens:
        header += ["days", *(["cost"] if price else [])]
    rows = []
    for each in plans:
        row = [describe(each.config), format_bytes(each.bytes), f"{each.forecast * 1e3:,.0f}"]
        row += [f"{each.tokens_per_second:,.0f}", f"{each.utilization:.0%}"]
        if tokens:
            days, cost = measure_budget(each, tokens, price)
            row += [f"{days:,.1f}", *([f"{cost:,.0f}"] if cost is not None else [])]
        rows.append(row)
    return f"{format_table(rows, header)}\nthe fastest that are estimated to fit; {plan.describe_error(plans[0])}"


def format_budget(planned: Plan, tokens: float, price: float | None) -> str:
    """Formats the days of a number of tokens, and their cost, by the forecast."""
    days, cost = measure_budget(planned, tokens, price)
    charged = f" and cost {cost:,.0f}, at {price:g} for a chip and hour" if cost is not None else ""
    return f"{tokens:.3g} tokens take {days:,.1f} days on {planned.chips}{charged}; {plan.describe_error(planned)}"


def measure_budget(planned: Plan, tokens: float, price: float | None) -> tuple[float, float | None]:
    """Returns the days that a number of tokens takes at the forecast speed, and the cost of all chips."""
    hours = tokens / planned.tokens_per_second / 3600
    chips = math.prod(planned.chips.shape)
    return hours / 24, None if price is None else hours * chips * price
