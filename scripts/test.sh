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
(($# > 0)) || set -- -q --durations=10
run "$VENV/bin/python" -m ruff check
run "$VENV/bin/python" -m ruff format --check
run "$VENV/bin/python" -m pytest "$@"
