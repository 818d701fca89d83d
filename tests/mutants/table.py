"""The table of mutants, and the tests that reach each of them."""

import dataclasses
import tomllib
from pathlib import Path

TABLES = Path(__file__).parent
ROOT = TABLES.parents[1]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A change of one line of a file of the package."""

    name: str
    file: str  # below shardformer/
    before: str  # a part of one line, which the file has once, or `times` times
    after: str
    cost: str  # what a user would suffer
    tests: tuple[str, ...] = ()  # below tests/, files or single tests that notice it; empty: see `find_tests`
    occurrence: int = 1  # which of them changes, from 1
    times: int = 1
    equivalent: str = ""  # the reason why no test can notice it

    @property
    def path(self) -> str:
        return f"shardformer/{self.file}"

    def change(self, source: str) -> str:
        """Returns the source with this mistake; raises ValueError if the table is out of date."""
        if (found := source.count(self.before)) != self.times:
            raise ValueError(
                f"mutant {self.name}: {self.path} has {self.before!r} {found} times, expected {self.times}; "
                "rewrite its row for the new code"
            )
        pieces = source.split(self.before)
        first, rest = pieces[: self.occurrence], pieces[self.occurrence :]
        return self.before.join(first) + self.after + self.before.join(rest)


def read_table() -> list[Mutant]:
    """Returns all mutants, in the order of the files' names."""
    mutants = []
    for path in sorted(TABLES.glob("*.toml")):
        for name, row in tomllib.loads(path.read_text()).items():
            mutants.append(Mutant(name, **row | {"tests": tuple(row.get("tests", ()))}))
    return mutants


def find_tests(mutant: Mutant, root: Path = ROOT) -> list[str]:
    """Returns the tests that reach a mutant, the most likely first.

    Those of its row; else the file that mirrors the module, then all files of that folder that import the module.
    """
    if mutant.tests:
        return [f"tests/{name}" for name in mutant.tests]
    module = Path(mutant.file).with_suffix("")
    mirror = root / "tests" / module.parent / f"test_{module.name}.py"
    parent = ".".join(("shardformer", *module.parent.parts))
    names = f"import {module.name}", f"{parent}.{module.name} import"
    found = [mirror] if mirror.exists() else []
    for path in sorted(mirror.parent.glob("test_*.py")):
        if path != mirror and any(name in path.read_text() for name in names):
            found.append(path)
    return [path.relative_to(root).as_posix() for path in found]
