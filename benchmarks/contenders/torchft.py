"""torchft's DiLoCo: each rank a replica group, the whole model one fragment, Nesterov outside."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from job import Job, Step

LONG = timedelta(minutes=20)
"""Its own limits would end a transfer over a slow link."""


def build(job: Job, *, every: int, lr: float, momentum: float) -> Step:
    """DiLoCo that averages every `every` steps."""
    common = dist.TCPStore(job.address, job.port, job.size, is_master=job.rank == 0)
    if job.rank == 0:
        server = LighthouseServer(bind="[::]:29600", min_replicas=job.size, join_timeout_ms=60_000)
        job.told["lighthouse"] = lambda: server.address()  # which also keeps it alive
        common.set("lighthouse", f"http://{job.address}:29600")
    host = job.addresses[job.rank]
    own = dist.TCPStore(host, 29700, is_master=True, wait_for_workers=False)
    model = job.plain_model()
    optimizer = job.optimizer(model.parameters())
    outer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=True)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LONG),
        min_replica_size=job.size,
        use_async_quorum=False,
        load_state_dict=lambda state: None,
        state_dict=dict,
        replica_id=str(job.rank),
        store_addr=host,
        store_port=29700,
        rank=0,
        world_size=1,
        lighthouse_addr=common.get("lighthouse").decode(),
        hostname=host,
        connect_timeout=LONG,
        quorum_timeout=LONG,
        timeout=LONG,
        init_sync=False,
    )
    DiLoCo(manager, [model], optimizer, outer, every, pin_memory=False).__enter__()
    job.told["store"] = lambda: own.host  # keeps it alive
    return job.plain_step(model, optimizer)
