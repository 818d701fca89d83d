"""`plan`: memory, collectives and time of a step on chips that are not available."""

import dataclasses

import jax

from shardformer import storage
from shardformer.analysis import compiling, plan, traced
from shardformer.cli.arguments import parse_settings, say
from shardformer.config import Config, check_zero, parsing
from shardformer.config.keys import key
from shardformer.config.parsing import PICTURES
from shardformer.devices import chips
from shardformer.devices.chips import Slice
from shardformer.errors import UsageError
from shardformer.layout import mesh


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """The chips (besides every key of a run)."""

    chip: str = key("v5e:2x4", "chips and their topology, such as v4:2x2x2, v5e:4x4, v5p:4x4x4, v6e:2x4, h100:8")
    compiler: str = key(
        "auto",
        "libtpu, cpu, none (estimates only, in seconds), or auto: libtpu if installed, else cpu for few devices",
    )
    sweep: bool = key(
        False, "rank all dp x mp meshes, with and without ZeRO and remat, by predicted time, without compiling"
    )
    picture: str = key("", "with sweep=true: a picture to write, such as plan.png")

    def __post_init__(self) -> None:
        if self.compiler not in ("auto", "libtpu", "cpu", "none"):
            raise UsageError(f"compiler is one of auto, libtpu, cpu, none; got {self.compiler!r}")
        if self.picture and not self.sweep:
            raise UsageError("picture= draws a sweep; give sweep=true as well")
        storage.new_file_on_disk(self.picture, "picture", PICTURES)


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
    traced.check_one_program(settings)
    jax.config.update("jax_platforms", "cpu")  # nothing runs, so no accelerator is needed
    mesh.use_cpu_devices(bought.count if options.compiler == "cpu" else min(bought.count, plan.CPU_DEVICES))
    if options.sweep:
        _sweep(settings, bought, options.picture)
    else:
        settings = plan.resolve(settings, bought)
        check_zero(settings)  # as training does
        _plan_one(settings, bought, options.compiler)


def _plan_one(settings: Config, bought: Slice, wish: str) -> None:
    """Prints the estimate first, then the compiled plan, which takes longer."""
    compiler = plan.choose_compiler(bought, wish)
    result = plan.estimate(settings, bought)
    say(plan.format_estimate(result))
    if compiler == "none":
        say("nothing was compiled: bytes are estimated, collectives are those of the traced step")
    else:
        target = "this CPU" if compiler == "cpu" else bought
        say(
            f"compiling for {target}: seconds for a small model, minutes for a large one on many chips; "
            "compiler=none skips it"
        )
        result = plan.compile_plan(result, compiler)
        say(plan.format_compiled(result))
    if bought.is_tpu and compiler != "libtpu" and not compiling.has_libtpu():
        say("to plan with the TPU's compiler: pip install libtpu")
    say(plan.format_verdict(result))


def _sweep(settings: Config, bought: Slice, picture: str) -> None:
    plans = plan.sweep(settings, bought)
    say(plan.format_sweep(plans))
    if picture:
        from shardformer.analysis import pictures

        pictures.draw_sweep(plans, picture)
        say(f"drawn in {picture}")
