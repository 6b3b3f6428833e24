"""States in host memory, with an accelerator that copies as late as possible.

The CPU acts as the accelerator. Its side streams do nothing until some code waits. Code that reads
or writes memory of a copy without a wait gets wrong numbers.
"""

import threading
from collections import defaultdict, deque
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.states.storage import storage, storage_factory
from shardwise.tiers.copy_stream import CopyStream
from tests.disk import on_a_disk


class LateEvent:
    """The end of a copy that has not started; without a copy, a moment in the past."""

    lock = threading.RLock()
    """A lock, because threads that write to a disk wait for copies, too."""

    def __init__(self, queue=(), copy=None):
        self._queue = queue
        self._copy = copy

    def run(self):
        self._copy()
        self._copy = None

    def query(self):
        return self._copy is None

    def synchronize(self):
        with self.lock:
            while not self.query():
                self._queue.popleft().run()


class Late(CopyStream):
    """Two side streams; each makes its copies in order when one is waited for."""

    uses = 0

    def __init__(self, device):
        super().__init__(device)
        self._queues = defaultdict(deque)

    def here(self):
        return LateEvent()

    def await_(self, event):
        event.synchronize()

    @contextmanager
    def _entered(self, stream, after):
        Late.uses += 1
        for event in after:
            event.synchronize()
        yield

    def _copy(self, stream, source, target, after):
        Late.uses += 1
        behind = [event for event in after if not event.query()]

        def copy():
            for event in behind:
                event.synchronize()
            target.copy_(source)

        queue = self._queues[id(stream)]
        event = LateEvent(queue, copy)
        queue.append(event)
        return event


@contextmanager
def accelerated():
    """Context manager that makes the CPU an accelerator, apart from states on the host."""
    is_apart, copy_stream, span = (
        storage_factory.StorageFactory.is_apart,
        storage_factory.CopyStream,
        storage.SPAN,
    )
    storage_factory.StorageFactory.is_apart = lambda self, device: not self.is_device
    storage_factory.CopyStream = Late
    storage.SPAN = 24
    Late.uses = 0
    try:
        yield
    finally:
        storage_factory.StorageFactory.is_apart, storage_factory.CopyStream, storage.SPAN = (
            is_apart,
            copy_stream,
            span,
        )


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)) for _ in range(3)
        )
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def trained(world, steps=5, *, micro=1, **settings):
    torch.manual_seed(3)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    engine = sw.Engine(model, optimizer, bucket_mb=0.0003, **settings)
    norms = []
    for step in range(steps):
        for part in range(micro):
            draw = torch.Generator().manual_seed(100 * step + 10 * part + world.rank)
            x = torch.randn(3, 6, generator=draw)
            engine.backward(model(x).square().mean(), last=part == micro - 1)
        norms.append(engine.step().grad_norm)  # clipping would depend on the last bit of a norm
        with torch.no_grad():
            model(torch.ones(1, 6))
    with engine.full_parameters():
        values = [p.detach().clone() for p in model.parameters()]
    state = engine.optimizer_state_dict()["state"]
    engine.close()
    # A plain model again, with the values of the states.
    values += [optimizer.state[p]["exp_avg_sq"] for p in model.parameters()]
    return norms, values, [state[i]["exp_avg"] for i in state]


def apart(world, options, settings):
    plain = trained(world, **options)
    with accelerated():
        late = trained(world, **options, **settings)
        assert Late.uses > 0
    for ours, theirs in zip(late[1] + late[2], plain[1] + plain[2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert late[0] == pytest.approx(plain[0], rel=1e-6)


def _tiers(optimizer, gradients, params):
    """Return the settings for these tiers; None leaves a state on its default tier."""
    named = {"optimizer": optimizer, "gradients": gradients, "params": params}
    places = {"cpu": "cpu", "device": "device", "nvme": f"nvme:{on_a_disk()}"}
    return {f"offload_{name}": places[tier] for name, tier in named.items() if tier}


CASES = [
    (0, ("cpu", None, None)),
    (0, ("nvme", None, None)),
    (1, ("cpu", None, None)),
    (2, ("cpu", None, None)),
    (2, ("cpu", "device", None)),
    (2, ("device", "cpu", None)),
    (3, ("cpu", None, None)),
    (3, ("cpu", None, "cpu")),
    (3, ("device", None, "cpu")),
    (3, ("device", "cpu", "nvme")),
    (3, ("cpu", "nvme", "cpu")),
    (3, ("nvme", "cpu", "cpu")),
    (3, ("nvme", None, "nvme")),
]


OFTEN = [CASES[number] for number in (2, 5, 10, 12)]
"""Cases that `make test` runs on two ranks: each state on each tier that it can have."""


@pytest.mark.parametrize(
    ("size", "options", "case"),
    [
        *((1, {"micro": 1}, case) for case in CASES if case not in OFTEN),
        *((2, {"micro": 2, "steps": 3}, case) for case in OFTEN),
        *(
            pytest.param(size, {"micro": micro}, case, marks=pytest.mark.full)
            for size, micro in ((1, 1), (1, 3), (2, 1), (2, 3))
            for case in (OFTEN if size == micro == 1 else CASES)
        ),
    ],
    ids=str,
)
def test_late_copies_give_the_same_bits(group, size, case, options):
    zero, tiers = case
    group(size, transport="gloo")(apart, options | {"zero": zero}, _tiers(*tiers))


@pytest.mark.parametrize(
    "case",
    [case if case in OFTEN else pytest.param(case, marks=pytest.mark.full) for case in CASES[3:11]],
    ids=str,
)
def test_late_copies_in_16_bits(group, case):
    zero, tiers = case
    options = {"zero": zero, "precision": "bf16"}
    group(2, transport="gloo")(apart, options, _tiers(*tiers))
