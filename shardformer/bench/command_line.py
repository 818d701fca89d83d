"""`bench NAME key=value ...`: which measurement, with which options, of which configuration."""

from shardformer import checks, parsing
from shardformer.bench import checkpoint_time, costs, generation, scaling, step_time
from shardformer.bench.contenders import Measuring
from shardformer.config import Config
from shardformer.errors import UsageError
from shardformer.presets import preset

BENCHES = {
    "step": step_time.bench_step,
    "mesh": step_time.bench_mesh,
    "scaling": scaling.bench_scaling,
    "accumulation": costs.bench_accumulation,
    "zero": costs.bench_zero,
    "checkpoint": checkpoint_time.bench_checkpoint,
    "generate": generation.bench_generate,
}


def main(words: list[str]) -> None:
    name = words[0] if words else "step"
    if name not in BENCHES:
        raise UsageError(f"bench takes {', '.join(BENCHES)} and key=value, got {name!r}")
    own = [word for word in words[1:] if word.partition("=")[0] in Measuring.__dataclass_fields__]
    options = parsing.parse_options(own, Measuring)
    overrides = parsing.parse_overrides([word for word in words[1:] if word not in own], Config)
    named = any(word.startswith("preset=") for word in own)
    settings = generation.gpt2() if name == "generate" and not named else preset(options.preset)
    settings = settings.replace(**{"mesh": "1x1", "out": ""} | overrides)  # a preset's out is for its training
    checks.need(settings.accum > 0, "bench takes accum as a number; give accum=1")
    BENCHES[name](options, settings.replace(vocab=settings.vocab or 65))  # tiny_shakespeare's
