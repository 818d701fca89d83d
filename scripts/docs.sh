#!/usr/bin/env bash
# Builds the documentation into build/docs/site; open its index.html, search included, without a server.
#
#   scripts/docs.sh [sphinx-build argument ...]
#
# A warning is an error: a link without a target, a page without a place in the menu, a docstring that is not valid.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

export JAX_PLATFORMS=cpu
make_environment docs
cd -- "$ROOT"
python=$VENV/bin/python
run "$python" scripts/docs/stage.py build/docs/source
run "$python" -m sphinx --fail-on-warning --keep-going --fresh-env --quiet -c scripts/docs "$@" \
    build/docs/source build/docs/site
say "built build/docs/site/index.html"
