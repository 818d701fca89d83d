#!/usr/bin/env bash
# Builds the sdist and the wheel, and trains with each, installed in a clean environment outside of the checkout.
#
#   scripts/wheel.sh [FOLDER]   FOLDER gets both files; dist by default
#
#   PYTHON=COMMAND              another Python than the first suitable one
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

folder=${1:-$ROOT/dist}
mkdir -p -- "$folder"
folder=$(cd -- "$folder" && pwd)
python=$(find_python)
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
export JAX_PLATFORMS=cpu
unset PYTHONPATH

run "$python" -m venv "$work/tools"
run "$work/tools/bin/pip" install --quiet --disable-pip-version-check build twine
rm -f -- "$folder"/shardformer-*.whl "$folder"/shardformer-*.tar.gz
run "$work/tools/bin/python" -m build --outdir "$folder" "$ROOT" >"$work/build.log" || { cat "$work/build.log"; exit 1; }
run "$work/tools/bin/twine" check --strict "$folder"/shardformer-*

run "$python" -m venv "$work/clean"
run "$work/clean/bin/pip" install --quiet --disable-pip-version-check --no-compile "$folder"/shardformer-*.whl
cd -- "$work"
try_installed() {
    run "$work/clean/bin/shardformer" --version
    run "$work/clean/bin/shardformer" train tiny data=builtin steps=20 out="$1"
    run "$work/clean/bin/shardformer" sample "$1" tokens=20
}
try_installed run
# Built from the sdist, the package has the files of data that the sdist has; its dependencies are the wheel's.
run "$work/clean/bin/pip" install --quiet --disable-pip-version-check --no-compile --no-deps --force-reinstall \
    "$folder"/shardformer-*.tar.gz
try_installed run_of_sdist
