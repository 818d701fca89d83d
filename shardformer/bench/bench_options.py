"""The keys of all benchmarks. Imports no JAX."""

import dataclasses

from shardformer import storage
from shardformer.config.keys import key
from shardformer.config.parsing import PICTURES
from shardformer.errors import UsageError
from shardformer.tables import format_count


@dataclasses.dataclass(frozen=True)
class Measuring:
    """The measurement (every key of a run may be given too)."""

    preset: str = key("shakespeare_cpu", "the preset to measure")
    rounds: int = key(15, "turns of each contender; medians are over turns. `bench race` evaluates after each")
    turn: int = key(8, "steps per turn")
    peers: str = key(
        "auto",
        "for `bench step` and `race`: some of plain, partitioned, xmap, torch, torch_compile, products; for `bench "
        "generate`: of transformers, llama_cpp; auto: all that can run",
    )
    meshes: str = key("1x1,2x1,4x2,8x1,2x4,1x8", "meshes of `bench mesh`")
    recipe: str = key("", "a recipe of the CPU speedrun that `bench race` trains, by its name in bench/speedrun.toml")
    seeds: int = key(1, "runs of recipe=, from seed= on; two or more have a p-value")
    mb: int = key(1000, "size of the state in `bench checkpoint`, in MB")
    rows: str = key("1,16", "numbers of rows that `bench generate` continues at once")
    tokens: int = key(128, "tokens that `bench generate` appends to each row")
    prompt: int = key(16, "tokens of each of its prompts")
    json: str = key("", "file for the figures of `bench step`, `race` and `mesh`")
    picture: str = key("", "file for a picture of `bench step`, `race` or `mesh`, such as step.png")

    def __post_init__(self):
        if min(self.rounds, self.turn, self.mb, self.seeds, self.prompt) < 1:
            got = f"rounds={self.rounds} turn={self.turn} mb={self.mb} seeds={self.seeds} prompt={self.prompt}"
            raise UsageError(f"rounds, turn, mb, seeds and prompt are at least 1; got {got}")
        storage.new_file_on_disk(self.json, "json")
        storage.new_file_on_disk(self.picture, "picture", PICTURES)
        if not all(number.isdecimal() and int(number) for number in self.rows.split(",")):
            raise UsageError(f"rows takes numbers with commas, such as 1,16; got {self.rows!r}")

    def describe_turns(self) -> str:
        """Formats how often steps are timed: 'medians of 15 turns of 8 steps'."""
        return f"medians of {format_count(self.rounds, 'turn')} of {format_count(self.turn, 'step')}"

    @property
    def row_counts(self) -> list[int]:
        return [int(number) for number in self.rows.split(",")]
