#!/usr/bin/env bash
# Trains on Cloud TPUs from this machine: creates them, copies this checkout, trains on every worker, restarts after
# a preemption, deletes. Needs gcloud, logged in, and a bucket: the workers of a pod share no disk.
#
#   scripts/tpu.sh create NAME type=v5litepod-16 [slices=2] [spot=true] [version=RUNTIME]
#   scripts/tpu.sh train  NAME [PRESET] out=gs://BUCKET/RUN [key=value ...]    by scripts/train_shakespeare.sh
#   scripts/tpu.sh train  NAME -- COMMAND ...                                  or by a command of your own
#   scripts/tpu.sh logs   NAME       follows the log of worker 0
#   scripts/tpu.sh stop   NAME       the run saves and ends; train goes on with it
#   scripts/tpu.sh delete NAME
#
# Each takes zone=ZONE and project=PROJECT where gcloud's own are not meant. --print in front of a command prints what
# would be run instead, as if every answer were a good one.
#
#   RETRIES=10 PAUSE=30    how often, and after how many seconds, a refused connection is tried again
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

RETRIES=${RETRIES:-10}
PAUSE=${PAUSE:-30}
FOLDER=shardformer # on every worker, in the home folder

main() {
    print=""
    if [[ ${1:-} == --print ]]; then
        print=yes
        shift
    fi
    local command=${1:-}
    case $command in
        create | train | logs | stop | delete) shift ;;
        *) usage ;;
    esac
    name=${1:-}
    [[ $name =~ ^[a-z][a-z0-9-]*$ ]] || die "$command takes the NAME of a TPU (small letters, digits, -), got '$name'"
    shift
    [[ -n $print ]] || command -v gcloud >/dev/null || die "gcloud is not installed: https://cloud.google.com/sdk/docs/install"
    record=$ROOT/.tpu/$name
    type="" version="" slices=1 spot=true where=() words=() own=()
    if [[ -e $record && $command != create ]]; then
        # shellcheck source=/dev/null
        source "$record"
    fi
    read_words "$command" "$@"
    [[ $command == create || $command == delete || -n $print ]] || ssh_agent
    "$command"
}

usage() {
    sed -n '2,/^set -/{/^#/!d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}" >&2
    exit 2
}

read_words() {
    local command=$1 word zone="" project=""
    shift
    while (($# > 0)); do
        word=$1
        shift
        case $command:$word in
            *:zone=*) zone=${word#*=} ;;
            *:project=*) project=${word#*=} ;;
            create:type=*) type=${word#*=} ;;
            create:version=*) version=${word#*=} ;;
            create:slices=*) slices=${word#*=} ;;
            create:spot=*) spot=${word#*=} ;;
            train:--)
                own=("$@")
                break
                ;;
            train:*) words+=("$word") ;;
            *) die "$command does not know '$word'; see scripts/tpu.sh" ;;
        esac
    done
    [[ -z $zone && -z $project ]] || where=(${zone:+--zone="$zone"} ${project:+--project="$project"})
}

# What was asked for is kept here: after a preemption the same is created again.
create() {
    [[ -n $type ]] || die "create takes type=ACCELERATOR, such as type=v5litepod-16 or type=v4-32"
    [[ $slices =~ ^[1-9][0-9]*$ ]] || die "slices is a number of at least 1, got '$slices'"
    [[ $spot == true || $spot == false ]] || die "spot is true or false, got '$spot'"
    version=${version:-$(runtime_of "$type")}
    if [[ -z $print ]]; then
        mkdir -p "$ROOT/.tpu"
        declare -p type version slices spot where | sed 's/^declare -[^ ]* //' >"$record"
    fi
    request
    wait_until_active || fail "$name was not created; scripts/tpu.sh delete $name removes the request"
    say "$name is there; train with: scripts/tpu.sh train $name out=gs://BUCKET/RUN"
}

runtime_of() {
    case $1 in
        v6e-*) echo v2-alpha-tpuv6e ;;
        v5p-*) echo v2-alpha-tpuv5 ;;
        v5litepod-*) echo v2-alpha-tpuv5-lite ;;
        *) echo tpu-ubuntu2204-base ;;
    esac
}

request() {
    local shape=(--node-id="$name")
    ((slices == 1)) || shape=(--node-count="$slices" --node-prefix="$name")
    [[ $spot == false ]] || shape+=(--spot)
    queued create "$name" "${shape[@]}" --accelerator-type="$type" --runtime-version="$version"
}

# It may wait for a day until there is room; it ends early where there is nothing to wait for.
wait_until_active() {
    local state before="" unknown=0
    while true; do
        state=$(state_now)
        case $state in
            ACTIVE) return 0 ;;
            FAILED | SUSPENDING | SUSPENDED | NOT_FOUND) return 1 ;;
            UNKNOWN) ((++unknown < RETRIES)) || fail "gcloud fails, as it says above" ;;
        esac
        [[ $state == "$before" ]] || say "$name: $state"
        before=$state
        sleep "$PAUSE"
    done
}

# ACTIVE once every slice is READY; what the request is waiting for; NOT_FOUND; or UNKNOWN where gcloud itself failed.
state_now() {
    local state node
    state=$(ask queued describe "$name" "--format=value(state.state)")
    if [[ $state == ACTIVE ]]; then
        for node in $(nodes); do
            case $(ask tpu_vm describe "$node" "--format=value(state)") in
                READY | ACTIVE | UNKNOWN) ;;
                CREATING | STARTING | RESTARTING | REPAIRING) state=PROVISIONING ;;
                *) state=SUSPENDED ;; # PREEMPTED, TERMINATED, STOPPED, or gone
            esac
        done
    fi
    echo "$state"
}

ask() {
    local answer
    if [[ -n $print ]]; then
        "$@"
        echo ACTIVE
    elif answer=$("$@" 2>&1); then
        tail -n 1 <<<"$answer"
    elif [[ $answer == *NOT_FOUND* ]]; then
        echo NOT_FOUND
    else
        say "$answer"
        echo UNKNOWN
    fi
}

train() {
    if ((${#own[@]} == 0)); then
        [[ " ${words[*]-} " == *" out="*://* || " ${words[*]-} " == *" --resume "*://* ]] ||
            die "train takes out=gs://BUCKET/RUN: the workers share no disk, and a preempted one loses its own"
        own=(bash scripts/train_shakespeare.sh "${words[@]}")
    fi
    local status
    while true; do
        make_ready
        copy_checkout
        on_workers all "$(start_line)" || fail "the workers of $name cannot be reached"
        status=0
        follow_to_the_end || status=$?
        ((status == LOST)) || exit "$status"
        say "$name was preempted; the run goes on from its newest checkpoint"
    done
}

LOST=200 # the TPU is gone

make_ready() {
    local tried=0
    while true; do
        case $(state_now) in
            ACTIVE) return ;;
            FAILED | SUSPENDING | SUSPENDED)
                say "$name is gone; it is created again"
                queued delete "$name" --force --quiet || true
                request || true
                ;;
            NOT_FOUND)
                [[ -n $type ]] || fail "$name is not there; create it: scripts/tpu.sh create $name type=ACCELERATOR"
                request || true
                ;;
        esac
        wait_until_active && return
        ((++tried < RETRIES)) || fail "$name could not be created in $RETRIES attempts"
        sleep "$PAUSE"
    done
}

copy_checkout() {
    local archive=$ROOT/.tpu/checkout.tgz node
    [[ -n $print ]] || mkdir -p "$ROOT/.tpu"
    in_checkout tar --null --files-from=- --ignore-failed-read -czf "$archive"
    for node in $(nodes); do
        again tpu_vm scp "$archive" "$node:$FOLDER.tgz" --worker=all || fail "the checkout cannot be copied to $node"
    done
}

# The files that git knows or would: neither environments nor checkpoints.
in_checkout() {
    if [[ -n $print ]]; then
        printf '(cd %q && git ls-files -z --cached --others --exclude-standard |' "$ROOT" >&3
        printf ' %q' "$@" >&3
        printf ')\n' >&3
    else
        (cd -- "$ROOT" && git ls-files -z --cached --others --exclude-standard | "$@")
    fi
}

# Runs without the connection that starts it, once: a second start while it runs changes nothing.
start_line() {
    printf 'mkdir -p %s && tar -xzf %s.tgz -C %s && cd %s && ' "$FOLDER" "$FOLDER" "$FOLDER" "$FOLDER"
    printf '{ kill -0 "$(cat train.pid 2>/dev/null)" 2>/dev/null || { rm -f train.status; nohup setsid bash -c %q' \
        "trap : TERM; $(python_line); $(quoted "${own[@]}"); echo \$? >train.status"
    printf ' >train.log 2>&1 </dev/null & echo $! >train.pid; }; }'
}

# Ubuntu 22.04, which TPU VMs run, has Python 3.10.
python_line() {
    printf 'python3 -c "import sys; sys.exit(sys.version_info < (3, 11))" || { %s; }' \
        'sudo add-apt-repository -y ppa:deadsnakes/ppa && sudo apt-get install -y python3.12 python3.12-venv'
}

quoted() { printf '%q ' "$@"; }

# Prints worker 0's log until the run ends, and returns its exit status; $LOST where the TPU is gone.
follow_to_the_end() {
    local answer refused=0 lines=+1
    while true; do
        on_worker_0 "cd $FOLDER && tail -n $lines --pid=\"\$(cat train.pid)\" -F train.log 2>/dev/null" || true
        answer=$(status_of_run) || answer=unreachable
        case $answer in
            0) return 0 ;;
            unreachable) ((++refused < RETRIES)) || fail "worker 0 of $name cannot be reached; try: scripts/tpu.sh logs $name" ;;
            "") lines=0 refused=0 ;; # it is still running: the connection was lost, and only what is new is of interest
        esac
        [[ -z $answer ]] || sleep "$PAUSE" # a preemption takes a moment to show
        is_lost && return "$LOST"
        [[ ! $answer =~ ^[0-9]+$ ]] || return "$answer"
    done
}

# The exit status of the run; nothing while it runs.
status_of_run() {
    [[ -z $print ]] || echo 0
    on_worker_0 "cd $FOLDER && { cat train.status 2>/dev/null || kill -0 \"\$(cat train.pid)\" || echo 1; }"
}

is_lost() {
    case $(state_now) in
        ACTIVE | PROVISIONING | UNKNOWN) return 1 ;;
    esac
}

logs() { on_worker_0 "tail -n 100 -F $FOLDER/train.log"; }

stop() {
    # The group: the trainer, and the shell around it, which waits for it.
    on_workers all "kill -TERM -- -\"\$(cat $FOLDER/train.pid)\"" || fail "the workers of $name cannot be reached"
    say "$name: every worker saves and ends; scripts/tpu.sh logs $name shows it"
}

delete() {
    queued delete "$name" --force --quiet
    rm -f -- "$record"
}

nodes() {
    local i
    if ((slices == 1)); then
        echo "$name"
    else
        for ((i = 0; i < slices; i++)); do echo "$name-$i"; done
    fi
}

on_workers() {
    local node
    for node in $(nodes); do
        again tpu_vm ssh "$node" --worker="$1" --quiet --command="$2" || return
    done
}

on_worker_0() { tpu_vm ssh "$(nodes | head -n 1)" --worker=0 --quiet --command="$1"; }

# gcloud reaches several workers at once through an agent alone.
ssh_agent() {
    [[ -z ${SSH_AUTH_SOCK:-} ]] && command -v ssh-agent >/dev/null || return 0
    eval "$(ssh-agent -s)" >/dev/null
    trap 'kill "$SSH_AGENT_PID"' EXIT
    [[ ! -e $HOME/.ssh/google_compute_engine ]] || ssh-add -q "$HOME/.ssh/google_compute_engine" || true
}

queued() { run gcloud compute tpus queued-resources "$@" "${where[@]}"; }

tpu_vm() { run gcloud compute tpus tpu-vm "$@" "${where[@]}"; }

run() {
    if [[ -n $print ]]; then
        quoted "$@" >&3
        echo >&3
    else
        "$@"
    fi
}

# A worker that has just come up refuses its first connections.
again() {
    local tried=0
    until "$@"; do
        ((++tried < RETRIES)) || return 1
        say "trying again in $PAUSE s"
        sleep "$PAUSE"
    done
}

fail() {
    say "$@"
    exit 1
}

exec 3>&1 # what --print prints, from within $( ) as well
main "$@"
