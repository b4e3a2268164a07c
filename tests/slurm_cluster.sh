#!/bin/bash
# Run a command on a SLURM cluster of two nodes: real daemons, on this machine.
#
#     unshare --mount --net --uts --pid --fork --kill-child --mount-proc \
#       tests/slurm_cluster.sh DIRECTORY COMMAND...
#
# As root, with Debian's slurm-wlm and munge, and the absolute path of an empty directory, which gets
# the logs. The nodes, n1 and n2, have a network namespace each. When the command has ended, nothing
# else is left.
set -eu
directory=$1
shift

# The network.
hostname n1
ip link set lo up
ip link add to-n2 type veth peer name to-n1
mkfifo "$directory/ready"
unshare --net --uts bash -c "hostname n2; echo > '$directory/ready'; exec sleep infinity" &
namespace_of_n2=$!
on_n2() { nsenter --target $namespace_of_n2 --net --uts "$@"; }
read -r < "$directory/ready"
ip link set to-n1 netns $namespace_of_n2
ip address add 10.77.0.1/24 dev to-n2
ip link set to-n2 up
on_n2 ip address add 10.77.0.2/24 dev to-n1
on_n2 ip link set lo up
on_n2 ip link set to-n1 up
printf '127.0.0.1 localhost\n10.77.0.1 n1\n10.77.0.2 n2\n' > "$directory/hosts"
mount --bind "$directory/hosts" /etc/hosts

# The daemons.
head --bytes=128 /dev/urandom > "$directory/key"
chmod 600 "$directory/key"
munged --force --socket="$directory/munge" --key-file="$directory/key" \
  --pid-file="$directory/munged.pid" --log-file="$directory/munged.log" \
  --seed-file="$directory/munged.seed"
cat > "$directory/slurm.conf" <<CONFIGURATION
ClusterName=two
SlurmctldHost=n1
SlurmUser=root
AuthInfo=socket=$directory/munge
StateSaveLocation=$directory/controller
SlurmdSpoolDir=$directory/%n
SlurmctldPidFile=$directory/controller.pid
SlurmdPidFile=$directory/%n.pid
SlurmctldLogFile=$directory/controller.log
SlurmdLogFile=$directory/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
NodeName=n[1-2] CPUs=2
PartitionName=all Nodes=n[1-2] Default=YES OverSubscribe=FORCE:2
CONFIGURATION
export SLURM_CONF="$directory/slurm.conf"
mkdir "$directory/controller" "$directory/n1" "$directory/n2"
slurmctld
slurmd -N n1
on_n2 slurmd -N n2
for _ in {1..100}; do
  if [ "$(sinfo --noheader --states=idle --format=%D 2>&1)" = 2 ]; then break; fi
  sleep 0.2
done

"$@"
