#!/usr/bin/env bash
# Trains on Cloud TPUs from this machine: creates them, copies this checkout, trains on every worker, restarts after
# a preemption, deletes. Needs gcloud, logged in, and a bucket: the workers of a pod share no disk.
#
#   scripts/tpu.sh create NAME type=v5litepod-16 [slices=2] [spot=true] [version=RUNTIME]
#   scripts/tpu.sh train  NAME [PRESET] out=gs://BUCKET/RUN [key=value ...]    by scripts/train_shakespeare.sh
#   scripts/tpu.sh train  NAME -- COMMAND ...                                  or by a command of your own
#   scripts/tpu.sh logs   NAME       follows the log of worker 0
#   scripts/tpu.sh stop   NAME       the run saves and ends; train resumes it
#   scripts/tpu.sh delete NAME
#
# Each takes zone=ZONE and project=PROJECT; the defaults are those of gcloud. --print before a command prints the
# commands instead of running them, as if every answer were a good one.
#
#   RETRIES=10 PAUSE=30    attempts after a refused connection, and the seconds between them
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
    [[ $command == create || $command == delete || -n $print ]] || add_key_to_agent
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
            *) die "$command does not take '$word'; see scripts/tpu.sh" ;;
        esac
    done
    [[ -z $zone && -z $project ]] || where=(${zone:+--zone="$zone"} ${project:+--project="$project"})
}

# Records the request, so that the same TPU is created again after a preemption.
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
    say "$name is ready; train with: scripts/tpu.sh train $name out=gs://BUCKET/RUN"
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

# Waits until the request is ACTIVE, for days if there is no capacity; returns 1 for a request that has ended.
wait_until_active() {
    local state before="" unknown=0
    while true; do
        state=$(state_now)
        case $state in
            ACTIVE) return 0 ;;
            FAILED)
                report_failure
                return 1
                ;;
            SUSPENDING | SUSPENDED | NOT_FOUND) return 1 ;;
            UNKNOWN) ((++unknown < RETRIES)) || fail "gcloud fails with the message above" ;;
        esac
        [[ $state == "$before" ]] || say "$name: $state"
        before=$state
        sleep "$PAUSE"
    done
}

report_failure() {
    say "$name: FAILED: $(ask queued describe "$name" "--format=value(state.failedData.error.message)")"
}

# Prints ACTIVE if every slice is READY, else the state of the request; NOT_FOUND; or UNKNOWN if gcloud itself failed.
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
        on_workers all "$(start_line)" || fail_for_workers "the run did not start on every worker of $name"
        status=0
        follow_to_the_end || status=$?
        ((status == LOST)) || exit "$status"
        say "$name was preempted; the run resumes from its newest checkpoint"
    done
}

LOST=200 # the TPU is gone

make_ready() {
    local state tried=0
    while true; do
        state=$(settled_state)
        case $state in
            ACTIVE) return ;;
            FAILED | SUSPENDED)
                [[ $state == SUSPENDED ]] || report_failure
                say "$name is gone; creating it again"
                queued delete "$name" --force --quiet || true
                request || true
                ;;
            NOT_FOUND)
                [[ -n $type ]] || fail "$name does not exist; create it: scripts/tpu.sh create $name type=ACCELERATOR"
                request || true
                ;;
        esac
        wait_until_active && return
        ((++tried < RETRIES)) || fail "$name could not be created in $RETRIES attempts"
        sleep "$PAUSE"
    done
}

# Prints the state once the request is neither suspending nor being deleted: before, it can be neither deleted nor made.
settled_state() {
    local state before=""
    while true; do
        state=$(state_now)
        [[ $state == SUSPENDING || $state == DELETING ]] || break
        [[ $state == "$before" ]] || say "$name: $state; waiting for its end"
        before=$state
        sleep "$PAUSE"
    done
    echo "$state"
}

copy_checkout() {
    local archive=$ROOT/.tpu/checkout.tgz node
    [[ -n $print ]] || mkdir -p "$ROOT/.tpu"
    in_checkout tar --null --files-from=- --ignore-failed-read -czf "$archive"
    for node in $(nodes); do
        again tpu_vm scp "$archive" "$node:$FOLDER.tgz" --worker=all ||
            fail_for_workers "the checkout cannot be copied to $node"
    done
}

# Gives a command the files that git tracks or would track, so neither environments nor checkpoints.
in_checkout() {
    if [[ -n $print ]]; then
        printf '(cd %q && git ls-files -z --cached --others --exclude-standard |' "$ROOT" >&3
        printf ' %q' "$@" >&3
        printf ')\n' >&3
    else
        (cd -- "$ROOT" && git ls-files -z --cached --others --exclude-standard | "$@")
    fi
}

# Prints the command that starts the run without the connection that starts it. It neither starts a second run nor
# replaces the code of a running one.
start_line() {
    printf 'mkdir -p %s && cd %s && { ' "$FOLDER" "$FOLDER"
    printf '{ kill -0 "$(cat train.pid 2>/dev/null)" 2>/dev/null && echo %q; } || ' \
        "a run is in progress here: it keeps its code and its arguments, and this train follows it"
    printf '{ tar -xzf ../%s.tgz && rm -f train.status && { nohup setsid bash -c %q' "$FOLDER" \
        "trap : TERM; $(python_line); $(quoted "${own[@]}"); echo \$? >train.status"
    printf ' >train.log 2>&1 </dev/null & echo $! >train.pid; }; }; }'
}

# Prints a command that installs Python where it is older than 3.11, as on the Ubuntu 22.04 of TPU VMs.
python_line() {
    # A fresh VM updates itself meanwhile: installing waits for the lock of dpkg, and updating is repeated.
    local apt="sudo apt-get -o DPkg::Lock::Timeout=600"
    printf 'python3 -c "import sys; sys.exit(sys.version_info < (3, 11))" || { %s && %s && %s; }' \
        "sudo add-apt-repository -y --no-update ppa:deadsnakes/ppa" \
        "{ for i in {1..60}; do $apt update && break; sleep 10; done; }" \
        "$apt install -y python3.12 python3.12-venv"
}

quoted() { printf '%q ' "$@"; }

# Prints worker 0's log until the run ends, and returns its exit status, or $LOST if the TPU is gone.
follow_to_the_end() {
    local answer refused=0 lines=+1
    while true; do
        on_worker_0 "cd $FOLDER && tail -n $lines --pid=\"\$(cat train.pid)\" -F train.log 2>/dev/null" || true
        answer=$(status_of_run) || answer=unreachable
        case $answer in
            0) return 0 ;;
            unreachable) ((++refused < RETRIES)) || fail "worker 0 of $name cannot be reached; try: scripts/tpu.sh logs $name" ;;
            "") lines=0 refused=0 ;; # a lost connection does not end the run; only new lines are printed
        esac
        [[ -z $answer ]] || sleep "$PAUSE" # a preemption takes a moment to show
        is_lost && return "$LOST"
        [[ $answer != gone ]] || fail "the processes of the run on worker 0 of $name are gone and left no exit status:" \
            "they were killed, or the machine restarted; the log ends with: scripts/tpu.sh logs $name; to resume: train"
        [[ ! $answer =~ ^[0-9]+$ ]] || return "$answer"
    done
}

# Prints the exit status of the run, nothing while it runs, or gone for a run that ended without a status.
status_of_run() {
    [[ -z $print ]] || echo 0
    local written="cat train.status 2>/dev/null" running="kill -0 \"\$(cat train.pid)\" 2>/dev/null"
    on_worker_0 "cd $FOLDER && { $written || $running || $written || echo gone; }"
}

is_lost() {
    case $(state_now) in
        ACTIVE | PROVISIONING | UNKNOWN) return 1 ;;
    esac
}

logs() { on_worker_0 "tail -n 100 -F $FOLDER/train.log"; }

stop() {
    # The signal reaches the group: the trainer and the shell that waits for it.
    on_workers all "kill -TERM -- -\"\$(cat $FOLDER/train.pid)\"" ||
        fail_for_workers "the run was not stopped on every worker of $name"
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

# Ends with a message that names the workers that cannot be reached.
fail_for_workers() {
    local node addresses address worker unreachable=""
    for node in $(nodes); do
        addresses=$(ask tpu_vm describe "$node" "--format=value(networkEndpoints[].ipAddress)")
        worker=0
        for address in ${addresses//[;,]/ }; do
            tpu_vm ssh "$node" --worker="$worker" --quiet --command=true >/dev/null 2>&1 ||
                unreachable="$unreachable${unreachable:+, }worker $worker of $node ($address)"
            ((++worker))
        done
    done
    fail "$1${unreachable:+; these do not answer: $unreachable}"
}

# gcloud reaches several workers at once only if its key is in an agent. It makes the key with the first connection.
add_key_to_agent() {
    local key=$HOME/.ssh/google_compute_engine
    command -v ssh-add >/dev/null || die "ssh-add is not installed, and gcloud needs it; Debian and Ubuntu: sudo apt install openssh-client"
    if [[ ! -e $key ]]; then
        mkdir -p -m 700 "$HOME/.ssh"
        ssh-keygen -q -t rsa -b 3072 -N "" -C "${USER:-$(id -un)}" -f "$key" || fail "the key $key cannot be made"
        say "made the key of gcloud: $key"
    fi
    local status=0
    ssh-add -l >/dev/null 2>&1 || status=$?
    if ((status == 2)); then # no agent; an agent without keys gives 1
        eval "$(ssh-agent -s)" >/dev/null
        trap 'kill "$SSH_AGENT_PID"' EXIT
    fi
    ssh-add -q "$key" || fail "the key $key cannot be added to the ssh agent; add it with: ssh-add $key"
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

# Repeats a command: a worker that has just started refuses its first connections.
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

exec 3>&1 # for --print, which prints from within $( ) as well
main "$@"
