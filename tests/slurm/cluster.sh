#!/usr/bin/env bash
# A Slurm of three nodes on loopback, in a folder of its own; their names stand in /etc/hosts meanwhile.
#
#     apt-get install slurmctld slurmd slurm-client munge        # as root
#     tests/slurm/cluster.sh start /tmp/slurm && export SLURM_CONF=/tmp/slurm/slurm.conf && sinfo
#     tests/slurm/cluster.sh stop /tmp/slurm
set -eu
umask 022
dir=$(realpath -m "$2")

start() {
    mkdir -p "$dir"/state "$dir"/spool
    port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
    head -c 128 /dev/urandom >"$dir/munge.key" && chmod 400 "$dir/munge.key"
    cat >"$dir/slurm.conf" <<CONF
ClusterName=loopback
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
AuthInfo=socket=$dir/munge.socket,cred_expire=10
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=1
KillWait=10
SchedulerParameters=batch_sched_delay=1,sched_interval=5
NodeName=n[1-3] NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + 3))] CPUs=1 Gres=gpu:1
PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE:4
CONF
    for node in n1 n2 n3; do echo "127.0.0.1 $node # $dir" >>/etc/hosts; done
    echo "NodeName=n[1-3] Name=gpu File=/dev/null" >"$dir/gres.conf" # of paper: the processes use the CPU
    export SLURM_CONF=$dir/slurm.conf
    munged --force --key-file="$dir/munge.key" --socket="$dir/munge.socket" \
        --pid-file="$dir/munged.pid" --log-file="$dir/munged.log" --seed-file="$dir/munge.seed"
    slurmctld -c
    for node in n1 n2 n3; do slurmd -N "$node"; done
    for _ in $(seq 60); do
        [ "$(sinfo --noheader --Node --states idle | wc -l)" = 3 ] && return
        sleep 0.5
    done
    tail "$dir"/*.log >&2
    exit 1
}

stop() {
    for pid in "$dir"/slurmd.*.pid "$dir"/slurmctld.pid "$dir"/munged.pid; do
        [ ! -s "$pid" ] || kill "$(cat "$pid")" 2>/dev/null || true
    done
    sed "\\| # $dir\$|d" /etc/hosts >"$dir/hosts" && cat "$dir/hosts" >/etc/hosts # a bind mount cannot be renamed
}

"$1"
