"""Reads a rank's identity from the variables of schedulers that start ranks themselves.

Flux        FLUX_TASK_RANK, FLUX_JOB_SIZE         flux run (flux-core: src/shell/shell.c)
LSF         JSM_NAMESPACE_*                       jsrun (IBM's JSM)
            LSF_PM_TASKID, LSB_DJOB_NUMPROC       blaunch on all slots of the job
PALS        PALS_RANKID, PMI_SIZE                 mpiexec of HPE Cray (pals.h): Polaris, Aurora
HTCondor    _CONDOR_PROCNO, _CONDOR_NPROCS        parallel universe (parallel_proc.cpp)

slurm.py reads Slurm's variables. Grid Engine, OAR and Cobalt do not start ranks. PBS starts ranks
with pbsdsh, but does not tell them how many ranks there are (see signs.py).
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
    # The namespace is the index of the step within its job.
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
    """Read the variables of jsrun or blaunch."""
    identity = JSRUN.read(environ)
    if identity is not None:  # tasks see only the GPUs of their resource set
        return replace(identity, own_gpus=True)
    if BLAUNCH.rank not in environ:
        return None
    # blaunch numbers its tasks from 1.
    rank = read_integer(environ, BLAUNCH.rank, BLAUNCH.launcher) - 1
    return BLAUNCH.read({**environ, BLAUNCH.rank: str(rank)})


def pals(environ: Environ) -> Identity | None:
    """Read the variables of PALS.

    Returns None for ranks of Slurm and Flux, which set some of these variables for Cray's MPI.
    """
    if PALS.rank not in environ or FLUX.rank in environ or slurm.in_step(environ):
        return None
    if "FLUX_URI" in environ and "PALS_APID" not in environ:
        return None  # a Flux batch script, which inherits some variables of an outer launcher
    names = PALS
    if PALS.local_size not in environ and "PMI_LOCAL_SIZE" in environ:
        names = replace(names, local_size="PMI_LOCAL_SIZE")
    # With --pmi=pmix, PALS does not set PMI_SIZE. pmix.py has then asked its server for the size.
    if PALS.size not in environ and "PMIX_JOB_SIZE" in environ:
        names = replace(names, size="PMIX_JOB_SIZE")
    return names.read(environ)


READERS: tuple[Reader, ...] = (FLUX.read, lsf, pals, CONDOR.read)
