"""`bench step`: our train step against other implementations of it; `bench mesh`: ours on two or more meshes.

Model FLOPs are `flops.flops_per_token`: causal attention counts once, and recomputation (remat) does not.
"""

import importlib.util
import json
import os
import timeit
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from shardformer import storage
from shardformer.analysis.verify import random_batch
from shardformer.bench import matmul_ceiling, reference
from shardformer.bench.bench_options import Measuring
from shardformer.bench.contenders import Contender, RepeatedBatch, measure, ours
from shardformer.bench.reference import partitioned
from shardformer.bench.torch_twin import torch_step
from shardformer.bench.xmap_twin import xmapped
from shardformer.config import Config, parsing
from shardformer.devices.chips import find_chip
from shardformer.errors import RunError, UsageError
from shardformer.layout import mesh
from shardformer.model.flops import describe_formula, flops_per_token
from shardformer.tables import format_count, format_table

PRODUCTS = "products"  # the only peer without a loss
PEERS = {
    "plain": lambda c, batches: plain(c, batches),
    "partitioned": partitioned,
    "xmap": xmapped,
    "torch": torch_step,
    "torch_compile": lambda c, batches: torch_step(c, batches, compiled=True),
    PRODUCTS: matmul_ceiling.products_alone,
}
AUTOMATIC = tuple(name for name in PEERS if name != "torch_compile")  # which compiles for a minute


def bench_step(options: Measuring, settings: Config) -> None:
    """Times our step next to its peers, which start from our parameters and must compute the same first loss."""
    names = choose_peers(options, lambda name: why_not(name, settings))
    settings = mesh.start(settings)
    batches, losses = RepeatedBatch(random_batch(settings)), {}
    contenders = [PEERS[name](settings, batches) for name in names if name != PRODUCTS]
    contenders.append(ours(settings, batches, f"shardformer {settings.parallel.mesh}"))
    for contender in contenders:
        losses[contender.name] = contender.run(1)
    agreement = check_same_loss(losses, settings)
    if PRODUCTS in names:
        contenders.append(PEERS[PRODUCTS](settings, batches))
    print(report(contenders, options, settings))
    mine = contenders[len(losses) - 1]
    for contender in contenders[: len(losses) - 1]:
        print(f"{mine.speed(contender):.2f} times the speed of {contender.name}")
    print(agreement)


def choose_peers(
    options: Measuring,
    find_obstacle: Callable[[str], str],
    offered: Sequence[str] = tuple(PEERS),
    automatic: Sequence[str] = AUTOMATIC,
) -> list[str]:
    """Returns the names in `peers`, each of which must be able to run; auto: those that can, and prints the rest.

    find_obstacle: from a name to the reason why this peer cannot run, empty if it can.
    """
    asked = [] if options.peers == "auto" else options.peers.split(",")
    for name in asked:
        if name not in offered:
            raise UsageError(
                f"peers takes auto or some of {','.join(offered)}, got {name!r}{parsing.suggest_closest(name, offered)}"
            )
    chosen = []
    for name in asked or automatic:
        reason = find_obstacle(name)
        if not reason:
            chosen.append(name)
        elif asked:
            raise UsageError(f"peers={name}: {reason}")
        else:
            print(f"without {name}: {reason}")
    return chosen


def why_not(name: str, c: Config) -> str:
    """Returns the reason why a peer cannot compute this step; empty if it can."""
    if name == PRODUCTS:
        return ""
    try:
        reference.check(c.replace(dropout=0.0) if name.startswith("torch") else c)
    except UsageError as error:
        return str(error)
    if name in ("partitioned", "xmap") and c.parallel.pp > 1:
        return f"it has no pipeline stages, got mesh={c.parallel.mesh}"
    if name.startswith("torch"):
        if c.model.positions not in ("learned", "none"):
            return f"it implements positions=learned and positions=none, got positions={c.model.positions}"
        if not importlib.util.find_spec("torch"):
            return "torch is not installed; pip install torch"
    return ""


def check_same_loss(losses: dict[str, float], c: Config) -> str:
    """Returns a line on the difference of the first losses; raises RunError if they are not the same model's."""
    if c.training.dropout:
        return "first losses differ, as each draws its own dropout masks"
    values = list(losses.values())
    apart = float(np.max(values) / np.min(values)) - 1  # Python's max() and min() skip a NaN
    if not apart <= (1e-5 if c.parallel.dtype == "float32" else 1e-2):
        listed = ", ".join(f"{name} {loss:.7f}" for name, loss in losses.items())
        raise RunError(f"these are not the same model; the first losses are: {listed}")
    return f"first losses agree to {apart:.0e}"


def bench_mesh(options: Measuring, base: Config) -> None:
    """Times the same step on each mesh that fits the devices and the model."""
    mesh.use_cpu_devices(8)
    batches, contenders = RepeatedBatch(random_batch(base)), []
    for shape in options.meshes.split(","):
        try:
            settings = base.replace(mesh=shape)
            if settings.parallel.devices > len(mesh.find_devices()):
                raise UsageError(f"there are {len(mesh.find_devices())} devices")
            contenders.append(ours(settings, batches, shape))
        except UsageError as reason:
            print(f"without {shape}: {reason}")
    if not contenders:
        raise UsageError(f"none of meshes={options.meshes} fits; see above")
    print(report(contenders, options, base))


def plain(c: Config, batches) -> Contender:
    """Returns the plain step on one device."""
    optimizer, update = reference.make_step(c)
    params = reference.initial_parameters(c)
    state = jax.device_put((params, optimizer.init(params)), jax.devices()[0])
    compiled = jax.jit(update, donate_argnums=0).lower(state, batches[0]).compile()

    def step(state, number):
        return compiled(state, batches[number])

    return Contender("plain Haiku + optax", 1, step, state, [compiled], lambda state: state[0])


def report(contenders: list[Contender], options: Measuring, c: Config) -> str:
    """Measures the contenders and returns their table; speeds are relative to the first."""
    measure(contenders, options)
    tokens, flops, ceiling = (
        c.training.batch * c.model.seq,
        flops_per_token(c) * c.training.batch * c.model.seq,
        device_flops(),
    )
    rows, figures = [], []
    for it in contenders:
        only_products = it.name.startswith("products")
        done = matmul_ceiling.count_flops(c) if only_products else flops
        rate = done / it.milliseconds * 1e3
        peak = ceiling and ceiling * (1 if jax.default_backend() == "cpu" else it.devices)  # CPU devices share one peak
        figures.append(
            {
                "step": it.name,
                "ms": it.milliseconds,
                "spread": it.spread,
                "fastest ms": min(it.times),
                "tokens/s": None if only_products else tokens / it.milliseconds * 1e3,
                "TFLOP/s": rate / 1e12,
                "MFU": rate / peak if peak else None,
                "bytes on a device": it.bytes,
                "speed": it.speed(contenders[0]),
            }
        )
        times = f"{it.milliseconds:.2f}", f"{it.spread:.0%}", f"{min(it.times):.2f}"
        speed = "-" if only_products else f"{tokens / it.milliseconds * 1e3:,.0f}"
        share, megabytes = f"{rate / peak:.1%}" if peak else "-", f"{it.bytes / 1e6:.1f}" if it.bytes else "-"
        rows.append([it.name, *times, speed, f"{rate / 1e12:.3f}", share, megabytes, f"{it.speed(contenders[0]):.2f}"])
    title = (
        f"{options.preset}: {c.training.batch} x {c.model.seq} tokens a step, "
        f"{format_count(c.model.layers, 'layer')}, d_model {c.model.d_model}, {c.parallel.dtype}, on "
        f"{describe_machine()}; {options.describe_turns()}"
    )
    if options.json:
        storage.on_disk(options.json, "json").write_text(
            json.dumps({"title": title, "steps": figures}, indent=2) + "\n"
        )
    if options.picture:
        draw(contenders, title, options.picture)
    header = ["step", "ms", "+-", "fastest", "tokens/s", "TFLOP/s", "MFU", "MB/device", "speed"]
    return "\n".join([title, format_table(rows, header), _explain_mfu(c, ceiling)])


def draw(contenders: list[Contender], title: str, path: str) -> None:
    """Draws a bar for each median, with the quartiles."""
    from shardformer.analysis.pictures import BLUE, SKY, figure

    with figure(path, 9, 1.3 + 0.4 * len(contenders)) as drawn:
        axes = drawn.add_subplot()
        for it in contenders:
            low, high = np.percentile(it.times, [25, 75])
            around = [[it.milliseconds - low], [high - it.milliseconds]]
            axes.barh(it.name, it.milliseconds, xerr=around, color=BLUE if it.name.startswith("shard") else SKY)
            axes.annotate(f"{it.milliseconds:.1f}", (high, it.name), (5, 0), textcoords="offset points", va="center")
        axes.set_xlabel("milliseconds of a step (median; lines: quartiles)")
        axes.set_title(title.partition(", on ")[0])
        axes.margins(x=0.1)
        axes.invert_yaxis()


def _explain_mfu(c: Config, ceiling: float | None) -> str:
    if not ceiling:
        return "MFU is unknown: this chip's peak is not in shardformer/devices/chips.py"
    what = "a product of 1024 x 1024 here" if jax.default_backend() == "cpu" else "bfloat16 by the data sheet"
    return (
        f"MFU = tokens/s x ({describe_formula(c)} = {flops_per_token(c) / 1e6:,.2f} "
        f"MFLOP a token) / {ceiling / 1e12:,.3f} TFLOP/s ({what})"
    )


def describe_machine() -> str:
    """Returns the kind of the devices, and the settings that a CPU's speed depends on."""
    kind = jax.devices()[0].device_kind
    if kind != "cpu":
        return kind
    return f"cpu ({os.cpu_count()} cores, NPROC {os.environ.get('NPROC', 'not set')})"


def device_flops() -> float | None:
    """Returns FLOP/s: an accelerator's by its data sheet, a CPU's by a large product; None if unknown."""
    if jax.default_backend() != "cpu":
        chip = find_chip(jax.devices()[0].device_kind)
        return chip and chip.flops
    x = jnp.ones((1024, 1024))
    seconds = timeit.repeat(lambda: (x @ x).block_until_ready(), number=1, repeat=30)
    return 2 * x.size * len(x) / min(seconds)
