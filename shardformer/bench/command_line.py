"""`bench NAME key=value ...`: chooses the measurement, its options and its configuration."""

from shardformer.bench import checkpoint_time, costs, generation, kernel_check, race, scaling, speedrun, step_time
from shardformer.bench.bench_options import Measuring
from shardformer.config import Config, parsing, require
from shardformer.config.presets import preset
from shardformer.errors import UsageError

BENCHES = {
    "step": step_time.bench_step,
    "race": race.bench_race,
    "mesh": step_time.bench_mesh,
    "scaling": scaling.bench_scaling,
    "accumulation": costs.bench_accumulation,
    "zero": costs.bench_zero,
    "checkpoint": checkpoint_time.bench_checkpoint,
    "generate": generation.bench_generate,
    "kernel": kernel_check.bench_kernel,
}
# READ: the keys of Measuring that a bench reads. SET: the keys of a run that a bench sets, so a user cannot.
READ = {
    "step": ("preset", "rounds", "turn", "peers", "json", "picture"),
    "race": ("preset", "rounds", "peers", "recipe", "seeds", "json", "picture"),
    "mesh": ("preset", "rounds", "turn", "meshes", "json", "picture"),
    "scaling": ("preset", "rounds", "turn"),
    "accumulation": ("preset", "rounds", "turn"),
    "zero": ("preset",),
    "checkpoint": ("preset", "rounds", "mb"),
    "generate": ("preset", "rounds", "peers", "rows", "prompt", "tokens"),
    "kernel": ("preset",),
}
OF_A_RECIPE = {"recipe", "seeds", "json"}  # those of them that `bench race recipe=NAME` reads
SET = {
    "mesh": ("mesh",),
    "accumulation": ("accum", "accum_mode"),
    "zero": ("zero",),
    "checkpoint": ("mesh", "layers", "d_model", "heads", "d_ff"),
    "kernel": ("dtype", "kv_heads", "window"),
}


def main(arguments: list[str]) -> None:
    name = arguments[0] if arguments else "step"
    if name not in BENCHES:
        raise UsageError(f"bench takes {', '.join(BENCHES)} and key=value, got {name!r}")
    reject_unread(name, [word.partition("=")[0] for word in arguments[1:] if "=" in word])
    known = [word for word in arguments[1:] if word.partition("=")[0] in Measuring.__dataclass_fields__]
    options = parsing.parse_options(known, Measuring)
    overrides = parsing.parse_overrides([word for word in arguments[1:] if word not in known], Config)
    check_recipe(options, {word.partition("=")[0] for word in known})
    if options.recipe:
        speedrun.race_recipe(options, speedrun.make_settings(options.recipe, overrides))
        return
    named = any(word.startswith("preset=") for word in known)
    settings = generation.gpt2() if name == "generate" and not named else preset(options.preset)
    default_mesh = "auto" if name == "race" else "1x1"
    settings = settings.replace(**{"mesh": default_mesh, "out": ""} | overrides)  # a preset's out is for training
    require(settings.training.accum, "bench takes accum as a number; give accum=1")
    if name != "race":  # it has a text, which decides the vocabulary
        settings = settings.replace(vocab=settings.model.vocab or 65)  # tiny_shakespeare's
    BENCHES[name](options, settings)


def reject_unread(name: str, keys: list[str]) -> None:
    """Rejects keys that the benchmark ignores."""
    if unread := {key: find_readers(key) for key in keys if name not in find_readers(key)}:
        hints = "; ".join(f"{key}= is read by bench {', '.join(readers)}" for key, readers in unread.items())
        raise UsageError(
            f"bench {name} does not read {', '.join(unread)}: {hints}; leave {'it' if len(unread) == 1 else 'them'} out"
        )


def check_recipe(options: Measuring, given: set[str]) -> None:
    """Rejects `seeds` without a recipe, and keys of a race between implementations with one."""
    if not options.recipe and "seeds" in given:
        raise UsageError(f"seeds={options.seeds} is read with recipe=NAME only; give one, or leave seeds out")
    if options.recipe and (unread := given - OF_A_RECIPE):
        raise UsageError(
            f"bench race recipe={options.recipe} reads {', '.join(sorted(OF_A_RECIPE))} and keys of a run, got "
            f"{', '.join(sorted(unread))}; leave {'it' if len(unread) == 1 else 'them'} out"
        )


def find_readers(key: str) -> list[str]:
    """Returns the benches that read a key: for a key of a run, the benches that do not set it."""
    if key in Measuring.__dataclass_fields__:
        return [name for name in BENCHES if key in READ[name]]
    return [name for name in BENCHES if key not in SET.get(name, ())]
