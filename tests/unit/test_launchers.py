"""The identity of a rank under each launcher, from the variables that real launchers set."""

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shardwise.errors import LaunchError
from shardwise.launch import elastic
from shardwise.net import environment, private_files, rendezvous_file
from shardwise.net.identity import Identity
from shardwise.net.launchers import detection as launcher_detection
from shardwise.net.launchers import processes, slurm
from shardwise.net.rendezvous_file import RendezvousFile
from tests.unit import launcher_environments as environments

OWN = {
    "SHARDWISE_LAUNCH_RANK": "3",
    "SHARDWISE_LAUNCH_SIZE": "4",
    "SHARDWISE_LAUNCH_LOCAL_RANK": "1",
    "SHARDWISE_LAUNCH_LOCAL_SIZE": "2",
    "SHARDWISE_LAUNCH_ADDRESS": "127.0.0.1",
    "SHARDWISE_LAUNCH_PORT": "4321",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
HOROVOD = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.9.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4242",
}
# Open MPI 4.1.4, mpirun -n 2, the second rank
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_MCA_orte_ess_node_rank": "1",
    "OMPI_MCA_orte_hnp_uri": "1573584896.0;tcp://10.9.0.1:43373",
    "PMIX_NAMESPACE": "1573584897",
    "PMIX_RANK": "1",
}
# MPICH 4.0.2, mpiexec.hydra -n 2, the second rank
HYDRA = {
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "8",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "2",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "0",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
# Slurm 22.05, srun -N2 -n3, the third task
STEP = {
    "SLURMD_NODENAME": "n2",
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NAME": "env.sh",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_TASKS_PER_NODE": "2,1",
}
# Slurm 22.05, a batch script of sbatch -N2 --ntasks-per-node=2, before any srun
BATCH = {
    "SLURMD_NODENAME": "n1",
    "SLURM_JOB_ID": "18",
    "SLURM_JOB_NAME": "b.sh",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
# The shell of salloc -N2 -n2, on the host on which the user typed it.
SALLOC = {
    "SLURM_JOB_ID": "19",
    "SLURM_JOB_NAME": "interactive",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}
IN_SALLOC = STEP | {"SLURM_JOB_NAME": "interactive"}
SHELL = STEP | {"SLURM_JOB_NAME": "bash", "SLURM_PTY_PORT": "43323", "SLURM_PROCID": "0"}

BY_HAND = {
    "SHARDWISE_RANK": "1",
    "SHARDWISE_RENDEZVOUS": "n1:29500",
    "SHARDWISE_SIZE": "4",
}
IN_POD = {"MASTER_ADDR": "train-0", "MASTER_PORT": "23456", "RANK": "0", "WORLD_SIZE": "1"}
ONE_TASK = STEP | {
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}


def with_address(identity: Identity) -> Identity:
    """Return the identity with the address in the pod's variables."""
    return replace(identity, address="train-0", port=23456)


OF_OTHERS = (
    environments.PYTORCH_JOB,
    environments.GFORKER,
    environments.PALS,
    environments.PRTERUN_ASKED,
    environments.FLUX,
    environments.JSRUN,
    environments.CONDOR,
    environments.SAGEMAKER,
    environments.SKYPILOT,
    environments.TRAIN_JOB,
    environments.AWS_BATCH,
    environments.INDEXED_JOB_OF_TWO,
)

NAME_LAUNCHER = (
    "from shardwise.net import rendezvous_file; print(rendezvous_file.name_by_process())"
)
ALONE = Identity(launcher="python")
SLURM_TASK = Identity(
    launcher="Slurm",
    rank=2,
    size=3,
    local_rank=0,
    local_size=1,
    node=1,
    address="n1",
    job="slurm 17.0 0",
)
OPENMPI_RANK = Identity(
    launcher="Open MPI",
    rank=1,
    size=2,
    local_rank=1,
    local_size=2,
    job="Open MPI 1573584896.0;tcp://10.9.0.1:43373 1573584897",
)
HYDRA_RANK = Identity(launcher="MPICH", rank=1, size=2, local_rank=1, local_size=2)
TORCHRUN_RANK = Identity(
    launcher="torchrun",
    rank=5,
    size=8,
    local_rank=1,
    local_size=4,
    node=1,
    address="node0",
    port=29500,
)


@pytest.mark.parametrize(
    ("environ", "identity"),
    [
        ({}, ALONE),
        (TORCHRUN, TORCHRUN_RANK),
        (
            HOROVOD,
            Identity(
                launcher="horovodrun",
                rank=3,
                size=4,
                local_rank=1,
                local_size=2,
                node=1,
                job="horovodrun 10.9.0.1 4242",
            ),
        ),
        (OPENMPI, OPENMPI_RANK),
        (HYDRA, HYDRA_RANK),
        (
            MVAPICH,
            Identity(launcher="MVAPICH", rank=2, size=4, local_rank=0, local_size=2),
        ),
        (STEP, SLURM_TASK),
        # a job that runs again under its old number is another run
        (
            STEP | {"SLURM_RESTART_COUNT": "1"},
            Identity(
                launcher="Slurm",
                rank=2,
                size=3,
                node=1,
                address="n1",
                job="slurm 17.0 1",
            ),
        ),
        (STEP | {"SLURM_GPUS_PER_TASK": "1"}, replace(SLURM_TASK, own_gpus=True)),
        # inside an allocation, but nobody started us to work
        (BATCH, ALONE),
        (SALLOC, ALONE),
        (SHELL, ALONE),
        (STEP | {"SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_PROCID": "0"}, ALONE),
        # srun inside salloc, and inside the shell of srun --pty
        (IN_SALLOC, SLURM_TASK),
        (
            SHELL | {"SLURM_STEP_ID": "1", "SLURM_PROCID": "2"},
            Identity(launcher="Slurm", rank=2, size=3, node=1, address="n1", job="slurm 17.1 0"),
        ),
        # srun --mpi=pmi2 sets two of Hydra's variables
        (STEP | {"PMI_RANK": "2", "PMI_SIZE": "3", "PMI_FD": "13"}, SLURM_TASK),
        # the innermost wins
        (STEP | OPENMPI, OPENMPI_RANK),
        (BATCH | TORCHRUN, TORCHRUN_RANK),
        (STEP | OPENMPI | TORCHRUN, TORCHRUN_RANK),
        (
            STEP | HYDRA | TORCHRUN | OWN,
            Identity(
                launcher="shardwise run",
                rank=3,
                size=4,
                local_rank=1,
                local_size=2,
                address="127.0.0.1",
                port=4321,
            ),
        ),
        # Hydra over the hosts of an allocation is a step itself
        (
            STEP | HYDRA | {"MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"},
            Identity(launcher="MPICH", rank=1, size=2, job="hydra in slurm 17.0 0"),
        ),
        # two of one level that agree
        (OPENMPI | HYDRA, OPENMPI_RANK),
        # a job script may say where rank 0 listens
        (
            HYDRA | {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
            Identity(
                launcher="MPICH",
                rank=1,
                size=2,
                local_rank=1,
                local_size=2,
                address="n1",
                port=29500,
            ),
        ),
    ],
)
def test_detect(environ: dict[str, str], identity: Identity) -> None:
    assert launcher_detection.detect(environ) == identity


@pytest.mark.parametrize("row", launcher_detection.LAUNCHERS, ids=lambda row: row.name)
def test_row_and_identity_name_same_launcher(row: launcher_detection.Launcher) -> None:
    environs = (OWN, TORCHRUN, HOROVOD, OPENMPI, HYDRA, MVAPICH, STEP, {}, BY_HAND, *OF_OTHERS)
    found = [who for environ in environs if (who := row.read(environ)) is not None]
    assert {who.launcher for who in found} == {row.name}, f"a table of {row.name} in environs"


RANK = {"rank": 1, "size": 4, "local_rank": 1, "local_size": 2}
"""The second of four ranks, two on each of two hosts."""

UNPLACED = {"rank": 1, "size": 4, "is_placed": False}
NODE = {"rank": 1, "size": 2, "node": 1}
"""The one process of the second of two hosts."""


@pytest.mark.parametrize(
    ("environ", "identity"),
    [
        (BY_HAND, Identity(launcher="the user", job="by hand", **UNPLACED)),
        (
            BY_HAND | {"SHARDWISE_LOCAL_RANK": "1", "SHARDWISE_LOCAL_SIZE": "2"},
            Identity(launcher="the user", job="by hand", **RANK),
        ),
        # a pod's index is a rank if the size is given
        (
            environments.INDEXED_JOB
            | {"SHARDWISE_SIZE": "4", "SHARDWISE_RENDEZVOUS": "train-0:29500"},
            Identity(launcher="the user", job="by hand", **UNPLACED),
        ),
        (
            environments.OPENMPI_5,
            replace(OPENMPI_RANK, job="Open MPI prterun-vm-6322@1"),
        ),
        (
            environments.INTEL_MPI,
            replace(HYDRA_RANK, job="MPICH 9d260000-7c26-e807-8fb4-050000430af0"),
        ),
        (environments.GFORKER, Identity(launcher="PMI", rank=1, size=2, is_placed=False)),
        (
            environments.MVAPICH_2,
            Identity(launcher="MVAPICH", job="MVAPICH node01 21874", **RANK),
        ),
        (
            environments.MVAPICH_3,
            Identity(launcher="MVAPICH", job="MVAPICH node01 21874", **RANK),
        ),
        (
            environments.PALS,
            Identity(
                launcher="PALS",
                job="PALS 0c1fdf2f-1c9d-4a2e-9d0a-6f2d2f8f1a55",
                node=0,
                **RANK,
            ),
        ),
        (
            environments.PALS_PMIX_ASKED,
            Identity(
                launcher="PALS",
                job="PALS 0c1fdf2f-1c9d-4a2e-9d0a-6f2d2f8f1a55",
                node=0,
                **RANK,
            ),
        ),
        (
            environments.PRTERUN_ASKED,
            Identity(launcher="PMIx", job="PMIx prterun-vm-6375@1", **RANK),
        ),
        # srun of a Cray sets variables of PALS as well
        (STEP | environments.SHASTA, SLURM_TASK),
        (environments.FLUX, Identity(launcher="Flux", job="Flux ƒD2e73NP", **UNPLACED)),
        (environments.JSRUN, Identity(launcher="LSF", job="LSF 4242 3", own_gpus=True, **RANK)),
        (environments.BLAUNCH, Identity(launcher="LSF", job="LSF 4242", **UNPLACED)),
        (environments.CONDOR, Identity(launcher="HTCondor", **UNPLACED)),
        (
            environments.SAGEMAKER,
            Identity(launcher="SageMaker", address="algo-1", port=29500, **NODE),
        ),
        (
            environments.SKYPILOT,
            Identity(
                launcher="SkyPilot",
                address="10.0.0.1",
                port=29500,
                job="SkyPilot sky-2023-07-06-21-18-31-563597_myclus_1",
                **NODE,
            ),
        ),
        (
            environments.PYTORCH_JOB,
            Identity(
                launcher="the environment",
                rank=1,
                size=2,
                is_placed=False,
                address="train-master-0",
                port=23456,
            ),
        ),
        (
            environments.TRAIN_JOB,
            Identity(launcher="Kubeflow", address="train-node-0-0.train", port=29400, **NODE),
        ),
        (
            environments.INDEXED_JOB_OF_TWO,
            Identity(launcher="Kubernetes", rank=1, size=2, address="train-0.train", port=29500),
        ),
        (
            environments.AWS_BATCH,
            Identity(launcher="AWS Batch", address="10.0.0.4", port=29500, **NODE),
        ),
        (
            environments.AZURE_ML,
            Identity(launcher="torchrun", address="10.0.0.4", port=6105, **UNPLACED),
        ),
        (
            environments.DEEPSPEED,
            Identity(launcher="torchrun", address="node01", port=29500, **RANK),
        ),
        # Scripts of batch jobs, array jobs and independent tasks, in which no launcher started
        # ranks.
        (environments.FLUX_BATCH, ALONE),
        (environments.LSF_BATCH, ALONE),
        (environments.PBS_BATCH, ALONE),
        (environments.TORQUE_BATCH, ALONE),
        (environments.GRID_ENGINE_BATCH, ALONE),
        (environments.GRID_ENGINE_ARRAY, ALONE),
        (environments.OAR_BATCH, ALONE),
        (environments.COBALT_BATCH, ALONE),
        (environments.GNU_PARALLEL, ALONE),
        # newer versions of Slurm number the step of a batch script
        (BATCH | {"SLURM_STEP_ID": "-5"}, ALONE),
        # the user says so
        (OPENMPI | {"SHARDWISE_ALONE": "1"}, ALONE),
        (environments.PRTERUN | {"SHARDWISE_ALONE": "1"}, ALONE),
        # a proxy of Hydra is a task of srun itself, one on each host
        (
            STEP | environments.GFORKER | {"PMI_RANK": "5", "PMI_SIZE": "6"},
            Identity(launcher="PMI", rank=5, size=6, is_placed=False, job="hydra in slurm 17.0 0"),
        ),
        # a pod's or a user's variables are around a launcher that starts ranks in it
        (OPENMPI | IN_POD, with_address(OPENMPI_RANK)),
        (STEP | IN_POD, replace(SLURM_TASK, address="train-0", port=23456)),
        (OPENMPI | IN_POD | {"WORLD_SIZE": "2"}, with_address(OPENMPI_RANK)),
        # each task of srun may start several processes by hand
        (STEP | BY_HAND, Identity(launcher="the user", job="by hand", **UNPLACED)),
        # a daemon of Open MPI is a rank of PALS itself, one on each host
        (
            environments.PALS | environments.OPENMPI_5,
            replace(OPENMPI_RANK, job="Open MPI prterun-vm-6322@1"),
        ),
    ],
)
def test_detect_others(environ: dict[str, str], identity: Identity) -> None:
    assert launcher_detection.detect(environ) == identity


@pytest.mark.parametrize(
    ("environ", "sign"),
    [
        (environments.PRTERUN, "PMIX_RANK=1, PMIX_NAMESPACE=prterun-vm-6375@1"),
        (environments.HYDRA_PMI_PORT, "MPI_LOCALRANKID=1, PMI_PORT=vm:38331, PMI_ID=1"),
        # inside a task of a scheduler, which is a daemon's or a script's
        (ONE_TASK | environments.PRTERUN, "PMIX_RANK=1"),
        (STEP | environments.PRTERUN, "PMIX_RANK=1"),
        (environments.BLAUNCH | environments.PRTERUN, "PMIX_RANK=1"),
        (ONE_TASK | environments.HYDRA_PMI_PORT, "MPI_LOCALRANKID=1"),
        (ONE_TASK | {"FOO_RANK": "3", "FOO_SIZE": "4"}, "FOO_RANK=3, FOO_SIZE=4"),
        (
            environments.SAGEMAKER | {"SM_HOSTS": '["algo-2"]', "FOO_RANK": "3", "FOO_SIZE": "4"},
            "FOO_RANK=3, FOO_SIZE=4",
        ),
        # a container that was given some of Slurm's variables
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}, "SLURM_PROCID=1"),
        ({"MACHINE_RANK": "1", "NUM_MACHINES": "2"}, "MACHINE_RANK=1, NUM_MACHINES=2"),
        ({"GLOBAL_RANK": "1", "NPROC": "2"}, "GLOBAL_RANK=1, NPROC=2"),
        ({"AZ_BATCH_HOST_LIST": "10.0.0.4,10.0.0.5"}, "AZ_BATCH_HOST_LIST="),
        (environments.PBSDSH, "PBS_TASKNUM=40000001"),
        (environments.PETASK, "JOB_NAME=petask"),
        (environments.ALPS, "ALPS_APP_PE=1"),
        (environments.INDEXED_JOB, "JOB_COMPLETION_INDEX=1"),
        (environments.LIGHTNING_NODE, "WORLD_SIZE=4"),
        (environments.TONY, "RANK=1, WORLD=4"),
        (environments.DETERMINED, "DET_KUBERNETES_JOB_PARALLELISM=2"),
        (environments.TF_CONFIG, "TF_CONFIG="),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "WORLD_SIZE=4, RANK=0"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4"),
        ({"NODE_RANK": "1", "NNODES": "2"}, "NODE_RANK=1, NNODES=2"),
        ({"FOO_RANK": "1", "FOO_NPROCS": "4"}, "FOO_RANK=1, FOO_NPROCS=4"),
        ({"PMI_FD": "9"}, "PMI_FD=9"),
    ],
)
def test_refuses_process_with_signs_of_others(environ: dict[str, str], sign: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(f"one of several ({sign}")) as caught:
        launcher_detection.detect(environ)
    for way in ("shardwise run", "SHARDWISE_RANK", "SHARDWISE_RENDEZVOUS", "SHARDWISE_ALONE=1"):
        assert way in str(caught.value)


def test_refuses_process_below_launcher_without_variables() -> None:
    """Simulates a container without the environment of its host."""
    with pytest.raises(LaunchError, match=r"several \(started by hydra_pmi_proxy\)"):
        launcher_detection.detect({}, ["hydra_pmi_proxy"])


@pytest.mark.parametrize(
    "environ",
    [
        {"FOO_RANK": "1", "FOO_SIZE": "1"},
        {"FOO_RANK": "7", "FOO_SIZE": "4"},  # no rank of that many
        {"PAGE_RANK": "1", "FONT_SIZE": "12"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "8", "SIZE": "512"},
        {"LORA_RANK": "8", "LORA_SIZE": "64"},
        {"WORLD_SIZE": ""},
        {"JOB_COMPLETION_INDEX": "0"},
        {"PET_NNODES": "1"},
        {"FLUX_URI": "local:///run/flux", "PALS_RANKID": "0", "PALS_NODEID": "0"},
        {"SHARDWISE_ALONE": "", "FOO_RANK": "0"},
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"},
        {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8"},
        {"AWS_BATCH_JOB_ARRAY_INDEX": "1", "AWS_BATCH_JOB_ARRAY_SIZE": "10"},
        {"SHARDWISE_RANK": "0", "SHARDWISE_SIZE": "1"},
        {"TF_CONFIG": "{"},
    ],
)
def test_unrelated_numbers_are_no_signs(environ: dict[str, str]) -> None:
    assert launcher_detection.detect(environ).size == 1


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (environments.PALS_PMIX, "PALS_RANKID=1.*PMI_SIZE is not set"),
        ({"SHARDWISE_RANK": "1"}, "the user .*SHARDWISE_RANK=1.*SHARDWISE_SIZE is not set"),
        ({"SHARDWISE_ALONE": "false"}, "SHARDWISE_ALONE takes 0 or 1, not 'false': write 1"),
        # exported once, for all ranks of a launcher
        (
            OPENMPI | {"SHARDWISE_RANK": "0", "SHARDWISE_SIZE": "1"},
            "the user says SHARDWISE_RANK=0",
        ),
        (STEP | BY_HAND | {"SHARDWISE_SIZE": "3"}, "the user says SHARDWISE_RANK=1"),
        (
            environments.PYTORCH_JOB | {"PET_NPROC_PER_NODE": "2", "WORLD_SIZE": "4"},
            "PET_NPROC_PER_NODE=2 processes in each pod",
        ),
        (environments.TRAIN_JOB | {"PET_NPROC_PER_NODE": "8"}, "PET_NPROC_PER_NODE=8"),
        (environments.SAGEMAKER | {"SM_HOSTS": "algo-1"}, "SM_HOSTS='algo-1', which is not a list"),
        (environments.SAGEMAKER | {"SM_CURRENT_HOST": "x"}, "SM_CURRENT_HOST='x'"),
        # half of what an inner launcher says is not taken for the outer one's
        (STEP | {"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set"),
        (OPENMPI | environments.GFORKER | {"PMI_RANK": "0"}, "but PMI says PMI_RANK=0"),
    ],
)
def test_message_quotes_invalid_variable(environ: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        launcher_detection.detect(environ)


def test_alone_of_shell_does_not_apply_to_ranks() -> None:
    """What `shardwise run` passes on by srun, and by torch's agent."""
    base = STEP | {"SHARDWISE_ALONE": "1", "SHARDWISE_RANK": "0", "SHARDWISE_SIZE": "1"}
    for environ in (
        slurm.srun_environment(base, {}),
        elastic.agent_environment(base, {}, None),
    ):
        assert launcher_detection.detect(environ) == SLURM_TASK


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("mine", [True, False])
def test_rendezvous_file_of_other_run_is_kept(tmp_path: Path, mine: bool) -> None:
    place, host = tmp_path / "file", socket.gethostname()
    of_init = RendezvousFile(addresses=("a",), port=1, host=host, pid=1, began="0")
    private_files.write(place, json.dumps(asdict(of_init)))
    pid = os.getpid()
    file = RendezvousFile(addresses=("b",), port=2, host=host, pid=pid)
    # The number is of another process by now, so its file is an old one.
    with rendezvous_file.publish(place, file):
        assert rendezvous_file.read(place) == file
        if not mine:
            private_files.write(place, json.dumps(asdict(of_init)))
    assert place.exists() != mine
    living = replace(of_init, began=rendezvous_file.start_time(1))
    private_files.write(place, json.dumps(asdict(living)))
    refused = pytest.raises(LaunchError, match="Process 1 is rank 0 of another run")
    with refused, rendezvous_file.publish(place, file):
        pass


def test_identity_variables_round_trip() -> None:
    identity = Identity(
        launcher="shardwise run", size=2, local_size=2, address="::1", port=1, listen_fd=7
    )
    assert launcher_detection.detect(environment.identity_variables(identity)) == identity


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (TORCHRUN | {"RANK": "eight"}, "RANK='eight', set by torchrun, is not a valid number"),
        (TORCHRUN | {"RANK": "8"}, "rank 8 of 8"),
        ({"SHARDWISE_LAUNCH_RANK": "0"}, "SHARDWISE_LAUNCH_SIZE is not set"),
    ],
)
def test_refuses_invalid_numbers(environ: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        launcher_detection.detect(environ)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            OPENMPI | HYDRA | {"PMI_RANK": "0"},
            "Open MPI says OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=2, but MPICH says "
            "PMI_RANK=0, PMI_SIZE=2",
        ),
        (TORCHRUN | HOROVOD, "torchrun says RANK=5, WORLD_SIZE=8, but horovodrun says"),
        (OPENMPI | {"OMPI_COMM_WORLD_RANK": "x"}, "OMPI_COMM_WORLD_RANK='x', set by Open MPI"),
        (HYDRA | {"PMI_RANK": "2"}, r"rank 2 of 2 and local rank 1 of 2 \(PMI_RANK, PMI_SIZE"),
        ({"HOROVOD_RANK": "1"}, "horovodrun.*HOROVOD_SIZE is not set"),
        (STEP | {"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_TASKS_PER_NODE=2,1: find out"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2;1"}, "the list of tasks '2;1'"),
        (STEP | {"SLURM_STEP_NODELIST": "n[1-"}, r"the list of nodes 'n\[1-'"),
    ],
)
def test_message_quotes_contradiction(environ: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        launcher_detection.detect(environ)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-2,7],m03", ["n1", "n2", "n7", "m03"]),
        ("gpu[008-011]", ["gpu008", "gpu009", "gpu010", "gpu011"]),
        ("r[1-2]c[3,5]-ib", ["r1c3-ib", "r1c5-ib", "r2c3-ib", "r2c5-ib"]),
        ("n[0000000001-0000000002]", ["n0000000001", "n0000000002"]),
        ("n[9999999999]", ["n9999999999"]),
        ("a-b,c.d,e[9-10]", ["a-b", "c.d", "e9", "e10"]),
    ],
)
def test_node_lists(text: str, names: list[str]) -> None:
    assert slurm.node_names(text) == names


@pytest.mark.parametrize(
    "text", ["", "n[1-2", "n1,,n2", "n[2-1]", "n[a]", "n[]", "n1]", f"n[{'9' * 5000}]"]
)
def test_refuses_malformed_node_list(text: str) -> None:
    with pytest.raises(LaunchError, match="list of nodes"):
        slurm.node_names(text)


@pytest.mark.parametrize(
    ("text", "counts"), [("3", [3]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2)", [1, 2, 2])]
)
def test_task_counts(text: str, counts: list[int]) -> None:
    assert slurm.task_counts(text) == counts


class TestSrun:
    @pytest.mark.parametrize(
        ("environ", "wanted"),
        [
            ({}, False),
            (BATCH, True),
            (SALLOC, True),
            # srun, one task: a run inside it
            (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, False),
            # one host, and we are on it; or on the host where salloc was typed
            (BATCH | {"SLURM_JOB_NUM_NODES": "1"}, False),
            (SALLOC | {"SLURM_JOB_NUM_NODES": "1"}, True),
        ],
    )
    def test_needs_srun(self, environ: dict[str, str], wanted: bool) -> None:
        assert slurm.needs_srun(environ) == wanted

    ENDING = ("--kill-on-bad-exit=1", "--label", "--", "python", "train.py")

    @pytest.mark.parametrize(
        ("more", "size", "per_host", "flags"),
        [
            ({}, None, None, ("--nodes=2", "--ntasks=2")),
            ({}, 1, None, ("--nodes=1", "--ntasks=1")),
            ({}, None, 4, ("--nodes=2", "--ntasks=8", "--ntasks-per-node=4")),
            ({}, 6, 4, ("--nodes=2", "--ntasks=6", "--ntasks-per-node=4")),
            ({"SLURM_PTY_PORT": "4"}, None, None, ("--nodes=2", "--ntasks=2", "--overlap")),
            (
                {"SLURM_CPUS_PER_TASK": "8"},
                None,
                None,
                ("--nodes=2", "--ntasks=2", "--cpus-per-task=8"),
            ),
        ],
    )
    def test_srun_command(
        self,
        more: dict[str, str],
        size: int | None,
        per_host: int | None,
        flags: tuple[str, ...],
    ) -> None:
        command = ("python", "train.py")
        words = slurm.srun_command(SALLOC | more, command, size=size, per_host=per_host)
        assert words == ("srun", *flags, *self.ENDING)

    def test_srun_starts_rank_per_gpu_without_tasks(self) -> None:
        environ = {name: value for name, value in SALLOC.items() if name != "SLURM_NTASKS"}
        words = slurm.srun_command(environ | {"SLURM_GPUS_ON_NODE": "4"}, ("x",))
        assert words[:4] == ("srun", "--nodes=2", "--ntasks=8", "--ntasks-per-node=4")

    def test_srun_refuses_too_many_ranks(self) -> None:
        with pytest.raises(LaunchError, match="-n 9 ranks do not fit on the 2 hosts of Slurm job"):
            slurm.srun_command(SALLOC, ("x",), size=9, per_host=4)

    def test_srun_environment_has_settings_and_port(self) -> None:
        environ = slurm.srun_environment(BATCH, {"zero": "2"}, 29500)
        assert environ["SHARDWISE_FLAGS"] == '{"zero": "2"}'
        assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("n1", "29500")
        assert "SLURM_NTASKS_PER_NODE" not in environ

    def test_reports_missing_srun(self) -> None:
        with pytest.raises(LaunchError, match=r"Slurm job 19 .* but no-srun cannot be started"):
            slurm.become_srun(("no-srun",), SALLOC)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_name_by_process_differs_between_launchers() -> None:
    show = f"{sys.executable} -c '{NAME_LAUNCHER}'"
    told = []
    for command in (f"{show}; exec {show}", f"{show}; true"):
        ran = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
        told.append(ran.stdout.splitlines())
    (by_shell, by_us), (by_other_shell,) = told
    assert by_us.startswith(f"process {os.getpid()} started at ")
    assert len({by_shell, by_us, by_other_shell}) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_finds_launcher_above_script_and_counts_its_children(tmp_path: Path) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.symlink_to("/bin/bash")
    script = f"""sh -c "{sys.executable} -c '{NAME_LAUNCHER}'; true" & echo $$; wait"""
    ran = subprocess.run([mpirun, "-c", script], capture_output=True, text=True, check=True)
    number, named = sorted(ran.stdout.splitlines(), key=len)
    assert named.startswith(f"process {number} started at ")

    me = os.getpid()
    before = processes.living_children(me)
    assert before is not None
    with subprocess.Popen(["sleep", "60"]) as started:
        assert processes.living_children(me) == before + 1
        started.kill()
        while processes.living_children(me) != before:  # dead, though nobody has asked how
            pass
