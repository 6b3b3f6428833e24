#!/bin/sh
# Train on the hosts of an LSF job:
#
#   TRAIN="train.py --epochs 3" bsub -n 8 -R "span[ptile=4]" <examples/cluster/lsf.sh
#
# A slot is a rank, and `ptile` is the number of slots on each host: ask for as many as GPUs
# (-gpu "num=4"). A script on bsub's standard input gets no arguments, so TRAIN holds the training
# script with its arguments, and flags such as --zero 3 in front of it. A job takes over the
# environment of the shell that submits it, so activate your virtual environment first.
#BSUB -J shardwise
#BSUB -W 1:00
#BSUB -o shardwise.%J.log
set -eu

# LSB_DJOB_HOSTFILE lists the hosts, once per slot. Ranks on other hosts start over ssh.
# TRAIN is not quoted, so that its words become arguments.
exec shardwise run $TRAIN

# Or by MPI, whose mpiexec finds the hosts itself:
# exec mpiexec -n "$LSB_DJOB_NUMPROC" python $TRAIN
#
# Systems with jsrun (Summit, Lassen) run this script on a host without GPUs that is no host of the
# job. There jsrun starts the ranks: four of them, with a GPU and 7 cores each, on each host.
# exec jsrun --nrs 8 --rs_per_host 4 --tasks_per_rs 1 --gpu_per_rs 1 --cpu_per_rs 7 python $TRAIN
