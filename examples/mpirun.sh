#!/bin/sh
# Train by mpirun, of Open MPI or of MPICH:
#
#   examples/mpirun.sh 4 train.py --epochs 3                      # four ranks on this host
#   HOSTFILE=hosts examples/mpirun.sh 8 train.py --epochs 3       # on the hosts in a file
#
# mpirun only starts the processes; mpi4py is not needed. Over several hosts they find rank 0 by a
# note in the working directory, if the hosts share it. If they do not, or with MPICH, say where
# rank 0 may listen: SHARDWISE_RENDEZVOUS=node1:29500, node1 being the first host of the file.
set -eu
ranks=$1
shift

if mpirun --version | grep -q "Open MPI"; then
    # ranks have threads, so they are not bound to one core; variables go along only by name
    set -- --bind-to none -x PATH ${SHARDWISE_RENDEZVOUS:+-x SHARDWISE_RENDEZVOUS} -- python "$@"
    set -- ${HOSTFILE:+--hostfile "$HOSTFILE"} "$@"
else
    set -- ${HOSTFILE:+-f "$HOSTFILE"} python "$@"
fi
exec mpirun -n "$ranks" "$@"
