#!/usr/bin/env bash
# The tests that compile for absent TPUs, with libtpu of the package registry.
#
#   scripts/tpu_compiler.sh [pytest argument ...]
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

export JAX_PLATFORMS=cpu
make_environment dev
keep_bytecode "$VENV/bytecode"
cd -- "$ROOT"

# A folder of its own: in the environment, libtpu would change what `plan` does in the other tests.
folder=$VENV/libtpu
[[ -d $folder/libtpu ]] ||
    run "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" libtpu
run env PYTHONPATH="$folder" "$VENV/bin/python" -m pytest -q --durations=5 tests/analysis/test_ahead_of_time.py "$@"
