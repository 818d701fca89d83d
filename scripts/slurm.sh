#!/usr/bin/env bash
#SBATCH --job-name=shardformer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
# Trains on the machines of a SLURM job: one process on each, with all of its GPUs, and one model on all of them.
#
#   sbatch [--nodes=N ...] scripts/slurm.sh [PRESET] [key=value ...]
#
# Submit it from a checkout on a disk that all machines share (or give out=gs://..., out=s3://...).
# Two minutes before the time limit, or at a preemption, the run saves and ends; the job is queued again and resumes.
# For one process per GPU: sbatch --ntasks-per-node=8.
set -euo pipefail

# sbatch runs a copy of this file from elsewhere.
cd -- "${SLURM_SUBMIT_DIR:-$(dirname -- "${BASH_SOURCE[0]}")/..}"
if [[ ! -e scripts/train_shakespeare.sh ]]; then
    printf 'submit from the checkout of shardformer: %s holds no scripts/train_shakespeare.sh\n' "$PWD" >&2
    exit 2
fi
# A task that dies ends the others, which cannot continue without it. SLURM signals the tasks; this shell waits.
trap : TERM
status=0
srun --kill-on-bad-exit=1 bash scripts/train_shakespeare.sh "$@" || status=$?
# SLURM itself requeues preempted jobs, but not jobs at their time limit. A complete run is not requeued.
if ((status == 0 && $(date +%s) > ${SLURM_JOB_END_TIME:-9999999999} - 180)); then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
