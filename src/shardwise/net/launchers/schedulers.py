"""Reads who a rank is from the variables of schedulers that start ranks themselves.

Flux        FLUX_TASK_RANK, FLUX_JOB_SIZE         flux run (flux-core: src/shell/shell.c)
LSF         JSM_NAMESPACE_*                       jsrun (IBM's JSM)
            LSF_PM_TASKID, LSB_DJOB_NUMPROC       blaunch on all slots of the job
PALS        PALS_RANKID, PMI_SIZE                 mpiexec of HPE Cray (pals.h): Polaris, Aurora
HTCondor    _CONDOR_PROCNO, _CONDOR_NPROCS        parallel universe (parallel_proc.cpp)

slurm.py reads Slurm's variables, and starts ranks by srun. Grid Engine, OAR and Cobalt start no
ranks. PBS does, by pbsdsh, and does not tell them of how many they are (see signs.py).
"""

from dataclasses import replace

from shardwise.net.identity import Identity, read_integer
from shardwise.net.launchers import slurm
from shardwise.net.launchers.variables import Environ, RankVariables, Reader

# Flux removes both variables from batch scripts.
FLUX = RankVariables(
    launcher="Flux", rank="FLUX_TASK_RANK", size="FLUX_JOB_SIZE", job=("FLUX_JOB_ID",)
)

JSRUN = RankVariables(
    launcher="LSF",
    rank="JSM_NAMESPACE_RANK",
    size="JSM_NAMESPACE_SIZE",
    local_rank="JSM_NAMESPACE_LOCAL_RANK",
    local_size="JSM_NAMESPACE_LOCAL_SIZE",
    # The namespace is the number of the step in its job.
    job=("LSB_JOBID", "PMIX_NAMESPACE"),
)

BLAUNCH = RankVariables(
    launcher="LSF", rank="LSF_PM_TASKID", size="LSB_DJOB_NUMPROC", job=("LSB_JOBID",)
)

PALS = RankVariables(
    launcher="PALS",
    rank="PALS_RANKID",
    size="PMI_SIZE",
    local_rank="PALS_LOCAL_RANKID",
    local_size="PALS_LOCAL_SIZE",
    node="PALS_NODEID",
    job=("PALS_APID",),
)

CONDOR = RankVariables(launcher="HTCondor", rank="_CONDOR_PROCNO", size="_CONDOR_NPROCS")


def lsf(environ: Environ) -> Identity | None:
    """Read what jsrun gave a task, or blaunch, which counts from 1."""
    identity = JSRUN.read(environ)
    if identity is not None:  # a resource set of jsrun shows its tasks their own GPUs
        return replace(identity, own_gpus=True)
    if BLAUNCH.rank not in environ:
        return None
    rank = read_integer(environ, BLAUNCH.rank, BLAUNCH.launcher) - 1
    return BLAUNCH.read({**environ, BLAUNCH.rank: str(rank)})


def pals(environ: Environ) -> Identity | None:
    """Read what PALS gave a rank.

    Slurm and Flux set variables of PALS for Cray's MPI, some of them without PMI_SIZE. PALS itself
    leaves PMI_SIZE out with --pmi=pmix: then its server is asked (see pmix.py).
    """
    if PALS.rank not in environ or FLUX.rank in environ or slurm.in_step(environ):
        return None
    if "FLUX_URI" in environ and "PALS_APID" not in environ:
        return None  # a batch script of Flux, into which some of an outer launch's variables leak
    names = PALS
    if PALS.local_size not in environ and "PMI_LOCAL_SIZE" in environ:
        names = replace(names, local_size="PMI_LOCAL_SIZE")
    if PALS.size not in environ and "PMIX_JOB_SIZE" in environ:  # the answer of its server
        names = replace(names, size="PMIX_JOB_SIZE")
    return names.read(environ)


READERS: tuple[Reader, ...] = (FLUX.read, lsf, pals, CONDOR.read)
