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
keep_bytecode "$VENV/bytecode"
cd -- "$ROOT"
python=$VENV/bin/python

tier=${1:-short}
if [[ $tier != short && $tier != full ]]; then
    run "$python" -m pytest "$@"
    exit
fi

run "$python" -m ruff check
run "$python" -m ruff format --check

# mypy keeps one core busy for 20 s: it runs beside the tests, and its errors come after them.
types=$VENV/types.txt
show "$python" -m mypy
"$python" -m mypy >"$types" 2>&1 &

# Compiling keeps one core busy: two workers. In the full tier a third one computes while others wait for processes.
# A file's tests stay together, as a worker keeps what it compiles, and the long files come first (tests/conftest.py).
workers=2
[[ $tier == full ]] && workers=3
arguments=(-q --durations=10 -n "$workers" --dist loadfile --no-loadscope-reorder)
[[ $tier == full ]] || arguments+=(--short)
failed=0
run "$python" -m pytest "${arguments[@]}" || failed=1
if ! wait $!; then
    cat "$types"
    failed=1
fi
((failed == 0)) || exit 1
[[ $tier == full ]] || exit 0
run bash scripts/tpu_compiler.sh
run bash scripts/newest_jax.sh
