#!/bin/sh
# Train on the hosts of a Grid Engine job:
#
#   qsub -pe mpi 8 -v VENV="$VIRTUAL_ENV" examples/cluster/grid_engine.sh train.py --epochs 3
#
# A slot is a rank: ask for as many as GPUs. `mpi` is the name of a parallel environment, and
# `qconf -spl` lists the names on your cluster. It needs `control_slaves TRUE`, and its
# allocation_rule spreads the slots over hosts. Settings are flags in front of the script, such as
# --zero 3.
#$ -S /bin/sh
#$ -N shardwise
#$ -cwd
#$ -j y
#$ -l h_rt=01:00:00
set -eu

# Grid Engine starts a login shell, whose profile sets PATH: activate the environment here.
. "$VENV/bin/activate"

# PE_HOSTFILE lists the hosts and their slots. shardwise run starts the ranks on the other hosts by
# `qrsh -inherit`, under Grid Engine's control: it needs no ssh keys, accounts their usage, and ends
# them with the job. `--ssh ssh` would use ssh.
exec shardwise run "$@"

# Or by MPI. Open MPI and MPICH read PE_HOSTFILE too, and start their ranks by qrsh. --bind-to none
# lets a rank's threads have more than one core; with MPICH leave it out.
# exec mpirun -n "$NSLOTS" --bind-to none python "$@"
