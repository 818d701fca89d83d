"""Applies each mutant to a copy of the package, runs the tests that reach it, and prints those that survive.

python -m tests.mutants                   every mutant with the short tier's tests
python -m tests.mutants 'router_*' dpo    some of them, by patterns of their names
python -m tests.mutants --all-tests       with the slow tests of the same files too
"""

import argparse
import fnmatch
import sys
import tempfile
from pathlib import Path

from shardformer.tables import format_count, format_table
from tests.mutants.checkout import Checkout, Outcome
from tests.mutants.table import Mutant, read_table


def select(mutants: list[Mutant], patterns: list[str]) -> list[Mutant]:
    """Returns the mutants whose names match a pattern; all without patterns."""
    chosen = [mutant for mutant in mutants if any(fnmatch.fnmatchcase(mutant.name, p) for p in patterns or ["*"])]
    if not chosen:
        raise SystemExit(f"no mutant is named {' or '.join(patterns)}; the names are in tests/mutants/*.toml")
    return chosen


def main(words: list[str] | None = None) -> int:
    """Tries mutants; returns 1 if one survives that the table does not call equivalent."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of mutants, or patterns such as 'dpo_*'")
    parser.add_argument("--all-tests", action="store_true", help="run slow tests too")
    parser.add_argument("--limit", type=float, default=600, help="seconds of one mutant's tests")
    options = parser.parse_args(words)
    chosen = select(read_table(), options.names)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        checkout = Checkout(Path(folder), options.limit, is_short=not options.all_tests)
        outcomes = []
        for number, mutant in enumerate(chosen, 1):
            outcome = checkout.try_out(mutant)
            verdict = f"killed by {outcome.killer}" if outcome.killer else f"SURVIVED: {outcome.problem}"
            print(f"{number}/{len(chosen)} {mutant.name}: {verdict} ({outcome.seconds:.0f} s)", flush=True)
            outcomes.append(outcome)
        return report(outcomes, checkout.find_failing(sorted({each.killer for each in outcomes if each.killer})))


def report(outcomes: list[Outcome], failing: set[str]) -> int:
    """Prints the survivors; `failing` are the tests that fail without a mutant, and therefore kill none."""
    survivors = [outcome for outcome in outcomes if not outcome.killer or outcome.killer in failing]
    unknown = [outcome for outcome in survivors if not outcome.mutant.equivalent]
    if survivors:
        rows = [[each.mutant.name, _describe(each), each.mutant.cost] for each in survivors]
        print(format_table(rows, ["survivor", "why", "cost"]))
    print(
        f"{format_count(len(outcomes), 'mutant')}: {len(outcomes) - len(survivors)} killed, "
        f"{len(survivors) - len(unknown)} equivalent, {len(unknown)} survived"
    )
    return 1 if unknown else 0


def _describe(outcome: Outcome) -> str:
    if outcome.mutant.equivalent:
        return f"equivalent: {outcome.mutant.equivalent}"
    return f"{outcome.killer} fails without it too" if outcome.killer else outcome.problem


if __name__ == "__main__":
    sys.exit(main())
