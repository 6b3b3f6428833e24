"""Random environments: nested launchers, missing variables, contradictions.

A process must get the rank of the innermost launcher. It must never silently train alone if a world
size above 1 was given.
"""

import random
from collections.abc import Callable

import pytest

from shardwise.errors import LaunchError
from shardwise.net.launchers import detection as launcher_detection

Rank = tuple[int, int]
Environ = dict[str, str]
COUNT = 2000


def _local(rank: int, size: int, draw: random.Random) -> tuple[int, int]:
    """Return a local rank and size that `rank` of `size` may have."""
    local_size = draw.randint(1, size)
    return rank % local_size, local_size


def _with_local(rank: str, size: str, local_rank: str, local_size: str, **more: str):
    def write(who: Rank, draw: random.Random) -> Environ:
        here = _local(*who, draw)
        values = zip((rank, size, local_rank, local_size), (*who, *here), strict=True)
        return {name: str(value) for name, value in values} | more

    return write


def _plain(rank: str, size: str, **more: str):
    return lambda who, draw: {rank: str(who[0]), size: str(who[1])} | more


def _slurm(who: Rank, draw: random.Random) -> Environ:
    """Return the variables of a Slurm task: on one host, or one task per host."""
    rank, size = who
    names = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(size)}
    names |= {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(size)}
    if draw.random() < 0.5:
        names |= {"SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}
        names |= {"SLURM_STEP_TASKS_PER_NODE": str(size), "SLURM_STEP_NODELIST": "n1"}
    else:
        names |= {"SLURM_LOCALID": "0", "SLURM_NODEID": str(rank)}
        names |= {"SLURM_STEP_TASKS_PER_NODE": f"1(x{size})"}
        names |= {"SLURM_STEP_NODELIST": f"n[1-{size}]"}
    if draw.random() < 0.3:
        names |= {"PMI_RANK": str(rank), "PMI_SIZE": str(size), "PMI_FD": "9"}
    return names


def _pals(who: Rank, draw: random.Random) -> Environ:
    rank, size = map(str, who)
    here, local_size = map(str, _local(*who, draw))
    return {
        "PALS_APID": "a",
        "PALS_RANKID": rank,
        "PALS_LOCAL_RANKID": here,
        "PALS_LOCAL_SIZE": local_size,
        "PMI_RANK": rank,
        "PMI_SIZE": size,
    }


def _jsrun(who: Rank, draw: random.Random) -> Environ:
    here = _local(*who, draw)
    values = dict(zip(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), (*who, *here), strict=True))
    names = {f"JSM_NAMESPACE_{name}": str(value) for name, value in values.items()}
    if draw.random() < 0.5:
        names |= {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}
    return names | {"LSB_JOBID": "1", "PMIX_NAMESPACE": "3", "PMIX_RANK": str(who[0])}


def _sagemaker(who: Rank, draw: random.Random) -> Environ:
    names = ",".join(f'"algo-{number}"' for number in range(who[1]))
    return {"SM_HOSTS": f"[{names}]", "SM_CURRENT_HOST": f"algo-{who[0]}"}


LAYERS: tuple[tuple[Callable[[Rank, random.Random], Environ], ...], ...] = (
    # from the outside in, as they are nested
    (
        _sagemaker,
        _plain("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", SKYPILOT_NODE_IPS="10.0.0.1"),
        _plain("PET_NODE_RANK", "PET_NNODES", PET_MASTER_ADDR="a", PET_MASTER_PORT="1"),
        _plain("AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES"),
        _plain("RANK", "WORLD_SIZE", MASTER_ADDR="n1", MASTER_PORT="29500"),
    ),
    (
        _slurm,
        _pals,
        _jsrun,
        _plain("FLUX_TASK_RANK", "FLUX_JOB_SIZE", FLUX_JOB_ID="f"),
        _plain("_CONDOR_PROCNO", "_CONDOR_NPROCS"),
    ),
    (
        _with_local(
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
            PMIX_NAMESPACE="prterun-n1-1@1",
        ),
        _with_local("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", PMI_FD="8"),
        _with_local(
            "MV2_COMM_WORLD_RANK",
            "MV2_COMM_WORLD_SIZE",
            "MV2_COMM_WORLD_LOCAL_RANK",
            "MV2_COMM_WORLD_LOCAL_SIZE",
        ),
    ),
    (
        _with_local(
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            MASTER_ADDR="n1",
            MASTER_PORT="29500",
        ),
        _with_local("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    ),
)

NOISE = {"PATH": "/bin", "OMP_NUM_THREADS": "4", "PAGE_SIZE": "4096", "SLURM_ARRAY_TASK_ID": "3"}


def drawn(seed: int) -> tuple[Environ, list[Rank], str]:
    """Return an environment, the ranks that its launchers gave, innermost last, and the
    change that was made to it."""
    draw = random.Random(seed)
    environ, ranks = dict(draw.sample(sorted(NOISE.items()), draw.randint(0, 4))), []
    for layer in LAYERS:
        if draw.random() < 0.45:
            size = draw.choice((1, 2, 2, 3, 4, 8))
            ranks.append((draw.randrange(size), size))
            environ |= draw.choice(layer)(ranks[-1], draw)
    done = draw.choice(("nothing", "drop", "change", "garbage"))
    names = sorted(environ.keys() - NOISE.keys())
    if done != "nothing" and names:
        name = draw.choice(names)
        if done == "drop":
            del environ[name]
        else:
            environ[name] = "x[" if done == "garbage" else str(draw.randrange(9))
        done = f"{done} {name}"
    return environ, ranks, done


@pytest.mark.parametrize("first", range(0, COUNT, 500))
def test_random_environment_gives_right_rank_or_error(first: int) -> None:
    read = refused = 0
    for seed in range(first, first + 500):
        environ, ranks, done = drawn(seed)
        try:
            found = launcher_detection.detect(environ)
        except LaunchError:
            refused += 1
            # One process of an inner launcher on each of several hosts is alone, too.
            lonely = ranks and ranks[-1][1] == 1 and any(size > 1 for _, size in ranks)
            assert done != "nothing" or lonely, (seed, environ)
            continue
        read += 1
        was = (found.rank, found.size)
        if done == "nothing":
            assert was == (ranks[-1] if ranks else (0, 1)), (seed, environ)
        if found.launcher == "python":
            assert all(size == 1 for _, size in ranks), (seed, done, environ)
        elif not done.startswith("change"):  # another number that can be is nobody's to see
            assert was == ranks[-1], (seed, done, environ)
    assert read > 200
    assert refused > 50
