#!/usr/bin/env bash
# The lint, the format and the tests, on the CPU.
#
#   scripts/test.sh [pytest argument ...]
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

run() {
    show "$@"
    "$@"
}

export JAX_PLATFORMS=cpu
make_environment dev
cd -- "$ROOT"
run "$VENV/bin/python" -m ruff check
run "$VENV/bin/python" -m ruff format --check
if (($# > 0)); then
    run "$VENV/bin/python" -m pytest "$@"
    exit
fi

# Compiling takes most of the time and keeps one core busy: two workers. A file's tests stay together, as they share
# compiled programs, and the long files come first (tests/conftest.py).
run "$VENV/bin/python" -m pytest -q --durations=10 -n 2 --dist loadfile --no-loadscope-reorder
