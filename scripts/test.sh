#!/usr/bin/env bash
# The lint, the types and the tests, on the CPU.
#
#   scripts/test.sh                        the short tier: every feature once
#   scripts/test.sh full                   every test, then tpu_compiler.sh and newest_jax.sh
#   scripts/test.sh [pytest argument ...]  without lint and types
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

export JAX_PLATFORMS=cpu
make_environment dev
cd -- "$ROOT"
python=$VENV/bin/python

tier=${1:-short}
if [[ $tier != short && $tier != full ]]; then
    run "$python" -m pytest "$@"
    exit
fi

run "$python" -m ruff check
run "$python" -m ruff format --check
run "$python" -m mypy

# Compiling takes most of the time and keeps one core busy: two workers. A file's tests stay together, as they share
# compiled programs, and the long files come first (tests/conftest.py).
arguments=(-q --durations=10 -n 2 --dist loadfile --no-loadscope-reorder)
[[ $tier == full ]] || arguments+=(--short)
run "$python" -m pytest "${arguments[@]}"
[[ $tier == full ]] || exit 0
run bash scripts/tpu_compiler.sh
run bash scripts/newest_jax.sh
