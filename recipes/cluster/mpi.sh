#!/bin/bash
# recipes/cluster/mpi.sh -n 2 --host gpu1,gpu2 python recipes/multi_worker.py --data mnist
# recipes/cluster/README.md explains every line.

state="${STATE_DIRECTORY:-$PWD/state}"
for attempt in 1 2 3; do
  mpirun --bind-to none --mca odls_base_sigkill_timeout 10 "$@" --resume "$state" &
  trap "stopped=1; kill -TERM $!" TERM
  wait $!
  code=$?
  while kill -0 $! 2> /dev/null; do wait $!; code=$?; done
  if [ $code -eq 0 ] || [ $code -eq 2 ] || [ -n "$stopped" ]; then exit $code; fi
  echo "Attempt $attempt of 3 ended with exit code $code." >&2
done
exit $code
