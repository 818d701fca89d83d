#!/usr/bin/env bash
# Trains on Shakespeare with the TPUs or GPUs of this machine, or with one CPU device per core.
#
#   scripts/train_shakespeare.sh [PRESET] [key=value ...]
#   scripts/train_shakespeare.sh --resume RUN [key=value ...]
#
# An existing run in the run folder is resumed. On a TPU pod, scripts/tpu.sh runs this on every worker.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

extra=$(accelerator_extra)
preset=shakespeare_char
[[ -n $extra ]] || preset=shakespeare_cpu
if [[ -n ${1:-} && $1 != -* && $1 != *=* ]]; then
    preset=$1
    shift
fi

out="" mesh="" resume=""
for word in "$@"; do
    case $word in
        out=*) out=${word#out=} out=${out/#\~\//$HOME/} ;;
        mesh=*) mesh=given ;;
        --resume) resume=given ;;
    esac
done

extras=${extra:-}
[[ " $* " != *://* ]] || extras="$extras bucket"
# shellcheck disable=SC2086
make_environment $extras

# For a bucket, the program itself checks whether a run exists.
holds_a_run() {
    case $1 in
        *://*) "$VENV/bin/python" -m shardformer show "$1" >/dev/null 2>&1 ;;
        *) [[ -e $1/config.json ]] ;;
    esac
}

if [[ -z $resume ]]; then
    run=${out:-$ROOT/checkpoints/$preset}
    if holds_a_run "$run"; then
        say "$run holds a run: resuming it (for a new one give another folder: out=FOLDER)"
        set -- --resume "$run" "$@"
    else
        if [[ -z $extra && -z $mesh ]]; then
            say "One CPU device a core is the fastest mesh here. To see tensor parallelism, give mesh=4x2 and another out=FOLDER;"
            say "how each parameter is split then: python -m shardformer show $preset mesh=4x2"
        fi
        [[ -n $out ]] || set -- "$@" out="$run"
        set -- "$preset" "$@"
    fi
fi

set -- "$VENV/bin/python" -m shardformer train "$@"
show "$@"
# exec, because the SIGTERM of a preemption must reach the trainer, which saves and exits.
export SHARDFORMER_STARTED="$(date +%s)" # goodput must not count the installation
exec "$@"
