#!/usr/bin/env bash
# Measures the accelerator of this machine, and writes one page of results: ten minutes on one GPU or TPU.
#
#   scripts/accelerator_check.sh [PAGE]         PAGE is accelerator_check.md unless it is given
#   SIZE=tiny scripts/accelerator_check.sh      small models, to try the script on a CPU
#
# The page has: the sharded against the dense model (several devices), attention kernels against plain attention forward
# and backward, a resume that must be bitwise, and the time of a step at 124M and 1B parameters. torch is measured beside
# it if it is installed. A part that fails is a part of the page; the script then ends with status 1.
set -uo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

page=$(realpath -- "${1:-accelerator_check.md}")
if [[ -z ${VENV_IS_READY:-} ]]; then
    read -ra extras <<<"$(accelerator_extra)"
    make_environment "${extras[@]}"
fi
cd -- "$ROOT"
python=$VENV/bin/python
folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
failed=0

common=(vocab=50304 positions=learned bias=none tied=true dtype=bfloat16 mesh=1x1)
gpt2=(preset=gpt1 layers=12 d_model=768 heads=12 seq=1024 batch=16 remat=none)
large=(preset=gpt1 layers=16 d_model=2048 heads=16 seq=2048 batch=4 remat=dots zero=0)
kernel=(layers=2 d_model=512 heads=4 seq=1024 batch=4 vocab=512)
turns=(rounds=5 turn=8)
if [[ ${SIZE:-} == tiny ]]; then
    common=(vocab=64 positions=learned bias=none tied=true mesh=1x1)
    gpt2=(preset=tiny)
    large=(preset=tiny layers=1)
    kernel=(preset=tiny attention=blocks)
    turns=(rounds=1 turn=1)
fi

# Runs a command, and puts it and its output on the page.
part() {
    local title=$1 status=0
    shift
    show "$@"
    "$@" >"$folder/output" 2>&1 || status=$?
    {
        printf '\n## %s%s\n\n```\n' "$title" "$( ((status == 0)) || echo " (FAILED, status $status)")"
        cat "$folder/output"
        printf '```\n'
    } >>"$page"
    ((status == 0)) || failed=1
}

resume() {
    local keys=(layers=2 data=builtin eval_every=10 decay_steps=20 log_every=1)
    "$python" -m shardformer train tiny "${keys[@]}" steps=20 save_every=10 out="$folder/through" >/dev/null || return
    "$python" -m shardformer train tiny "${keys[@]}" steps=10 out="$folder/stopped" >/dev/null || return
    "$python" -m shardformer train --resume "$folder/stopped" steps=20 >/dev/null || return
    diff <(cut -d, -f1-8 "$folder/through/metrics.csv") <(cut -d, -f1-8 "$folder/stopped/metrics.csv") &&
        echo "20 steps, and 10 + 10 steps with a resume: every loss and norm is the same, bitwise"
}

count_devices() { "$python" -c 'import jax; print(len(jax.devices()))' 2>/dev/null; }

printf '# Accelerator check\n\n%s\n' "$(date -u '+%Y-%m-%d %H:%M UTC')" >"$page"
part "Versions" "$python" -m shardformer --version
part "Devices" "$python" -c 'import jax; print(*(f"{d.platform}: {d.device_kind}" for d in jax.devices()), sep="\n")'
[[ -z $(command -v nvidia-smi) ]] ||
    part "Driver" nvidia-smi --query-gpu=name,driver_version,compute_cap,memory.total --format=csv
if (($(count_devices) > 1)); then
    part "Sharded against dense" "$python" -m shardformer verify tiny mesh=auto
else
    printf '\n## Sharded against dense\n\nLeft out: one device.\n' >>"$page"
fi
part "Attention against plain attention" "$python" -m shardformer bench kernel "${kernel[@]}" mesh=1x1
part "Resume" resume
peers=products
"$python" -c 'import torch' 2>/dev/null && peers=torch_compile,torch,products
part "A step of 124M parameters" \
    "$python" -m shardformer bench step "${gpt2[@]}" "${common[@]}" "${turns[@]}" peers="$peers"
part "A step of 1B parameters" "$python" -m shardformer bench step "${large[@]}" "${common[@]}" "${turns[@]}" peers="$peers"
say "results: $page"
exit "$failed"
