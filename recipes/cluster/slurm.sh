#!/bin/bash
#SBATCH --job-name=kdpkit
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# sbatch recipes/cluster/slurm.sh python recipes/multi_worker.py --data mnist
# recipes/cluster/README.md explains every line.

state="${STATE_DIRECTORY:-$PWD/state-$SLURM_JOB_ID}"
for attempt in 1 2 3; do
  srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
    --kill-on-bad-exit=0 --wait=120 "$@" --resume "$state"
  code=$?
  if [ $code -eq 0 ]; then exit 0; fi
  if [ $code -eq 42 ]; then
    scontrol requeue "$SLURM_JOB_ID"
    exit 42
  fi
  echo "Attempt $attempt of 3 ended with exit code $code." >&2
done
exit $code
