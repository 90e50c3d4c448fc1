#!/usr/bin/env bash
# From an empty folder to the final numbers: check the machine, validate, then dry run and training of each stage, evaluate.
#
#     launch/pipeline.sh runs/burgers1d accelerate_configs/2gpu.yaml [--tasks ns2d --compile ...]
#
# Further flags go to the operator, whose tasks and data the later stages take over; those of the machine (--compile,
# --wandb, ..) to every stage. RUN/STAGE.yaml, where it exists, configures one (--config). Run the same command again
# to go on: a stage resumes, or says that it is finished. Stops at the first failure, with its exit code.
# A stage that dies while it trains (a lost machine, no memory) is started again, at most RESTARTS times.
#
# Several machines on one shared file system: the same command on each, with MACHINES, MACHINE_RANK, MAIN_IP,
# MAIN_PORT and PROCESSES (of all machines) set. All begin at the first step again when one is lost, so they meet.
set -u

if [ $# -lt 1 ] || [ "${1#-}" != "$1" ]; then
    echo "usage: launch/pipeline.sh RUN [accelerate config] [flags of the stages]" >&2
    exit 2
fi
run=$1 config=accelerate_configs/1gpu.yaml
shift
case ${1:-} in *.yaml | *.yml) config=$1 && shift ;; esac
flags=("$@") machine=() data=() about=()
while [ $# -gt 0 ]; do
    flag=${1%%=*} values=()
    [ "$flag" = "$1" ] || values=("${1#*=}")
    shift
    while [ $# -gt 0 ] && [ "${1#--}" = "$1" ]; do values+=("$1") && shift; done
    case $flag in
        --data) data=("${values[@]}") ;;
        --tasks | --axes | --facts) about+=("$flag" "${values[@]}") ;;
    esac
    case $flag in
        --compile | --data | --cache | --workers | --keep | --timeout | --wandb)
            machine+=("$flag" ${values[@]+"${values[@]}"}) ;;
    esac
done
launch=(accelerate launch --config_file "$config")
if [ -n "${MACHINE_RANK:-}" ]; then
    launch+=(--num_machines "$MACHINES" --machine_rank "$MACHINE_RANK" --num_processes "$PROCESSES"
             --main_process_ip "$MAIN_IP" --main_process_port "$MAIN_PORT")
fi
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120} # seconds to write the last checkpoint
mkdir -p "$run"

# A session of its own: a signal comes to the launcher once, from here, and it passes it on to the processes.
child=
trap '[ -z "$child" ] || kill -TERM "$child"; stopped=1' TERM INT USR1
stopped=
step() {
    echo "==> $*"
    setsid "$@" &
    child=$!
    wait "$child"
    local code=$?
    while kill -0 "$child" 2>/dev/null; do # a signal ended the wait, not the child
        wait "$child"
        code=$?
    done
    for _ in $(seq "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT"); do # a launcher of one process does not wait for it
        pgrep -s "$child" >/dev/null || break
        sleep 1
    done
    child=
    [ -n "$stopped" ] && code=143
    return "$code"
}

status() { # of a stage: done, failed, stopped, out_of_memory, or nothing
    [ ! -f "$run/$1/exit.json" ] || sed -n 's/.*"status": "\([a-z_]*\)".*/\1/p' "$run/$1/exit.json"
}

validate() { # again only where a file is new; data that are to be made are not there yet
    local source=("${data[@]-data}") newer=()
    [ ! -f "$run/.validated" ] || newer=(-newer "$run/.validated")
    [ -n "$(find -L "${source[@]}" -type f ${newer[@]+"${newer[@]}"} -print -quit 2>/dev/null)" ] || return 0
    [ ${#data[@]} -gt 0 ] || about=()
    step python -m ups.data validate "${source[@]}" ${about[@]+"${about[@]}"} && touch "$run/.validated"
}

stage() {
    local name=$1 script=train_$1.py args=(--run "$run")
    [ "$name" = operator ] && args+=(${flags[@]+"${flags[@]}"}) || args+=(${machine[@]+"${machine[@]}"})
    [ -f "$script" ] || return 0
    [ -f "$run/$name.yaml" ] && args+=(--config "$run/$name.yaml")
    if [ ! -d "$run/$name/checkpoints" ]; then
        step "${launch[@]}" "$script" "${args[@]}" --dry_run || return
    fi
    local before
    before=$(cat "$run/$name/.lock" 2>/dev/null)
    step "${launch[@]}" "$script" "${args[@]}" && return
    local code=$?
    [ "$(cat "$run/$name/.lock" 2>/dev/null)" = "$before" ] && return "$code" # it did not begin to train
    case $(status "$name") in
        stopped) return 143 ;;
        failed | out_of_memory | "") again=1 ;; # "": killed, all of it
    esac
    return "$code"
}

pipeline() {
    step "${launch[@]}" -m launch.check_machine || return
    validate || return
    for name in operator ensemble diffusion consistency; do stage "$name" || return; done
    [ ! -f evaluate.py ] || step "${launch[@]}" evaluate.py --run "$run"
}

for attempt in $(seq 0 "${RESTARTS:-3}"); do
    [ "$attempt" -eq 0 ] || echo "==> restart $attempt" >&2
    again=
    pipeline && exit
    code=$?
    [ -n "$again" ] && [ -z "$stopped" ] || exit "$code"
done
exit "$code"
