"""`bench NAME key=value ...`: which measurement, with which options, of which configuration."""

from shardformer import parsing
from shardformer.bench import checkpoint_time, costs, step_time
from shardformer.config import Config
from shardformer.errors import UsageError
from shardformer.presets import preset

BENCHES = {
    "step": step_time.bench_step,
    "mesh": step_time.bench_mesh,
    "accumulation": costs.accumulation,
    "zero": costs.zero,
    "checkpoint": checkpoint_time.compare,
}


def main(words: list[str]) -> None:
    name = words[0] if words else "step"
    if name not in BENCHES:
        raise UsageError(f"bench takes {', '.join(BENCHES)} and key=value, got {name!r}")
    own = [word for word in words[1:] if word.partition("=")[0] in step_time.Measuring.__dataclass_fields__]
    options = step_time.Measuring(**parsing.parse_overrides(own, step_time.Measuring))
    overrides = parsing.parse_overrides([word for word in words[1:] if word not in own], Config)
    settings = preset(options.preset).replace(**{"mesh": "1x1"} | overrides)
    BENCHES[name](options, settings.replace(vocab=settings.vocab or 65))  # tiny_shakespeare's
