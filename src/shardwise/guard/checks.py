"""Exchanges the findings of all ranks and acts on them. Used by engines and stock loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.errors import GuardError
from shardwise.guard import copies
from shardwise.guard.findings import GRADIENT, OUTPUT, Finding
from shardwise.guard.memory import Piece


class SmallGroup(Protocol):
    """The ranks that compare their states, and the collectives that they use for it."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def small_device(self) -> torch.device: ...

    def gather_rows(self, row: Tensor) -> Tensor:
        """Stack a small vector from every rank: (k,) on each rank becomes (size, k)."""

    def gather_plain(self, value: Any) -> list[Any]:
        """Return every rank's `value`, which must be JSON-serializable."""

    def read(self, rows: Tensor) -> Tensor:
        """Copy `rows` to the CPU."""


class Checks:
    """Compares states across ranks, and warns, repairs or stops.

    All ranks must call the methods at the same steps.

    Args:
        group: Ranks that step together.
        place: Number of this rank's shard. Ranks with the same number hold the same shard.
        action: "stop", "warn" or "restore".
        say: Prints a line on the main rank only.
        say_once: Like `say`, but prints the same line only once.
        step: Number of completed steps.
    """

    def __init__(
        self,
        group: SmallGroup,
        place: float,
        action: str,
        say: Callable[[str], None],
        say_once: Callable[[str], None],
        step: int = 0,
    ) -> None:
        self.group = group
        self.action = action
        self.clean = step
        """The last step after which all checks passed."""
        self.found: list[Finding] = []
        """Findings of this rank that the other ranks do not know yet."""
        self.times: list[list[float]] = []
        """The times of each rank at the last exchange."""
        self._place = place
        self._say = say
        self._say_once = say_once
        self._reported: set[tuple[object, ...]] = set()
        self._unstable: set[tuple[str, str]] = set()
        """Kind and name of results that differ between two runs on all ranks."""

    def exchange(
        self, step: int, pieces: Sequence[Piece], times: Sequence[float] = ()
    ) -> list[Finding]:
        """Compare `pieces` across ranks, and return the findings of all ranks. Collective.

        Also gathers step times: the argument `times` holds this rank's times. Afterwards, the
        attribute `times` holds the times of every rank.
        """
        group = self.group
        digests = [copies.digest(pieces, is_shard=False), copies.digest(pieces, is_shard=True)]
        values = [*digests, self._place, float(bool(self.found)), *times]
        # Keep digests on the device, so that one copy brings all ranks' digests to the host.
        row = torch.stack(
            [torch.as_tensor(v, dtype=torch.float64, device=group.small_device) for v in values]
        )
        rows = group.read(group.gather_rows(row)).tolist()
        self.times = [columns[4:] for columns in rows]
        own, self.found = self.found, []
        found: list[Finding] = []
        # The rows are the same on all ranks, so all of them take part in the next collectives.
        if any(columns[3] for columns in rows):
            gathered = group.gather_plain([each.plain() for each in own])
            found = [Finding.of_plain(each) for mine in gathered for each in mine]
            found = self._without_unstable(found)
            # A rank with sharded parameters may have computed with another rank's flipped value in
            # one of its two runs only.
            owners = {each.rank for each in found if each.kind not in (GRADIENT, OUTPUT)}
            found = [each for each in found if not owners or each.rank in owners]
        suspects = [each.rank for each in found if each.rank is not None]
        if len({whole for whole, *_ in rows}) > 1:
            sums = group.gather_plain(copies.checksums(pieces, is_shard=False))
            found += copies.differences(step, dict(enumerate(sums)), suspects)
        by_shard: dict[float, set[float]] = {}
        for _, shard, place, *_ in rows:
            by_shard.setdefault(place, set()).add(shard)
        if any(len(shards) > 1 for shards in by_shard.values()):
            sums = group.gather_plain(copies.checksums(pieces, is_shard=True))
            for place in by_shard:
                ranks = [rank for rank, columns in enumerate(rows) if columns[2] == place]
                found += copies.differences(step, {r: sums[r] for r in ranks}, suspects)
        if not found:
            self.clean = step
        return found

    def _without_unstable(self, found: Sequence[Finding]) -> list[Finding]:
        """Return `found` without the results that differed between the two runs on every rank.

        A defective device causes a difference on its own rank only. A nondeterministic operation
        causes a difference on all ranks.
        """
        computed = [each for each in found if each.kind in (GRADIENT, OUTPUT)]
        by_name: dict[tuple[str, str], set[int | None]] = {}
        for each in computed:
            for name in each.names:
                by_name.setdefault((each.kind, name), set()).add(each.rank)
        size = self.group.size
        new = {key for key, ranks in by_name.items() if size > 1 and len(ranks) == size}
        if new - self._unstable:
            names = ", ".join(sorted(name for _, name in new - self._unstable)[:4])
            self._say_once(
                f"guard: {names} differ between two runs on all ranks, so an operation is not "
                "deterministic. They are not compared: not proved. To compare them: "
                "torch.use_deterministic_algorithms(True)"
            )
            self._unstable |= new
        kept = [each for each in found if each.kind not in (GRADIENT, OUTPUT)]
        for each in computed:
            stable = tuple(name for name in each.names if (each.kind, name) not in self._unstable)
            if stable:
                kept.append(Finding(each.step, each.kind, stable, each.rank, each.evidence))
        return kept

    def act(
        self, found: Sequence[Finding], repair: Callable[[int], bool], advice: Callable[[], str]
    ) -> None:
        """Warn, repair or stop because of the findings. Collective.

        Args:
            found: The findings, which are the same on all ranks.
            repair: Copies the states of the given rank over the wrong ones. Returns False if that
                is not possible.
            advice: Returns the last part of the error message, which names the next steps.

        Raises:
            GuardError: The action is "stop", or it is "restore" and no rank has intact copies.
        """
        if self.action == "warn":
            for each in found:
                # A difference that stays is found again in each check.
                key = each.kind, each.names, each.rank
                if key not in self._reported:
                    self._reported.add(key)
                    self._say(f"shardwise: guard: {each}")
            return
        source = self._intact_rank(found) if self.action == "restore" else None
        if source is not None and repair(source):
            for each in found:
                self._say(f"shardwise: guard: {each}. Copied from rank {source}")
            return
        ranks = sorted({each.rank for each in found if each.rank is not None})
        shown = "; ".join(str(each) for each in found)
        raise GuardError(f"The guard found an error. {shown}. {advice()}").blaming(ranks)

    def _intact_rank(self, found: Sequence[Finding]) -> int | None:
        """Return a rank whose states are correct, or None if it is not known."""
        bad = {each.rank for each in found}
        # A wrong computation has already entered the sum of all ranks' gradients.
        if None in bad or {each.kind for each in found} & {GRADIENT, OUTPUT}:
            return None
        return next((rank for rank in range(self.group.size) if rank not in bad), None)
