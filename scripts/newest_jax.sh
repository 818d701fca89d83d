#!/usr/bin/env bash
# The legacy tests on the newest JAX, in a fresh environment on the newest Python: older Pythons have older JAX only.
#
#   scripts/newest_jax.sh [pytest argument ...]
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

# The packages that the legacy tests and the programs in them import.
packages=(jax dm-haiku optax numpy einops rich matplotlib tensorflow pytest pytest-xdist hypothesis)

# Prints the newest Python of 3.13 and 3.12. Each is run, because pyenv has shims for versions that are not installed.
find_newest_python() {
    local version candidate installed=""
    ! command -v pyenv >/dev/null || installed=$(pyenv root)/versions
    for version in 3.13 3.12; do
        for candidate in "python$version" python3 "$installed/$version".*/bin/python; do
            if [[ $(version_of "$candidate") == "$version" ]] && "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
                echo "$candidate"
                return
            fi
        done
    done
}

newest=$(find_newest_python)
if [[ -z $newest ]]; then
    say "LEFT OUT: the legacy tests on the newest JAX. They need Python 3.12 or 3.13 with its venv module; none was found."
    exit
fi

environment=$(mktemp -d)
trap 'rm -rf -- "$environment"' EXIT
python=$environment/bin/python
run "$newest" -m venv "$environment"
run "$python" -m pip install --quiet --disable-pip-version-check --no-compile "${packages[@]}"

export JAX_PLATFORMS=cpu
keep_bytecode "$environment/bytecode"
cd -- "$ROOT"
say "$("$python" -c 'import platform, jax; print("JAX", jax.__version__, "on Python", platform.python_version())')"
(($#)) || set -- tests/legacy tests/test_imports.py
run "$python" -m pytest -q --durations=10 -n 2 --dist loadfile --no-loadscope-reorder "$@"
