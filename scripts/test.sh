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
(($# > 0)) || set -- -q --durations=10
# Compiling takes most of the time and keeps one core busy. One file's tests stay together: they share compiled programs.
run "$VENV/bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
