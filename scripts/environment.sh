# shellcheck shell=bash
# Sourced by the other scripts: makes and repairs the virtual environment of the project.
#
#   make_environment [EXTRA ...]   $VENV holds the package, editable, with these extras of pyproject.toml
#   accelerator_extra              prints the extra for this machine's accelerator: tpu, cuda, cuda12, or nothing
#   find_newest_python             prints the Python with the newest JAX, or nothing if only 3.11 is installed
#   keep_bytecode FOLDER           Python compiles each module once for all processes and keeps the bytecode there
#
#   VENV=FOLDER       another folder than .venv
#   PYTHON=COMMAND    another Python than the first suitable one
#   JAX_PLATFORMS     the platform of JAX; if set, the hardware is not detected

ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$ROOT/.venv}
[[ $VENV == /* ]] || VENV=$PWD/$VENV

say() { printf '%s\n' "$*" >&2; }

die() {
    say "$@"
    exit 2
}

# Prints a command as it could be typed.
show() {
    printf '+' >&2
    printf ' %q' "$@" >&2
    printf '\n' >&2
}

# Prints a command and runs it.
run() {
    show "$@"
    "$@"
}

accelerator_extra() {
    case ${JAX_PLATFORMS:-} in
        cpu*) ;;
        tpu*) echo tpu ;;
        cuda* | gpu*) cuda_extra ;;
        *) if has_nvidia_gpu; then cuda_extra; elif has_tpu; then echo tpu; fi ;;
    esac
}

has_nvidia_gpu() { [[ $(nvidia-smi -L 2>/dev/null) == GPU* ]]; }

# CUDA 13 needs driver 580 and compute capability 7.5; jax[cuda12] supports older ones.
cuda_extra() {
    nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader |
        awk -F', *' '$1 + 0 < 580 || $2 + 0 < 7.5 { old = 1 } END { print old ? "cuda12" : "cuda" }'
}

# Looks for a PCI device of Google that is neither a disk (class 01) nor a network card (02), as any Google VM has.
has_tpu() {
    local device
    for device in /sys/bus/pci/devices/*; do
        if [[ $(cat "$device/vendor" 2>/dev/null) == 0x1ae0 && $(cat "$device/class") != 0x0[12]* ]]; then
            return 0
        fi
    done
    [[ -n ${TPU_ACCELERATOR_TYPE:-} ]]
}

make_environment() {
    mkdir -p "$VENV"
    if [[ ! -e $VENV/.lock && -n $(ls -A "$VENV") ]]; then
        die "$VENV was not made by this script and is not changed; move it away, or name a new folder with VENV=FOLDER"
    fi
    (
        wait_for_lock
        usable || create
        install "$@"
    ) 9>"$VENV/.lock"
}

wait_for_lock() {
    if command -v flock >/dev/null && ! flock --nonblock 9; then
        say "another script is setting up $VENV; waiting for it"
        flock 9
    fi
}

# A killed install may leave half a package behind, which pip takes for a complete one.
usable() {
    [[ ! -e $VENV/.unfinished ]] && "$VENV/bin/python" -c 'import pip' 2>/dev/null &&
        [[ -z ${PYTHON:-} || $(version_of "$VENV/bin/python") == "$(version_of "$PYTHON")" ]]
}

create() {
    local python
    python=$(find_python)
    touch "$VENV/.unfinished"
    find "$VENV" -mindepth 1 -maxdepth 1 ! -name .lock ! -name .unfinished -exec rm -rf {} +
    show "$python" -m venv "$VENV"
    "$python" -m venv "$VENV"
    rm "$VENV/.unfinished"
}

# Keeps one stamp for the package and one for each extra, so that each is installed once.
install() {
    local stamp name names="" status=0
    stamp="$(cksum <"$ROOT/pyproject.toml") Python $(version_of "$VENV/bin/python") $ROOT"
    for name in package "$@"; do
        [[ $(cat "$VENV/.has-$name" 2>/dev/null) == "$stamp" ]] || names="$names $name"
    done
    [[ -n $names ]] || return 0

    local extras="$*"
    # Python compiles modules when they are imported; compiling all of TensorFlow would take a quarter of the time.
    set -- "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -e "$ROOT${extras:+[${extras// /,}]}"
    say "installing into $VENV (a minute or two the first time)"
    show "$@"
    touch "$VENV/.unfinished"
    "$@" || status=$?
    # pip undoes a failed install, but not one that a signal ended (status above 128).
    ((status > 128)) || rm "$VENV/.unfinished"
    if ((status > 0)); then
        say "the install failed with the message of pip above"
        exit 1
    fi
    for name in $names; do
        printf '%s' "$stamp" >"$VENV/.has-$name"
    done
}

# Prints the first suitable Python. Each is run, because pyenv has shims for versions that are not installed.
find_python() {
    local candidate without_venv=""
    set -- python3 python3.13 python3.12 python3.11
    [[ -z ${PYTHON:-} ]] || set -- "$PYTHON"
    for candidate in "$@"; do
        "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || continue
        if "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
            echo "$candidate"
            return
        fi
        without_venv=${without_venv:-$(version_of "$candidate")}
    done
    if [[ -n $without_venv ]]; then
        die "Python $without_venv lacks its venv module; Debian and Ubuntu: sudo apt install python$without_venv-venv"
    fi
    local asked=${PYTHON:-python3}
    die "shardformer needs Python 3.11, 3.12 or 3.13 (TensorFlow has wheels for these); $asked is $(version_of "$asked" || echo "not installed").
Install one and run this again, with PYTHON=COMMAND if it is not found:
  Debian, Ubuntu:  sudo apt install python3.12 python3.12-venv
                   (Ubuntu 22.04, as on older TPU VMs, first: sudo add-apt-repository ppa:deadsnakes/ppa)
  without root:    curl -LsSf https://astral.sh/uv/install.sh | sh; uv python install 3.12
                   then PYTHON=\$(uv python find 3.12)"
}

# Prints the newest Python of 3.13 and 3.12, which have a newer JAX than 3.11; nothing if there is none.
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

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# The tests start hundreds of processes; without its bytecode each would take 1.3 s longer to import JAX, 7 s TensorFlow.
keep_bytecode() {
    unset PYTHONDONTWRITEBYTECODE
    export PYTHONPYCACHEPREFIX=$1
}
