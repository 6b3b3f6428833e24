"""Reads a rank's identity from the variables that other launchers set.

detection.py   the table of all launchers
variables.py   reads an Identity, given the names of a launcher's variables
mpi.py         Open MPI, MPICH, Intel MPI, MVAPICH, PMI
pmix.py        asks a PMIx server: PRRTE, PALS with --pmi=pmix
slurm.py       Slurm; starts ranks through srun
schedulers.py  Flux, LSF, PALS, HTCondor
platforms.py   services that start one process per host: SageMaker, SkyPilot, Kubernetes
signs.py       detects processes of launchers that are not supported
processes.py   lists the ancestors and children of a process
"""
