#!/usr/bin/env bash
# The lint, the types and the tests, on the CPU.
#
#   scripts/test.sh                        the short tier: every feature once
#   scripts/test.sh full                   most of the slow tests too, on the newest JAX, then tpu_compiler.sh
#   scripts/test.sh night                  every test and every case, on the newest JAX, then tpu_compiler.sh
#   scripts/test.sh next                   the short tier on the newest JAX, with the defaults that JAX plans
#   scripts/test.sh [pytest argument ...]  without lint and types
#
# `full`, `night` and `next` take the newest Python of 3.13 and 3.12 on the PATH and in pyenv, unless PYTHON names one:
# 3.11 has JAX 0.10 only. If that is another Python than the default one, its environment is $VENV-newest.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

export JAX_PLATFORMS=cpu
# JAX writes remat and custom_vjp anew, and will reject raw keys and `with mesh:`. A deprecated name is a later error.
planned_defaults=(
    JAX_REMAT3=1 JAX_CUSTOM_VJP3=1 JAX_LEGACY_PRNG_KEY=error JAX_DISALLOW_MESH_CONTEXT_MANAGER=1
    PYTHONWARNINGS=error::DeprecationWarning
)
tier=${1:-short}
default=$VENV newest=""
case $tier in
    short | full | next) ;;
    night) export ALL_CASES=1 ;;
    *) tier=chosen ;;
esac
if [[ $tier != short && $tier != chosen && -z ${PYTHON:-} ]]; then
    newest=$(find_newest_python)
    if [[ -z $newest ]]; then
        say "LEFT OUT: the newest JAX. It needs Python 3.12 or 3.13 with its venv module; none was found."
    elif [[ $(version_of "$newest") != $(version_of "$(find_python)") ]]; then
        export PYTHON=$newest VENV=$VENV-newest
    fi
fi
make_environment dev
keep_bytecode "$VENV/bytecode"
cd -- "$ROOT"
python=$VENV/bin/python
say "$("$python" -c 'import platform, jax; print("JAX", jax.__version__, "on Python", platform.python_version())')"

if [[ $tier == chosen ]]; then
    run "$python" -m pytest "$@"
    exit
fi

run "$python" -m ruff check
run "$python" -m ruff format --check

# mypy keeps one core busy for 20 s: it runs beside the tests, and its errors come after them.
types=$VENV/types.txt
show "$python" -m mypy
"$python" -m mypy >"$types" 2>&1 &

# Compiling keeps one core busy: two workers. In the full tier two more compute while others wait for processes.
# A file's tests stay together, as a worker keeps what it compiles, and the long files come first (tests/conftest.py).
workers=2
[[ $tier == short ]] || workers=4
arguments=(-q --durations=10 -n "$workers" --dist loadfile --no-loadscope-reorder)
case $tier in
    short | next) arguments+=(--short) ;;
    full) arguments+=(-m "not nightly") ;;
esac
[[ $tier != next ]] || run export "${planned_defaults[@]}" # for the processes that tests start too
failed=0
run "$python" -m pytest "${arguments[@]}" || failed=1
if ! wait $!; then
    cat "$types"
    failed=1
fi
((failed == 0)) || exit 1
[[ $tier == full || $tier == night ]] || exit 0
run env ${newest:+-u PYTHON} VENV="$default" bash scripts/tpu_compiler.sh
