"""Readers of the variables that other launchers set, and the signs of a launcher nobody can read.

variables.py   reads an Identity by the names of a launcher's variables
mpi.py         Open MPI, MPICH, Intel MPI, MVAPICH, PALS, PMIx
pmix.py        asks a PMIx server: PRRTE, PALS with --pmi=pmix
schedulers.py  Flux, LSF, ALPS, PBS, HTCondor (Slurm: net/launchers/slurm.py)
platforms.py   services that start one process on each host: SageMaker, SkyPilot, Kubernetes
signs.py       what suggests that a process is one of several

`net/launchers/detection.py` has the table of all of them.
"""
