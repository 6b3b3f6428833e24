"""Training cases for two ranks, whose results must be the same on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shardwise as sw
from shardwise.comm import Solo
from shardwise.layout.bucket_layout import even_cuts
from shardwise.model.offloaded_tensor import HostTarget, OffloadTarget, StagedDiskTarget
from shardwise.states.storage.host_storage import HostStorage
from shardwise.tiers import device_spool, host_window
from shardwise.tiers.copy_stream import CopyStream
from shardwise.tiers.nvme import Store
from shardwise.tiers.spool import Spool
from shardwise.world.mesh import Mesh
from shardwise.world.world import World
from tests.gpu import test_activations
from tests.gpu.training import CLASSES, Model, tiers

ROWS, WIDTH, STEPS = 8, 32, 3

BUCKET_MB = 0.25
"""Bytes of a bucket; a model of 4 blocks 256 wide, 4.2 MB in fp32, has many."""


class ConvNet(nn.Module):
    """Convolutions, two by default, each with a BatchNorm."""

    def __init__(self, convolutions: int = 2) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                layer
                for channels in (3, *[4] * (convolutions - 1))
                for layer in (nn.Conv2d(channels, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
            )
        )
        self.head = nn.Linear(4 * 16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """x: (N, 3, 4, 4); returns (N, CLASSES)."""
        return self.head(self.blocks(x).flatten(1))


def made(world: World, kind: type[nn.Module] = Model) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make the same model on every rank, in fp64, on its device."""
    world.engines = 0
    torch.manual_seed(0)
    model = kind().to(world.device, torch.float64)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def batch(world: World, step: int, shape: tuple[int, ...] = (WIDTH,)) -> tuple[Tensor, Tensor]:
    """Draw the inputs and classes of a full step."""
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, *shape, generator=draw, dtype=torch.float64)
    return x.to(world.device), torch.randint(CLASSES, (ROWS,), generator=draw).to(world.device)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Compute the mean over rows."""
    return nn.functional.cross_entropy(model(x), y)


def values_of(engine: sw.Engine, model: nn.Module) -> list[Tensor]:
    """Return the full model on the CPU."""
    with engine.full_parameters():
        return [value.detach().cpu().clone() for value in model.state_dict().values()]


def stepped(world: World, settings: dict[str, Any], kind: str = "Model") -> list[Tensor]:
    """Train some steps with clipping; return losses, norms and the model."""
    shape = (WIDTH,) if kind == "Model" else (3, 4, 4)
    model, optimizer = made(world, {"Model": Model, "ConvNet": ConvNet}[kind])
    engine = sw.Engine(model, optimizer, bucket_mb=0.01, **settings)
    told: list[float] = []
    for step in range(STEPS):
        engine.backward(loss_of(model, *world.share(batch(world, step, shape))))
        stats = engine.step(max_norm=0.5)
        told += (stats.loss, stats.grad_norm)
    values = values_of(engine, model)
    if engine.settings.ema_decay is not None:
        with engine.ema():
            values += values_of(engine, model)
    engine.close()
    return [torch.tensor(told, dtype=torch.float64), *values]


def by_precision(world: World, settings: dict[str, Any], named: dict[str, str]) -> list[Tensor]:
    """Train as `stepped`, from fp32, with states on the given tiers."""
    world.engines = 0
    torch.manual_seed(0)
    model = Model().to(world.device)
    engine = sw.Engine(
        model, torch.optim.AdamW(model.parameters()), bucket_mb=0.01, **settings, **tiers(**named)
    )
    losses = []
    for step in range(STEPS):
        x, y = world.share(batch(world, step))
        engine.backward(loss_of(model, x.float(), y))
        losses.append(engine.step(max_norm=0.5).loss)
    engine.close()
    return [torch.tensor(losses, dtype=torch.float64)]


def on_a_stream_of_its_own(world: World, settings: dict[str, Any]) -> list[Tensor]:
    """Train as `stepped`, as a user whose current stream is not the default one."""
    if world.device.type == "cpu":
        return stepped(world, settings)
    stream = torch.cuda.Stream(world.device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        return stepped(world, settings)


def exact(world: World, settings: dict[str, Any], kind: str) -> list[Tensor]:
    """Train in the exact mode, which needs a loader."""
    os.environ["SHARDWISE_EXACT"] = "4"
    world.settings = world.settle()
    return loaded(world, settings, kind)


def loaded(world: World, settings: dict[str, Any], kind: str = "Model") -> list[Tensor]:
    """Train some steps on batches that a loader delivers from pinned memory."""
    shape = (WIDTH,) if kind == "Model" else (3, 4, 4)
    batches = [batch(world, step, shape) for step in range(STEPS)]
    columns = [torch.cat([each[i].cpu() for each in batches]) for i in (0, 1)]
    loader = sw.Loader(TensorDataset(*columns), batch_size=ROWS, shuffle=True, pin_memory=True)
    model, optimizer = made(world, {"Model": Model, "ConvNet": ConvNet}[kind])
    engine = sw.Engine(model, optimizer, bucket_mb=0.01, **settings)
    losses = []
    for step in loader.steps():
        for x, y in step:
            engine.backward(loss_of(model, x, y))
        losses.append(engine.step().loss)
    values = values_of(engine, model)
    engine.close()
    return [torch.tensor(losses, dtype=torch.float64), *values]


SMALL = 16 * 1024
"""Bytes of a pinned block in `small_blocks`."""


def small_blocks(world: World, function: Callable[..., Any], *args: Any) -> Any:
    """Context manager that makes pinned blocks much smaller than the transfers."""
    before = device_spool.CHUNK, host_window.PIECE
    device_spool.CHUNK = host_window.PIECE = SMALL
    try:
        return function(world, *args)
    finally:
        device_spool.CHUNK, host_window.PIECE = before


def summed_elsewhere(world: World, numel: int) -> float:
    """Start a 16-bit sum on one stream, and wait for it on another; return all elements."""
    one, other = torch.cuda.Stream(world.device), torch.cuda.Stream(world.device)
    one.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(one):
        buffer = torch.full((numel,), world.rank + 1.0, dtype=torch.bfloat16, device=world.device)
        handle = world.collectives.all_reduce(buffer)
    other.wait_stream(one)
    with torch.cuda.stream(other):
        handle.wait()
        del handle
        return float(buffer.float().sum())  # the host has waited: the buffer may be freed


def summed_in_vain(world: World, numel: int) -> None:
    """Start a 16-bit sum that no stream waits for."""
    buffer = torch.ones(numel, dtype=torch.bfloat16, device=world.device)
    world.collectives.reduce_scatter(buffer, even_cuts(numel, world.size))
    torch.cuda.synchronize()  # the buffer must stay alive until here


def fetched_elsewhere(world: World, folder: Path | None) -> None:
    """Load saved activations on one stream and use them on another, from the host or a disk."""
    host = HostTarget(world.device)
    target: OffloadTarget = host
    if folder is not None:
        spool = device_spool.DeviceSpool(Spool(folder, "activations", rank=0), host.copy_stream)
        target = StagedDiskTarget(spool)
    one, other = torch.cuda.Stream(world.device), torch.cuda.Stream(world.device)
    offload = target.send(torch.ones(SMALL, dtype=torch.uint8, device=world.device))
    offload.settle()
    with torch.cuda.stream(one):
        offload.fetch()
    with torch.cuda.stream(other):
        total = offload.arrived().sum()
    offload.drop()  # freed while `other` reads it
    torch.cuda.synchronize()
    assert int(total) == SMALL


def added_twice(world: World) -> None:
    """Add a gradient to one that is still being copied to the host."""
    copies = CopyStream(world.device)
    storage = HostStorage(copies.memory(1000, torch.float32), copies)
    parts = [torch.full((1000,), n, device=world.device) for n in (1.0, 2.0)]
    for number, part in enumerate(parts):
        storage.add(part, fresh=number == 0)
    assert bool((storage.take(0) == 3).all())


def lent_again(world: World, folder: Path) -> None:
    """Release a store's only buffer during a copy to the device, and refill it on the host."""
    copies = CopyStream(world.device)
    with closing(Store(folder, "state", [SMALL], rank=0, pages=copies.pages)) as store:
        lease = store.blank(0)
        lease.wait().fill_(1)
        data, came = copies.up(lease.wait())
        lease.add_copy(came)
        lease.give_back()
        lease = store.blank(0)
        lease.wait().fill_(2)
        copies.await_(came)
        assert bool((data == 1).all())


def saved_and_loaded(
    world: World, folder: Path, settings: dict[str, Any], background: bool
) -> list[tuple[dict[str, int], int]]:
    """Return synchronisations by cause, and the peak of pinned bytes, of a save and a load."""
    from tests.phantom.streams import Device

    order = Device.order

    def seen() -> tuple[dict[str, int], int]:
        return dict(order.synchronisations), order.most_pinned_nbytes() - before

    def trained(step: int) -> None:
        engine.backward(loss_of(model, *world.share(batch(world, step))))
        engine.step()

    model, optimizer = made(world)
    engine = sw.Engine(model, optimizer, **settings)
    trained(0)
    wanted = values_of(engine, model)
    kept = list(order.races)
    order.begin()
    before = order.most_pinned_nbytes()
    path = engine.save(folder, background=background)
    found = [seen()]
    trained(1)
    kept += order.races
    order.begin()
    before = order.most_pinned_nbytes()
    engine.load(path)
    found.append(seen())
    assert all(map(torch.equal, values_of(engine, model), wanted))
    engine.close()
    order.races[:0] = kept
    return found


def accumulated(world: World, settings: dict[str, Any], named: dict[str, str]) -> list[Tensor]:
    """Train as `by_precision`, with two backward passes per step, in fp64."""
    model, optimizer = made(world)
    engine = sw.Engine(model, optimizer, bucket_mb=0.01, **settings, **tiers(**named))
    losses = []
    for step in range(STEPS):
        for part in range(2):
            x, y = world.share(batch(world, 10 * step + part))
            engine.backward(loss_of(model, x, y), last=part == 1)
        losses.append(engine.step(max_norm=0.5).loss)
    values = values_of(engine, model)
    engine.close()
    return [torch.tensor(losses, dtype=torch.float64), *values]


def activations(world: World, settings: dict[str, Any]) -> None:
    """Train with activations that are large enough to be offloaded."""
    test_activations.WIDE = {"width": 256, "rows": 72}
    test_activations.trained(world, 0, settings)


@contextmanager
def cut(world: World, **mesh: int) -> Iterator[None]:
    """Return a mesh of the ranks that has more than the data axis."""
    os.environ |= {f"SHARDWISE_{axis.upper()}": str(count) for axis, count in mesh.items()}
    world.settings = world.settle()
    world.cut(Mesh(world.size, **mesh))
    try:
        yield
    finally:
        for group in (world.tensor, world.pipeline, world.expert):
            group.close()
        world.mesh, world.data, world.stage = Mesh(world.size), world.collectives, world.collectives
        world.tensor, world.pipeline, world.expert = Solo(), Solo(), Solo()
        for of_data in ("gather_order", "side_channel", "routing_channel"):
            vars(world).pop(of_data, None)


def split(world: World, settings: dict[str, Any], mesh: dict[str, int]) -> list[Tensor]:
    """Train layers that are split between the ranks, or distributed among them."""
    with cut(world, **mesh) if mesh else nullcontext():
        model, optimizer = made(world)
        plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"} if "tensor" in mesh else None
        engine = sw.Engine(model, optimizer, tensor_plan=plan, **settings)
        losses = []
        for step in range(STEPS):
            x, y = batch(world, step)
            if "pipeline" in mesh:
                engine.forward_backward(lambda x, y: loss_of(model, x, y), x, y)
            else:
                engine.backward(loss_of(model, x, y))
            losses.append(engine.step(max_norm=0.5).loss)
        values = values_of(engine, model)
        engine.close()
        return [torch.tensor(losses, dtype=torch.float64), *values]


def horovod(world: World) -> list[Tensor]:
    """Run each operation of the drop-in, and its optimizer with gradient accumulation."""
    import shardwise.horovod as hvd

    found: list[Tensor] = []
    hvd.init()
    try:
        mine = torch.arange(6.0, device=world.device) + world.rank
        found.append(hvd.allreduce(mine, name="a") * 2)  # its memory is freed at once
        found.extend(hvd.grouped_allreduce([mine, 2 * mine], name="b"))
        found.append(hvd.allgather(mine[: 2 + world.rank], name="c"))
        found.append(hvd.broadcast(mine, 1, name="d"))
        found.append(_first(hvd.alltoall(mine, name="e")))
        found.append(hvd.reducescatter(mine, name="f"))
        handles = [hvd.allreduce_async(mine * n, name=f"g{n}") for n in range(3)]
        found += [hvd.synchronize(handle) for handle in reversed(handles)]
        model, optimizer = made(world)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=2
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(2):
                x, y = batch(world, 10 * step + part)
                loss_of(model, x[world.rank :: 2], y[world.rank :: 2]).backward()
            optimizer.step()
        found += [value.detach() for value in model.state_dict().values()]
        return [value.cpu().clone() for value in found]
    finally:
        hvd.shutdown()


def horovod_on_a_stream_of_its_own(world: World) -> list[Tensor]:
    """Run `horovod` as a user whose current stream is not the default one."""
    if world.device.type == "cpu":
        return horovod(world)
    stream = torch.cuda.Stream(world.device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        return horovod(world)


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def one_step(
    world: World, settings: dict[str, Any], kind: str = "Model", width: int = WIDTH, blocks: int = 3
) -> tuple[dict[str, int], int, int]:
    """Measure a step in mid-run, from forward to the end of `step()`.

    Returns synchronisations by cause and line, kernels of `step()` alone, and the number of
    buckets.
    """
    from tests.phantom.streams import Device

    shape = (width,) if kind == "Model" else (3, 4, 4)
    world.engines = 0
    model = Model(width, blocks) if kind == "Model" else ConvNet(blocks)
    model.to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    engine = sw.Engine(model, optimizer, **{"bucket_mb": 0.03} | settings)
    order = Device.order
    for step in range(
        20 if settings.get("zero") == 3 else 4
    ):  # in the first steps ranks still agree on the order of gathers
        x, y = world.share(batch(world, step, shape))
        x = x.float()
        order.begin()
        engine.backward(loss_of(model, x, y), weight=len(x))
        before = sum(order.kernels.values())
        engine.step(max_norm=0.5)
    kernels = sum(order.kernels.values()) - before
    found = dict(order.synchronisations), kernels, len(engine._states.parameters.buckets)
    engine.close()
    return found


def expert_step(world: World, layers: int, options: dict[str, float]) -> dict[str, int]:
    """Return the synchronisations of a step in mid-run, with experts on different ranks."""
    from tests.phantom.streams import Device

    def made_layer() -> nn.Module:
        experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        router, shared = nn.Linear(WIDTH, 4, bias=False), nn.Linear(WIDTH, WIDTH)
        return sw.MoE(router, experts, shared=shared, **options)

    world.engines = 0
    with cut(world, expert=2):
        torch.manual_seed(0)
        model = nn.Sequential(*[made_layer() for _ in range(layers)], nn.Linear(WIDTH, CLASSES))
        model.to(world.device)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        engine = sw.Engine(model, optimizer, zero=1)
        for step in range(4):
            x, y = world.share(batch(world, step))
            x = x.float()
            Device.order.begin()
            engine.backward(loss_of(model, x, y), weight=len(x))
            engine.step(max_norm=0.5)
        found = dict(Device.order.synchronisations)
        engine.close()
    return found


def backward_kernels(
    world: World, zero: int, kind: str, blocks: int = 3
) -> tuple[int, dict[str, int]]:
    """Return kernels, and synchronisations by cause, of `engine.backward` in mid-run.

    The weight of the loss is "read" from the graph, on the device, or "said" by the caller.
    """
    from tests.phantom.streams import Device

    world.engines = 0
    model = Model(WIDTH, blocks).to(world.device)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=zero)
    order = Device.order
    for step in range(4):
        x, y = world.share(batch(world, step))
        y[0] = -100
        loss = loss_of(model, x.float(), y)
        order.begin()
        engine.backward(loss, **({"weight": len(x)} if kind == "said" else {}))
        found = sum(order.kernels.values()), dict(order.synchronisations)
        engine.step()
    engine.close()
    return found


def several_backwards(world: World, zero: int) -> None:
    """Train steps with one and two backwards whose weights are on the device; the first may be 0.

    Must equal plain PyTorch.
    """
    model, optimizer = made(world)
    plain, other = made(world)
    engine = sw.Engine(model, optimizer, zero=zero, bucket_mb=0.01)
    for step, kept in enumerate([(3,), (3, 5), (4,), (0, 5), (8,), (0, 0), (0,), (6,), (6, 0)]):
        losses, total = [], max(sum(kept), 1)
        for number, count in enumerate(kept):
            x, y = batch(world, 10 * step + number)
            y[count:] = -100
            world.share((x, y))
            engine.backward(loss_of(model, x, y))
            if count:
                losses.append(loss_of(plain, x, y) * count / total)
        stats = engine.step()
        assert stats.weight == sum(kept)
        assert stats.skipped == (not losses)
        if losses:
            other.zero_grad()
            torch.stack(losses).sum().backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
            other.step()
            assert abs(stats.grad_norm - float(norm)) < 1e-9 * float(norm), step
    for mine, theirs in zip(values_of(engine, model), plain.state_dict().values(), strict=True):
        assert torch.allclose(mine, theirs.cpu(), rtol=1e-9, atol=1e-11)
    engine.close()


def bytes_held(
    world: World, settings: dict[str, Any], named: dict[str, str]
) -> tuple[int, int, int]:
    """Return parameters, and bytes on the device between steps and after a forward of one row."""
    before = torch.cuda.memory_allocated()
    world.engines = 0
    model = Model(256, 4).to(world.device)
    count = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    engine = sw.Engine(model, optimizer, bucket_mb=BUCKET_MB, **settings, **tiers(**named))
    for step in range(3):
        x, y = world.share(batch(world, step, (256,)))
        loss = loss_of(model, x.float(), y)
        after = torch.cuda.memory_allocated() - before
        engine.backward(loss)
        engine.step()
    del loss, x, y
    at_rest = torch.cuda.memory_allocated() - before
    engine.close()
    return count, at_rest, after
