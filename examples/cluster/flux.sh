#!/bin/sh
# Train on the hosts of a Flux job:
#
#   flux batch --nodes 2 --exclusive -t 1h examples/cluster/flux.sh train.py --epochs 3
#
# RANKS is the number of ranks on each host, 4 if it is not set: as many as GPUs. A job takes over
# the environment of the shell that submits it, so activate your virtual environment first.
set -eu

# A batch script runs in a new Flux instance, whose hosts are the hosts of the job. Ranks on other
# hosts start over ssh.
hosts=$(flux hostlist --expand --delimiter=, instance)
exec shardwise run -H "$hosts" --nproc-per-node "${RANKS:-4}" "$@"

# Or by Flux itself, which needs no ssh; its tasks are the ranks. This is its mpiexec.
# exec flux run --nodes="$(flux hostlist --count instance)" --exclusive \
#     --tasks-per-node="${RANKS:-4}" python "$@"
