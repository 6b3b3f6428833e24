"""`sw.Guard`: the guard for training loops with DistributedDataParallel or FSDP2."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from platform import node
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from shardwise.comm.stock_group import StockGroup
from shardwise.errors import UsageError
from shardwise.guard.checks import Checks
from shardwise.guard.findings import BUFFER, OPTIMIZER, PARAMETER, Finding
from shardwise.guard.memory import MemorySeals, Piece, flat_view
from shardwise.guard.second_run import SecondRun
from shardwise.guard.step_times import BACKWARD, DATA, FORWARD, UPDATE, StepTimes, Stragglers
from shardwise.guard.stock_spikes import SPIKE_ACTIONS, StockSpikes
from shardwise.layout.fingerprints import can_be_taken
from shardwise.model.buffers import version_of
from shardwise.model.module_hooks import attach

_ACTIONS = ("stop", "warn", "restore")


class Guard:
    """Detects corrupted states and wrong computations in a training loop with DDP or FSDP2.

    Every `every` steps, the ranks compare the tensors that must be equal on all of them, and one
    step is computed twice and compared bit by bit. The guard also names a rank that slows down the
    others, and a step with a suddenly large or non-finite loss or gradient. Create the guard after
    the optimizer, on every rank.

    Args:
        model: The model: plain, wrapped in DistributedDataParallel, or after `fully_shard`.
        optimizer: Its optimizer.
        every: Number of steps between two checks. Default: 100.
        action: What to do on an error. `"stop"` (default) raises, `"warn"` prints, and `"restore"`
            copies the tensor from an intact rank, or raises if no rank is intact.
        memory: Also check the memory of all states at each backward pass. This finds flipped bits
            in tensors that no other rank holds, but reads all states twice per step.
            Default: False.
        spikes: What to do before the update if the step's loss or gradient norm is not finite, or
            far above the values of recent steps. `"warn"` (default) prints, `"skip"` prints and
            makes no update, and `"stop"` raises. `"off"` saves one small collective per step.
        scaler: The loop's `torch.amp.GradScaler`, if it has one. Losses and norms are divided by
            its scale.
        group: The replicas' process group. Default: the default group.

    Raises:
        UsageError: An argument is not valid.

    Example:
        guard = sw.Guard(model, optimizer, every=100)
        for x, y in guard.follow(loader):  # so that messages name samples
            optimizer.zero_grad()
            guard.backward(loss_fn(model(x), y))  # in place of loss.backward()
            optimizer.step()
            guard.step()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        *,
        every: int = 100,
        action: str = "stop",
        memory: bool = False,
        spikes: str = "warn",
        scaler: Any = None,
        group: Any = None,
    ) -> None:
        if not isinstance(model, nn.Module) or not isinstance(optimizer, optim.Optimizer):
            raise UsageError("sw.Guard(model, optimizer) takes a module and a torch optimizer.")
        if not isinstance(every, int) or every < 1:
            raise UsageError(f"sw.Guard(every={every!r}): pass a number of steps from 1 on.")
        if action not in _ACTIONS:
            raise UsageError(f"sw.Guard(action={action!r}): pass one of {', '.join(_ACTIONS)}.")
        if spikes not in SPIKE_ACTIONS:
            raise UsageError(
                f"sw.Guard(spikes={spikes!r}): pass one of {', '.join(SPIKE_ACTIONS)}."
            )
        # DDP's own forward prepares its reducer, so the second run calls the module inside it.
        self._model: nn.Module = model
        if isinstance(model, nn.parallel.DistributedDataParallel):
            self._model = model.module
        _refuse_other_wrappers(self._model)
        self._optimizer = optimizer
        self._every = every
        self.steps = 0
        """Number of completed steps."""
        self._device = next((_local(p).device for p in model.parameters()), torch.device("cpu"))
        self._group = StockGroup(group, self._device)
        self._printed: set[str] = set()
        self._checks = Checks(self._group, self._place(), action, self._say, self._say_once)
        self._second_run = SecondRun([("the model", self._model)], self._device)
        self._seals = MemorySeals() if memory else None
        self._marks = self._buffer_marks()
        place = node(), str(self._device)
        self._stragglers = Stragglers(self._group, place, self._say)
        self._waited = 0.0
        self._waits_since: float | None = None
        self._times = StepTimes(lambda: self._waited)
        self._hooks = list(self._follow_times(model))
        self._spikes: StockSpikes | None = None
        if spikes != "off":
            self._spikes = StockSpikes(
                self._group, self._model, optimizer, spikes, scaler, self._say
            )
            self._hooks.append(optimizer.register_step_pre_hook(self._look_at_step))
        self._arm_if_due()

    def backward(self, loss: Tensor, gradient: Tensor | None = None, **options: Any) -> None:
        """Run `loss.backward(gradient, **options)`. Once every `every` steps, run it twice.

        Args:
            loss: Tensor with one element, or with any shape if `gradient` is passed.
            gradient: As in `torch.Tensor.backward`.
            options: As in `torch.Tensor.backward`.
        """
        self._times.enter(BACKWARD)
        if self._has_whole_parameters:
            named = list(self._model.named_parameters())
            self._second_run.before_backward(loss, gradient, named)
        try:
            torch.autograd.backward(loss, gradient, **options)
        finally:
            self._second_run.after_backward()
            self._end_wait()
            self._times.enter(DATA)
        if self._spikes is not None:
            self._spikes.after_backward(loss)
        # Before the optimizer changes the states.
        if self._seals is not None:
            pieces = list(self._pieces())
            rank = self._group.rank
            self._checks.found += self._seals.check(self.steps + 1, rank, pieces)

    def step(self) -> None:
        """Check the step that `optimizer.step()` has just completed.

        Collective every `every` steps.

        Raises:
            GuardError: An error was found, and the action is not `"warn"`.
        """
        self.steps += 1
        if self._spikes is not None:
            self._spikes.forget()
        self._times.end_step()
        if self.steps % self._every == 0:
            self._checks.found += self._second_run.findings(self.steps, self._group.rank)
            pieces = [*self._pieces(), *self._still_buffers()]
            found = self._checks.exchange(self.steps, pieces, self._times.row())
            self._stragglers.name(self.steps, self._checks.times)
            if self._second_run.reason is not None:
                reason = self._second_run.reason
                self._say_once(f"guard: steps are not computed twice, because {reason}: not proved")
            if found:
                self._checks.act(found, partial(self._repair, found, pieces), self._advice)
        if self._seals is not None:
            self._seals.seal(list(self._pieces()))
        self._arm_if_due()
        self._times.begin_step()

    def follow(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield a DataLoader's batches, and remember their samples for messages about spikes.

        A loop without a backward pass, such as an evaluation, leaves no samples behind.

        Args:
            loader: The loader. Without a map-style dataset, samples have no indices, so they are
                not named.
        """
        return iter(loader) if self._spikes is None else self._spikes.follow(loader)

    def close(self) -> None:
        """Remove all hooks from the model and the optimizer."""
        self._second_run.disarm()
        while self._hooks:
            self._hooks.pop().remove()

    # -- the second run -----------------------------------------------------------------------

    @property
    def _has_whole_parameters(self) -> bool:
        """Whether the model is not sharded by FSDP2.

        FSDP2 computes with tensors other than its parameters, so only its forward pass is computed
        twice.
        """
        return not any(_is_dtensor(p) for p in self._model.parameters())

    def _arm_if_due(self) -> None:
        self._second_run.disarm()
        if (self.steps + 1) % self._every == 0:
            self._second_run.arm()

    # -- step times ---------------------------------------------------------------------------

    def _follow_times(self, model: nn.Module) -> Iterator[Any]:
        """Install the hooks that mark the phases of a step, and yield their handles.

        DistributedDataParallel waits for other ranks in two places: before the forward pass of its
        module, for buffers, and at the end of the backward pass, for gradients. FSDP2 waits in its
        all-gathers and reduce-scatters.
        """
        for module in self._model.modules():
            for comm in _communications(module):
                yield _Timed(comm, self._begin_wait, self._end_wait)
        # Hooks on a compiled module would become part of its graph.
        if self._model._compiled_call_impl is None:
            if model is not self._model:
                yield attach(model.register_forward_pre_hook, self._begin_wait)
            yield attach(self._model.register_forward_pre_hook, self._enter_forward)
        # The first layer's gradient is usually the last one that a backward pass computes.
        first = next((p for p in self._model.parameters() if p.requires_grad), None)
        if first is not None and self._has_whole_parameters:
            yield first.register_post_accumulate_grad_hook(self._begin_wait)  # type: ignore[no-untyped-call]
        yield self._optimizer.register_step_pre_hook(lambda *_: self._times.enter(UPDATE))

    def _begin_wait(self, *_: Any) -> None:
        self._waits_since = time.perf_counter()

    def _end_wait(self) -> None:
        if self._waits_since is not None:
            self._waited += time.perf_counter() - self._waits_since
            self._waits_since = None

    def _enter_forward(self, *_: Any) -> None:
        self._end_wait()
        # Not in an evaluation or a recomputation.
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._times.enter(FORWARD)

    def _look_at_step(self, *_: Any) -> None:
        self._begin_wait()
        assert self._spikes is not None
        try:
            self._spikes.before_step(self.steps + 1)
        finally:
            self._end_wait()

    # -- states -------------------------------------------------------------------------------

    def _place(self) -> float:
        """Return this rank's shard number: its index among the ranks that shard a tensor."""
        for parameter in self._model.parameters():
            if _is_dtensor(parameter):
                shard: Any = parameter
                mesh, place = shard.device_mesh, 0
                for axis, placement in enumerate(shard.placements):
                    if not placement.is_replicate():
                        place = place * mesh.size(axis) + mesh.get_local_rank(axis)
                return float(place)
        return 0.0

    def _pieces(self) -> Iterator[Piece]:
        """Yield this rank's part of the parameters and of the optimizer state."""
        names = {}
        for name, parameter in self._model.named_parameters():
            names[parameter] = name
            yield from _piece(PARAMETER, name, parameter)
        for number, options in enumerate(self._optimizer.param_groups):
            for index, parameter in enumerate(options["params"]):
                name = names.get(parameter, f"param_groups[{number}][{index}]")
                for key, value in sorted(self._optimizer.state.get(parameter, {}).items()):
                    if isinstance(value, Tensor):
                        yield from _piece(OPTIMIZER, f"{name}.{key}", value)

    def _buffer_marks(self) -> dict[nn.Module, list[tuple[int, int]]]:
        return {
            module: [(id(b), version_of(b)) for b in module._buffers.values() if b is not None]
            for module in self._model.modules()
            if module._buffers
        }

    def _still_buffers(self) -> Iterator[Piece]:
        """Yield the buffers of modules whose buffers have not changed since the last check.

        Running statistics differ between ranks until DDP's next forward pass.
        """
        before, self._marks = self._marks, self._buffer_marks()
        names = {module: path for path, module in self._model.named_modules()}
        for module, marks in self._marks.items():
            if before.get(module) == marks:
                for key, value in module._buffers.items():
                    if value is not None:
                        name = f"{names[module]}.{key}" if names[module] else key
                        yield from _piece(BUFFER, name, value)

    def _repair(self, found: Sequence[Finding], pieces: Sequence[Piece], source: int) -> bool:
        """Copy wrong states from rank `source`. Return False if it has no copy. Collective."""
        names = {name for each in found for name in each.names}
        wanted = [piece for piece in pieces if any(name in names for name, *_ in piece.names)]
        if any(piece.is_shard for piece in wanted):
            return False
        for piece in wanted:
            self._group.copy_from(source, piece.flat)
        return True

    def _advice(self) -> str:
        return (
            f"The last check without an error was after step {self._checks.clean}: continue from a "
            "checkpoint of that step or an earlier one."
        )

    # -- messages -----------------------------------------------------------------------------

    def _say(self, line: str) -> None:
        if self._group.rank == 0:
            print(line, file=sys.stderr, flush=True)

    def _say_once(self, line: str) -> None:
        if line not in self._printed:
            self._printed.add(line)
            self._say(f"shardwise: {line}")


def _is_dtensor(value: Tensor) -> bool:
    return hasattr(value, "_local_tensor")


def _local(value: Tensor) -> Tensor:
    """Return this rank's part of a DTensor. Return any other tensor unchanged."""
    local: Tensor = getattr(value, "_local_tensor", value)
    return local


def _piece(kind: str, name: str, value: Tensor) -> Iterator[Piece]:
    local = _local(value).detach()
    if not local.numel() or not can_be_taken(local):
        return
    placements: Sequence[Any] = getattr(value, "placements", ())
    is_shard = any(not placement.is_replicate() for placement in placements)
    flat = flat_view(local)
    yield Piece(kind, flat, [(name, 0, flat.numel())], is_shard)


class _Timed:
    """Calls functions before and after each call of one of FSDP2's communications.

    FSDP2 checks the class of a communication, so the object gets a new subclass of its class.
    """

    def __init__(self, comm: Any, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._comm, self._kind = comm, type(comm)
        kind: Any = self._kind

        def call(this: Any, *args: Any, **kwargs: Any) -> Any:
            begin()
            try:
                return kind.__call__(this, *args, **kwargs)
            finally:
                end()

        comm.__class__ = type(kind.__name__, (kind,), {"__call__": call})

    def remove(self) -> None:
        """Give the communication its own class again."""
        self._comm.__class__ = self._kind


def _communications(module: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's objects that gather a module's parameters and reduce its gradients."""
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(module, FSDPModule):
        return
    state: Any = module._get_fsdp_state()
    # torch 2.9 has one group per module, later versions a list.
    groups = getattr(state, "_fsdp_param_groups", [getattr(state, "_fsdp_param_group", None)])
    for group in groups:
        for name in ("_all_gather_comm", "_reduce_scatter_comm"):
            if (comm := getattr(group, name, None)) is not None:
                yield comm


def _refuse_other_wrappers(model: nn.Module) -> None:
    """Raise UsageError if the guard cannot read the model's states."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UsageError(
            "sw.Guard does not read the flat parameters of FullyShardedDataParallel (FSDP1). Use "
            "fully_shard (FSDP2), DistributedDataParallel, or shardwise run --guard K."
        )
