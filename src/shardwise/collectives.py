"""The one seam to the other ranks: the only caller of torch.distributed's collectives.

Three transports stand behind it: `Solo` (a group of one), `Gloo` (CPU) and `Nccl` (CUDA). A flat
buffer is cut into one interval per rank by `cuts`, size + 1 ascending offsets, so that rank r
owns [cuts[r], cuts[r + 1]). Intervals may differ in length and may be empty.

Every rank makes the same calls in the same order. Calls are numbered; the number is the tag of
Gloo's messages, so what belongs together meets even when several calls are in flight.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import CollectiveError, LaunchError, PeerLost, UsageError
from shardwise.launch.identity import Identity
from shardwise.layout import even_cuts

Cuts = Sequence[int]


class Handle:
    """A collective in flight. `wait()` returns when its result may be read; once is enough."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish

    def wait(self) -> None:
        """Return when the result is in the buffer. Raises PeerLost when another rank is gone."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Collectives(ABC):
    """The verbs of a group of ranks, over flat contiguous buffers."""

    name: str

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A zeroed flat buffer of `numel` elements in memory that this transport moves well."""
        return torch.zeros(numel, dtype=dtype, device=device)

    @abstractmethod
    def all_reduce(self, buffer: Tensor, *, exact_sum: bool = True) -> Handle:
        """Sum `buffer` over the ranks, in place and alike on all.

        With `exact_sum`, 16-bit floats are summed in fp32 and rounded once.
        """

    @abstractmethod
    def reduce_scatter(self, buffer: Tensor, cuts: Cuts, *, exact_sum: bool = True) -> Handle:
        """Sum `buffer` over the ranks into each rank's own interval of it; the rest is left."""

    @abstractmethod
    def all_gather(self, buffer: Tensor, cuts: Cuts) -> Handle:
        """Send each rank's own interval of `buffer` into the same place on all ranks."""

    @abstractmethod
    def broadcast(self, buffer: Tensor, source: int = 0) -> Handle:
        """Copy `buffer` of rank `source` over that of every rank."""

    @abstractmethod
    def gather_rows(self, row: Tensor) -> Tensor:
        """Stack one small vector of each rank: (k,) on every rank becomes (size, k). Blocks."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has come."""

    @abstractmethod
    def second_group(self) -> Collectives:
        """The same ranks over channels of their own, for calls whose order against the others
        may differ from rank to rank (collectives inside forward and backward)."""

    @abstractmethod
    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        """The group of `groups` that this rank is in; a rank in none stands alone.

        `groups` are disjoint lists of ranks, alike on all ranks. Raises UsageError otherwise.
        """

    def gather_objects(self, value: Any) -> list[Any]:
        """A list of every rank's `value` (picklable), in rank order, on all ranks. Blocks."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        device = self.small_device
        lengths = self.gather_rows(torch.tensor([float(data.numel())], device=device))
        counts = [int(length) for length in lengths.flatten().tolist()]
        cuts = [sum(counts[:rank]) for rank in range(self.size + 1)]
        buffer = torch.zeros(cuts[-1], dtype=torch.uint8, device=device)
        buffer[cuts[self.rank] : cuts[self.rank + 1]] = data.to(device)
        self.all_gather(buffer, cuts).wait()
        whole = buffer.cpu().numpy().tobytes()
        return [pickle.loads(whole[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]

    @property
    def small_device(self) -> torch.device:
        """Where a small vector for `gather_rows` lives."""
        return torch.device("cpu")

    def close(self) -> None:
        """Leave the group."""


class Solo(Collectives):
    """A group of one: every verb is already done."""

    name = "none"

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def all_reduce(self, buffer: Tensor, *, exact_sum: bool = True) -> Handle:
        return Handle()

    def reduce_scatter(self, buffer: Tensor, cuts: Cuts, *, exact_sum: bool = True) -> Handle:
        return Handle()

    def all_gather(self, buffer: Tensor, cuts: Cuts) -> Handle:
        return Handle()

    def broadcast(self, buffer: Tensor, source: int = 0) -> Handle:
        return Handle()

    def gather_rows(self, row: Tensor) -> Tensor:
        return row.unsqueeze(0)

    def barrier(self) -> None:
        return

    def second_group(self) -> Collectives:
        return self

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        _check_groups(groups, self.size)
        return self


class Gloo(Collectives):
    """CPU ranks over Gloo, by its point-to-point messages.

    Gloo's own reduce-scatter is an all-reduce inside and its all-gather copies more than it
    sends, so both are done here by direct exchange: each rank sends every other rank that one's
    interval and sums what comes in, always in rank order. Measured on 64 MB, 2 ranks: 26 ms
    against 100 (reduce-scatter), 19 against 77 (all-gather); `benchmarks/collectives.py` prints
    the figures of this machine.
    """

    name = "gloo"

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(rank, size)
        self._group = group
        self._calls = 0
        self._spare: dict[torch.dtype, list[Tensor]] = {}

    def all_reduce(self, buffer: Tensor, *, exact_sum: bool = True) -> Handle:
        cuts = even_cuts(buffer.numel(), self.size)
        scatter = self.reduce_scatter(buffer, cuts, exact_sum=exact_sum)

        def finish() -> None:
            scatter.wait()
            self.all_gather(buffer, cuts).wait()

        return Handle(finish)

    def reduce_scatter(self, buffer: Tensor, cuts: Cuts, *, exact_sum: bool = True) -> Handle:
        own = _interval(buffer, cuts, self.rank)
        others = [rank for rank in range(self.size) if rank != self.rank]
        scratch = self._borrow(own.numel() * len(others), own.dtype)
        rows = dict(zip(others, scratch.split(own.numel()) if own.numel() else [own] * len(others)))
        works = self._exchange({q: _interval(buffer, cuts, q) for q in others}, rows)

        def finish() -> None:
            self._wait(works, "reduce-scatter")
            rows[self.rank] = own
            _sum_in_rank_order([rows[rank] for rank in range(self.size)], own, exact_sum)
            self._give_back(scratch)

        return Handle(finish)

    def all_gather(self, buffer: Tensor, cuts: Cuts) -> Handle:
        own = _interval(buffer, cuts, self.rank)
        others = [rank for rank in range(self.size) if rank != self.rank]
        works = self._exchange(
            dict.fromkeys(others, own), {q: _interval(buffer, cuts, q) for q in others}
        )
        return Handle(lambda: self._wait(works, "all-gather"))

    def broadcast(self, buffer: Tensor, source: int = 0) -> Handle:
        self._calls += 1
        with self._named("broadcast"):
            work = dist.broadcast(_wire(buffer), group_src=source, group=self._group, async_op=True)
        return Handle(lambda: self._wait([work], "broadcast"))

    def gather_rows(self, row: Tensor) -> Tensor:
        rows = row.new_empty((self.size, row.numel()))
        rows[self.rank] = row
        buffer = rows.view(-1)
        self.all_gather(buffer, range(0, buffer.numel() + 1, row.numel())).wait()
        return rows

    def barrier(self) -> None:
        self.gather_rows(torch.zeros(1))

    def second_group(self) -> Collectives:
        return Gloo(self.rank, self.size, dist.new_group(backend="gloo"))

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        return _split(self.rank, self.size, groups, "gloo", Gloo)

    def close(self) -> None:
        dist.destroy_process_group()

    def _exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> list[dist.Work]:
        """Start one message to and from every other rank; empty ones are not sent."""
        self._calls += 1
        tag = self._calls % 2**20
        works: list[dist.Work | None] = []
        with self._named("exchange"):
            for rank, tensor in receives.items():
                if tensor.numel():
                    works.append(
                        dist.irecv(_wire(tensor), group_src=rank, group=self._group, tag=tag)
                    )
            for rank, tensor in sends.items():
                if tensor.numel():
                    works.append(
                        dist.isend(_wire(tensor), group_dst=rank, group=self._group, tag=tag)
                    )
        return [work for work in works if work is not None]

    def _wait(self, works: Sequence[Any], what: str) -> None:
        with self._named(what):
            for work in works:
                work.wait()

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Turn a transport's error into one that says which call it was, and on which rank."""
        try:
            yield
        except RuntimeError as error:
            raise _explain(error, self.rank, self.size, f"{what} (call {self._calls})") from error

    def _borrow(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Scratch memory, kept between calls so that no step pays for fresh pages."""
        spare = self._spare.setdefault(dtype, [])
        for index, tensor in enumerate(spare):
            if tensor.numel() >= numel:
                return spare.pop(index)[:numel]
        return torch.empty(numel, dtype=dtype)

    def _give_back(self, scratch: Tensor) -> None:
        whole = scratch if scratch._base is None else scratch._base
        self._spare[scratch.dtype].append(whole)


class Nccl(Collectives):
    """CUDA ranks over NCCL, by its own collectives; `wait()` orders its stream and ours."""

    name = "nccl"

    def __init__(
        self, rank: int, size: int, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(rank, size)
        self._device = device
        self._group = group

    def all_reduce(self, buffer: Tensor, *, exact_sum: bool = True) -> Handle:
        wide = _widened(buffer, exact_sum)
        work = dist.all_reduce(_wire(wide), group=self._group, async_op=True)
        return self._handle(work, lambda: _copy_unless_same(buffer, wide))

    def reduce_scatter(self, buffer: Tensor, cuts: Cuts, *, exact_sum: bool = True) -> Handle:
        wide = _widened(buffer, exact_sum)
        parts = [_wire(_interval(wide, cuts, rank)) for rank in range(self.size)]
        if _is_even(cuts):
            work = dist.reduce_scatter_tensor(
                parts[self.rank], _wire(wide), group=self._group, async_op=True
            )
        else:
            work = dist.reduce_scatter(parts[self.rank], parts, group=self._group, async_op=True)
        own = _interval(buffer, cuts, self.rank)
        return self._handle(work, lambda: _copy_unless_same(own, _interval(wide, cuts, self.rank)))

    def all_gather(self, buffer: Tensor, cuts: Cuts) -> Handle:
        parts = [_wire(_interval(buffer, cuts, rank)) for rank in range(self.size)]
        if _is_even(cuts):
            work = dist.all_gather_into_tensor(
                _wire(buffer), parts[self.rank], group=self._group, async_op=True
            )
        else:
            work = dist.all_gather(parts, parts[self.rank], group=self._group, async_op=True)
        return self._handle(work)

    def broadcast(self, buffer: Tensor, source: int = 0) -> Handle:
        work = dist.broadcast(_wire(buffer), group_src=source, group=self._group, async_op=True)
        return self._handle(work)

    def gather_rows(self, row: Tensor) -> Tensor:
        rows = row.new_empty((self.size, row.numel()))
        dist.all_gather_into_tensor(rows.view(-1), row, group=self._group)
        return rows

    def barrier(self) -> None:
        self.gather_rows(torch.zeros(1, device=self._device)).cpu()

    def second_group(self) -> Collectives:
        return Nccl(self.rank, self.size, self._device, dist.new_group(backend="nccl"))

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        def make(rank: int, size: int, group: dist.ProcessGroup) -> Collectives:
            return Nccl(rank, size, self._device, group)

        return _split(self.rank, self.size, groups, "nccl", make)

    @property
    def small_device(self) -> torch.device:
        return self._device

    def close(self) -> None:
        dist.destroy_process_group()

    def _handle(self, work: dist.Work | None, after: Callable[[], None] | None = None) -> Handle:
        assert work is not None

        def finish() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise _explain(error, self.rank, self.size, "collective") from error
            if after is not None:
                after()

        return Handle(finish)


def connect(identity: Identity, device: torch.device, timeout: float) -> Collectives:
    """Join the group that `identity` describes; `timeout` in seconds bounds every wait.

    Raises LaunchError when the others cannot be reached.
    """
    if identity.launcher == "python":
        return Solo()
    backend = "nccl" if device.type == "cuda" else "gloo"
    limit = timedelta(seconds=timeout)
    try:
        if identity.listen_fd is not None or identity.launcher == "shardwise run":
            store = dist.TCPStore(
                identity.address or "127.0.0.1",
                identity.port or 0,
                identity.size,
                is_master=identity.rank == 0,
                timeout=limit,
                master_listen_fd=identity.listen_fd,
            )
            dist.init_process_group(
                backend, store=store, rank=identity.rank, world_size=identity.size, timeout=limit
            )
        else:
            dist.init_process_group(backend, timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"Rank {identity.rank} of {identity.size} cannot join the others at "
            f"{identity.address}:{identity.port} (started by {identity.launcher}): "
            f"{str(error).splitlines()[0]}. Is the port in use by another run, or did a rank not start?"
        ) from error
    if backend == "nccl":
        return Nccl(identity.rank, identity.size, device)
    return Gloo(identity.rank, identity.size)


def _check_groups(groups: Sequence[Sequence[int]], size: int) -> None:
    seen: set[int] = set()
    for rank in (rank for group in groups for rank in group):
        if not 0 <= rank < size:
            raise UsageError(f"Rank {rank} in {groups} does not exist: there are {size} ranks.")
        if rank in seen:
            raise UsageError(f"Rank {rank} is twice in {groups}: each rank belongs to one group.")
        seen.add(rank)


def _split(
    rank: int,
    size: int,
    groups: Sequence[Sequence[int]],
    backend: str,
    make: Callable[[int, int, dist.ProcessGroup], Collectives],
) -> Collectives:
    """Every rank takes part in making every group, and gets its own."""
    _check_groups(groups, size)
    mine: Collectives = Solo()
    for members in groups:
        made = dist.new_group(list(members), backend=backend)
        if rank in members and len(members) > 1:
            assert isinstance(made, dist.ProcessGroup)
            mine = make(sorted(members).index(rank), len(members), made)
    return mine


def _interval(buffer: Tensor, cuts: Cuts, rank: int) -> Tensor:
    return buffer[cuts[rank] : cuts[rank + 1]]


def _is_even(cuts: Cuts) -> bool:
    return len({b - a for a, b in zip(cuts, cuts[1:], strict=False)}) == 1


def _wire(buffer: Tensor) -> Tensor:
    """`buffer` as the backends take it: complex numbers travel as pairs of reals."""
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer


def _widened(buffer: Tensor, exact_sum: bool) -> Tensor:
    narrow = buffer.dtype in (torch.bfloat16, torch.float16)
    return buffer.float() if narrow and exact_sum else buffer


def _copy_unless_same(target: Tensor, source: Tensor) -> None:
    if target.dtype != source.dtype:
        target.copy_(source)


def _sum_in_rank_order(rows: list[Tensor], out: Tensor, exact_sum: bool) -> None:
    """out = rows[0] + rows[1] + ..., always from the left, so that every run gives the same bits.

    `out` may be one of the rows.
    """
    if len(rows) == 2 and _widened(out, exact_sum) is out:
        torch.add(rows[0], rows[1], out=out)
        return
    total = _widened(rows[0], exact_sum)
    total = total.clone() if total is rows[0] else total
    for row in rows[1:]:
        total.add_(row)
    out.copy_(total)


_GONE = ("closed by peer", "connection reset", "broken pipe", "connection refused", "eof")


def _explain(error: RuntimeError, rank: int, size: int, what: str) -> CollectiveError:
    """The error that a user reads when the transport gives up."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    if any(sign in str(error).lower() for sign in _GONE):
        return PeerLost(
            f"Rank {rank} of {size} lost another rank in {what}: {first}. "
            "The cause is on the rank that went away; see its own output."
        )
    if "timed out" in str(error).lower() or "timeout" in str(error).lower():
        return CollectiveError(
            f"Rank {rank} of {size} waited in {what} for a rank that did not come: {first}. "
            "Every rank must make the same calls; --timeout sets how long to wait."
        )
    return CollectiveError(f"Rank {rank} of {size} failed in {what}: {first}.")
