#!/usr/bin/env bash
# Writes text with a trained model: the newest run under checkpoints/, or the one named.
#
#   scripts/sample.sh [RUN] [key=value ...]
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

newest_run() {
    local config run newest=""
    for config in "$ROOT"/checkpoints/*/config.json; do
        run=${config%/config.json}
        if [[ -e $config && (-z $newest || $run -nt $newest) ]]; then
            newest=$run
        fi
    done
    [[ -n $newest ]] || die "$ROOT/checkpoints holds no run; train one with scripts/train_shakespeare.sh, or name one"
    echo "$newest"
}

if [[ -z ${1:-} || $1 == -* || ($1 == *=* && ! -d $1) ]]; then
    run=$(newest_run)
    set -- "$run" "$@"
fi

extra=$(accelerator_extra)
make_environment ${extra:+"$extra"}
set -- "$VENV/bin/python" -m shardformer sample "$@"
show "$@"
export SHARDFORMER_STARTED="$(date +%s)" # goodput must not count the installation
exec "$@"
