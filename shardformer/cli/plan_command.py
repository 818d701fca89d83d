"""`plan`: memory, collectives and time of a step on chips that are not available."""

import contextlib
import sys
from collections.abc import Callable, Iterator

import jax
from rich.console import Console

from shardformer.analysis import best_settings, compiling, plan, traced
from shardformer.cli.analysis_options import PlanOptions
from shardformer.cli.arguments import describe_depth, names_depth, say
from shardformer.cli.settings import parse_settings
from shardformer.config import Config, check_zero, parsing
from shardformer.devices import chips
from shardformer.devices.chips import Slice
from shardformer.errors import UsageError
from shardformer.layout import mesh


def run_plan(arguments: list[str]) -> None:
    """Prints the plan of one configuration, or the ranking of a sweep."""
    options, rest = parsing.parse_known_options(arguments, PlanOptions)
    bought = chips.parse_slice(options.chip)
    if ranked := {word.partition("=")[0] for word in rest if options.sweep} & {"mesh", "zero", "remat"}:
        raise UsageError(
            "sweep=true ranks all dp x mp meshes with and without ZeRO and remat; leave out "
            + ", ".join(sorted(ranked))
        )
    settings: Config = parse_settings(rest)
    if names_depth(rest):
        say(f"{describe_depth(rest)}\n")
    traced.check_one_program(settings)
    jax.config.update("jax_platforms", "cpu")  # nothing runs, so no accelerator is needed
    mesh.use_cpu_devices(bought.count if options.compiler == "cpu" else min(bought.count, plan.CPU_DEVICES))
    if options.sweep:
        _sweep(settings, bought, options.picture)
    else:
        given = {word.partition("=")[0] for word in rest}
        settings = _choose_settings(settings, bought, options, given)
        check_zero(settings)  # as training does
        _plan_one(settings, bought, options)


def _choose_settings(settings: Config, bought: Slice, options: PlanOptions, given: set[str]) -> Config:
    """Returns the settings with their mesh, and with those of zero, remat and accum that were not given.

    They change only if data parallelism alone does not fit: then the three best are printed.
    """
    free = tuple(name for name in best_settings.CHOSEN if name not in given)
    if settings.parallel.mesh != "auto" or not free:
        return plan.resolve(settings, bought)
    if alone := plan.find_data_parallel(settings, bought):
        return alone
    say(f"mesh=auto: looking for settings of {', '.join(('mesh', *free))} that fit on {bought}")
    with _show_search() as show:
        best = best_settings.choose(settings, bought, free, show)
    if not best:
        resolved = plan.resolve(settings, bought)
        # A preset for many chips, on one: its ZeRO has nothing to split over.
        return resolved.replace(zero=0) if "zero" in free and resolved.parallel.dp == 1 else resolved
    say(f"{best_settings.format_best(best, options.tokens, options.price)}\n")
    return best[0].config


@contextlib.contextmanager
def _show_search() -> Iterator[Callable[[str], object]]:
    """Yields the function that shows an estimated setting: in one line of a terminal that changes, else a line each."""
    if not sys.stdout.isatty():
        yield say
        return
    with Console().status("ordering all settings by their bounds") as status:
        yield status.update


def _plan_one(settings: Config, bought: Slice, options: PlanOptions) -> None:
    """Prints the bytes and the verdict, and of a plan that fits its speed; the compiled plan takes longer.

    What does not fit has no speed and no cost.
    """
    compiler = plan.choose_compiler(bought, options.compiler)
    result = plan.estimate(settings, bought)
    say(plan.format_needs(result))
    if result.fits or compiler != "libtpu":
        say(plan.format_verdict(result))
    if result.fits:
        say(plan.format_speed(result))
    elif compiler != "libtpu":
        return
    if compiler == "none":
        say("nothing was compiled: bytes are estimated, collectives are those of the traced step")
    else:
        target = "this CPU" if compiler == "cpu" else bought
        say(
            f"compiling for {target}: seconds for a small model, minutes for a large one on many chips; "
            "compiler=none skips it"
        )
        result = plan.compile_plan(result, compiler)
        if compiler == "libtpu":
            say(plan.format_verdict(result))
        if not result.fits:
            return
        say(plan.format_compiled(result))
    if bought.is_tpu and compiler != "libtpu" and not compiling.has_libtpu():
        say("to plan with the TPU's compiler: pip install libtpu")
    if options.tokens:
        say(best_settings.format_budget(result, options.tokens, options.price))


def _sweep(settings: Config, bought: Slice, picture: str) -> None:
    plans = plan.sweep(settings, bought)
    say(plan.format_sweep(plans))
    if picture:
        from shardformer.analysis import pictures

        pictures.draw_sweep(plans, picture)
        say(f"drawn in {picture}")
