#!/bin/sh
# Train on the hosts of a PBS job (OpenPBS, PBS Pro):
#
#   qsub -l select=2:ncpus=32:ngpus=4:mpiprocs=4 \
#       -v VENV="$VIRTUAL_ENV",TRAIN="train.py --epochs 3" examples/cluster/pbs.sh
#
# `mpiprocs` is the number of ranks on each host: ask for as many as GPUs. PBS passes no arguments
# to a script, so TRAIN holds the training script with its arguments, and flags such as --zero 3 in
# front of it. With Torque: qsub -l nodes=2:ppn=4.
#PBS -N shardwise
#PBS -l walltime=01:00:00
#PBS -j oe
set -eu

# A job starts in the home directory, with the PATH of a login.
cd "$PBS_O_WORKDIR"
. "$VENV/bin/activate"

# PBS_NODEFILE lists the hosts, once per slot. Ranks on other hosts start over ssh.
# TRAIN is not quoted, so that its words become arguments.
exec shardwise run $TRAIN

# Or by MPI, whose mpiexec reads PBS_NODEFILE. On Cray systems (Polaris, Aurora) mpiexec is PALS,
# which also takes the number of ranks on each host: --ppn 4.
# exec mpiexec -n "$(wc -l <"$PBS_NODEFILE")" python $TRAIN
