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

# Compiling takes most of the time, and keeps one core busy: two halves side by side, the shorter one's words at the end.
half=(tests/legacy tests/convert tests/optim tests/report tests/shards tests/data tests/test_cookbook.py)
words="$(mktemp)"
trap 'rm -f -- "$words"' EXIT
"$VENV/bin/python" -m pytest -q --durations=10 "${half[@]}" >"$words" 2>&1 &
other=$!
status=0
run "$VENV/bin/python" -m pytest -q --durations=10 "${half[@]/#/--ignore=}" || status=$?
wait "$other" || status=$?
show "$VENV/bin/python" -m pytest -q --durations=10 "${half[@]}"
cat -- "$words"
exit "$status"
