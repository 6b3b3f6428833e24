"""Readers of the variables that other launchers set for their ranks.

detection.py   the table of all launchers
variables.py   reads an Identity, given the names of a launcher's variables
mpi.py         Open MPI, MPICH, Intel MPI, MVAPICH, PMI
pmix.py        asks a PMIx server: PRRTE, PALS with --pmi=pmix
slurm.py       Slurm, and starting ranks by srun
schedulers.py  Flux, LSF, PALS, HTCondor
platforms.py   services that start one process per host: SageMaker, SkyPilot, Kubernetes
signs.py       signs that a process is one of several, under a launcher that we cannot read
processes.py   the processes above and below this one
"""
