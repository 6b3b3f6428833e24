"""Reads the identity of a process from services that start one process per host.

SageMaker             SM_HOSTS, SM_CURRENT_HOST       (sagemaker-training-toolkit: environment.py)
SkyPilot              SKYPILOT_NODE_RANK, ...         (docs: environment-variables)
Kubeflow Trainer      PET_NODE_RANK, PET_NNODES, ...  (plugins/torch/torch.go)
Kubernetes            JOB_COMPLETION_INDEX, and WORLD_SIZE as set by the user
AWS Batch             AWS_BATCH_JOB_NODE_INDEX, ...   (multi-node parallel jobs)

Kubeflow's PyTorchJob and Azure ML set torchrun's variables. Kubeflow's MPIJob runs mpirun.
"""

import json
from dataclasses import replace

from shardwise.errors import LaunchError
from shardwise.net.identity import Identity, read_integer, read_text
from shardwise.net.launchers.variables import Environ, RankVariables

PORT = 29500
"""Port of rank 0 if only its host is specified: torchrun's default."""

SKYPILOT = RankVariables(
    launcher="SkyPilot",
    rank="SKYPILOT_NODE_RANK",
    size="SKYPILOT_NUM_NODES",
    node="SKYPILOT_NODE_RANK",
    job=("SKYPILOT_TASK_ID",),
    one_per_host=True,
)

KUBEFLOW = RankVariables(
    launcher="Kubeflow",
    rank="PET_NODE_RANK",
    size="PET_NNODES",
    node="PET_NODE_RANK",
    one_per_host=True,
)

KUBERNETES = RankVariables(
    launcher="Kubernetes", rank="JOB_COMPLETION_INDEX", size="WORLD_SIZE", one_per_host=True
)

AWS_BATCH = RankVariables(
    launcher="AWS Batch",
    rank="AWS_BATCH_JOB_NODE_INDEX",
    size="AWS_BATCH_JOB_NUM_NODES",
    node="AWS_BATCH_JOB_NODE_INDEX",
    one_per_host=True,
)

_MAIN = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"


def skypilot(environ: Environ) -> Identity | None:
    """Read a SkyPilot node's variables. The first address in the list is rank 0's."""
    identity = SKYPILOT.read(environ)
    addresses = environ.get("SKYPILOT_NODE_IPS", "").split()
    return _at(identity, addresses[0] if addresses else None, environ)


def sagemaker(environ: Environ) -> Identity | None:
    """Read a SageMaker training job's variables. The rank is this host's index in SM_HOSTS."""
    if not {"SM_HOSTS", "SM_CURRENT_HOST"} & environ.keys():
        return None
    here = read_text(environ, "SM_CURRENT_HOST", "SageMaker")
    try:
        hosts = json.loads(read_text(environ, "SM_HOSTS", "SageMaker"))
        rank = hosts.index(here)
    except (ValueError, AttributeError):
        raise LaunchError(
            f"SageMaker says SM_HOSTS={environ['SM_HOSTS'][:80]!r}, which is not a list of hosts "
            f"with SM_CURRENT_HOST={here[:80]!r} in it: find out what sets these variables."
        ) from None
    identity = Identity(
        launcher="SageMaker",
        rank=rank,
        size=len(hosts),
        node=rank,
        variables={"rank": "SM_CURRENT_HOST", "size": "SM_HOSTS", "node": "SM_CURRENT_HOST"},
    )
    return _at(identity, str(hosts[0]), environ)


def kubeflow(environ: Environ) -> Identity | None:
    """Read a Kubeflow Trainer pod's variables, which are also torchrun's options.

    Raises LaunchError if several processes per pod are requested, because Kubeflow starts only one.
    """
    if KUBEFLOW.rank not in environ and environ.get(KUBEFLOW.size, "1") == "1":
        return None
    check_processes_per_pod(environ)
    identity = KUBEFLOW.read(environ)
    return _at(identity, environ.get("PET_MASTER_ADDR"), environ, port="PET_MASTER_PORT")


def check_processes_per_pod(environ: Environ) -> None:
    """Raise LaunchError if Kubeflow requests several processes per pod."""
    count = environ.get("PET_NPROC_PER_NODE", "1")
    if count.isdigit() and int(count) > 1:
        raise LaunchError(
            f"Kubeflow asks for PET_NPROC_PER_NODE={count} processes in each pod, but starts one. "
            "Start the others in the pod's command: torchrun train.py (it reads PET_*), or "
            "shardwise run --nnodes $PET_NNODES --node-rank $PET_NODE_RANK "
            f"--nproc-per-node {count} --rdzv-endpoint HOST:PORT train.py."
        )


def indexed_job(environ: Environ) -> Identity | None:
    """Read the pod index of an Indexed Job, alone or in a JobSet.

    Kubernetes does not tell a pod the number of pods, so the user has to set WORLD_SIZE and
    MASTER_ADDR.
    """
    if not {KUBERNETES.rank, KUBERNETES.size, "MASTER_ADDR"} <= environ.keys():
        return None
    return _at(KUBERNETES.read(environ), environ["MASTER_ADDR"], environ)


def aws_batch(environ: Environ) -> Identity | None:
    """Read the node index in a multi-node parallel job."""
    identity = AWS_BATCH.read(environ)
    if identity is None or identity.size == 1:
        return identity
    if (main := environ.get("AWS_BATCH_JOB_MAIN_NODE_INDEX", "0")) != "0":
        raise LaunchError(
            f"AWS Batch says AWS_BATCH_JOB_MAIN_NODE_INDEX={main}. Make node 0 the main node, "
            "because AWS Batch gives the other nodes only the main node's address."
        )
    # The main node is not told its own address, so it listens on all interfaces.
    return _at(identity, environ.get(_MAIN, "0.0.0.0" if identity.rank == 0 else None), environ)


def _at(
    identity: Identity | None, address: str | None, environ: Environ, port: str = "MASTER_PORT"
) -> Identity | None:
    """Add rank 0's address, and its port from the variable `port` or the default."""
    if identity is None or address is None or identity.size == 1:
        return identity
    number = read_integer(environ, port, identity.launcher) if port in environ else PORT
    return replace(identity, address=address, port=number)
