"""Decides which ranks are left after a loss, and whether they finish or repeat the pending step.

A commit is a step, or a call such as `engine.save`. Each rank counts:

    prepared    number of commits that this rank could finish alone: it has a step's totals
    confirmed   number of commits that every rank was prepared for, as far as this one knows

A rank updates only after it has confirmed the step. So if one rank has confirmed a step, all ranks
are prepared for it, and every remaining rank finishes it. If no remaining rank has confirmed a
step, none has changed its state, and the step is repeated. A lost rank may have confirmed the step
and updated its state, but that state is lost with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import CollectiveError
from shardwise.messages.printable import ranks_in_words


@dataclass(frozen=True, kw_only=True)
class Report:
    """The report of a rank that has lost another one.

    Args:
        rank: The reporting rank's number in the run.
        generation: Number of earlier decisions, as far as the reporting rank knows.
        prepared: Number of commits that the reporting rank could finish alone.
        confirmed: Number of commits that every rank was prepared for, as far as the reporting
            rank knows.
        admits: Spares that may join, because the reporting rank holds the full states.
    """

    rank: int
    generation: int
    prepared: int
    confirmed: int
    admits: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The remaining ranks, and the number of commits that they finish.

    Args:
        generation: Number of this decision, which is higher than in every report.
        members: The remaining ranks of the run, in the order in which they joined it, and then
            the spares that join. The first one hosts the store that connects them.
        confirmed: Number of commits that all members finish before they continue.
        admits: True if all remaining ranks hold the full states, so that spares can join.
        address: Address at which the first member listens.
        port: Port at which the first member listens.
    """

    generation: int
    members: tuple[int, ...]
    confirmed: int
    admits: bool = False
    address: str = ""
    port: int = 0


def leader(members: Sequence[int], ended: Collection[int]) -> int:
    """Return the rank that decides: the first of `members` whose process has not exited."""
    found = next((rank for rank in members if rank not in ended), None)
    if found is None:
        raise CollectiveError("All ranks of the run were lost while this spare joined them.")
    return found


def decide(
    reports: Mapping[int, Report],
    members: Sequence[int],
    ended: Collection[int],
    spares: Sequence[int] = (),
) -> Decision | None:
    """Return the decision, or None if a rank that has not exited has not yet reported.

    Args:
        reports: The reports so far, by rank.
        members: The ranks that were in the group before the loss.
        ended: The members and spares whose processes have exited.
        spares: The spares that join, as far as the deciding rank knows.

    Raises:
        CollectiveError: The reports contradict each other.
    """
    left = tuple(rank for rank in members if rank not in ended)
    if any(rank not in reports for rank in left):
        return None
    heard = [reports[rank] for rank in left]
    # A rank that has not gathered the full states would need a lost rank's copies in a layout that
    # spares do not know.
    admits = bool(spares) and all(set(spares) <= set(report.admits) for report in heard)
    joining = tuple(rank for rank in spares if admits and rank not in ended)
    if any(rank not in reports for rank in joining):
        return None
    confirmed = max(report.confirmed for report in heard)
    unprepared = [report.rank for report in heard if report.prepared < confirmed]
    if unprepared:
        raise CollectiveError(
            f"Step {confirmed} is complete on some ranks, but its totals are missing on "
            f"{ranks_in_words(unprepared)}. Start again from the last checkpoint."
        )
    # A rank that reports an older generation does not know of a later decision. That decision's
    # group was never formed, because its first member ended.
    generation = 1 + max(report.generation for report in heard)
    return Decision(
        generation=generation, members=left + joining, confirmed=confirmed, admits=admits
    )


def stands(decision: Decision, mine: Report) -> bool:
    """Return whether this rank must finish its pending step. Otherwise it repeats the step."""
    return decision.confirmed > mine.confirmed


@dataclass(frozen=True)
class Divisions:
    """The sets of ranks that can train together.

    Args:
        unit: Number of adjacent ranks that can only train together, such as a replica of a model
            that is split over several ranks. If one of these ranks is lost, the others leave.
        sizes: The possible numbers of ranks, ascending, or () if any number is possible.
        reason: The setting that causes this, for messages.
    """

    unit: int = 1
    sizes: tuple[int, ...] = ()
    reason: str = ""

    def usable(self, members: Sequence[int], left: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks in `left`, in order, that continue to train.

        Args:
            members: The ranks that trained together before the loss, in whole units.
            left: The remaining ranks, and ranks that join them.
        """
        starts = range(0, len(members), self.unit)
        units = [members[first : first + self.unit] for first in starts]
        broken = {rank for unit in units if not set(unit) <= set(left) for rank in unit}
        whole = tuple(rank for rank in left if rank not in broken)
        return whole[: self.fit(len(whole))]

    def fit(self, size: int) -> int:
        """Return the largest possible number of ranks up to `size`."""
        return max((each for each in self.sizes if each <= size), default=size)

    def describe(self, size: int) -> str:
        """Return what happens after a loss in a group of `size` ranks, or "" if all continue."""
        smaller = " or ".join(str(each) for each in self.sizes if each < size)
        if smaller:
            return f"after losses: on {smaller} workers ({self.reason}); others leave"
        if self.unit == size > 1:
            return (
                f"after a loss: the run ends, because {self.reason} needs all of its workers; with "
                "--restarts it returns to the last checkpoint"
            )
        if self.unit > 1:
            return f"after a loss: all {self.unit} workers of its group ({self.reason}) leave"
        return ""

    def check_left(self, usable: Sequence[int], lost: Sequence[int]) -> None:
        """Raise CollectiveError if no rank is usable because ranks were lost."""
        if not usable:
            raise CollectiveError(
                f"Lost {ranks_in_words(lost)}, and no complete group of {self.unit} workers is "
                f"left for {self.reason}. Start again from the last checkpoint; with --restarts "
                "the launcher does so."
            ).blaming(lost)


def count_losses(lost: Collection[int], hosts: Mapping[int, str]) -> int:
    """Return the number of losses: a host that has lost all of its ranks counts once.

    Args:
        lost: The lost ranks.
        hosts: The host of each rank, including the lost ones.
    """
    left = {host for rank, host in hosts.items() if rank not in lost}
    whole = {hosts[rank] for rank in lost} - left
    return len(whole) + sum(hosts[rank] in left for rank in lost)


def are_first_of_host(leaving: Sequence[int], hosts: Mapping[int, str], most: int) -> bool:
    """Return whether the ranks in `leaving` are too many losses, unless their whole host leaves.

    For the arguments, see `count_losses` and `check_number`.
    """
    several = len(set(hosts.values())) > 1
    are_together = len({hosts[rank] for rank in leaving}) == 1
    return several and are_together and count_losses(leaving, hosts) > most


def check_number(hosts: Mapping[int, str], left: Sequence[int], most: int) -> None:
    """Raise CollectiveError if there were more than `most` losses at once (see `count_losses`).

    Args:
        hosts: The ranks before the loss, and the host of each.
        left: The remaining ranks.
        most: Maximum number of losses.
    """
    lost = [rank for rank in hosts if rank not in left]
    if count_losses(lost, hosts) > most:
        once = "" if len(set(hosts.values())) == 1 else " (a whole host counts once)"
        raise CollectiveError(
            f"{len(lost)} workers were lost at once ({ranks_in_words(lost)}), more than "
            f"--survive {most} allows{once}. Start again from the last checkpoint; with --restarts "
            "the launcher does so."
        ).blaming(lost)


def copy_places(hosts: Sequence[str]) -> list[int]:
    """Return, for each member, the index of the member that holds its second copy.

    The copy is on another host, except for members of a host with more than half of all members.
    On a single host, it is on the next member.

    Args:
        hosts: The host of each member.
    """
    # Sort the members by host, and shift them by the size of the largest host. A shift of this size
    # leads out of every host, unless it leads around the end of the list back into the largest one.
    by_host = sorted(range(len(hosts)), key=lambda place: hosts.index(hosts[place]))
    shift = max(Counter(hosts).values()) % len(hosts) or 1
    found = [0] * len(hosts)
    for index, place in enumerate(by_host):
        found[place] = by_host[(index + shift) % len(hosts)]
    return found


def holders(members: Sequence[int], left: Sequence[int], copies: Sequence[int]) -> list[int]:
    """Return, for each of `members`, the index in `left` of the rank that holds its sharded state.

    Args:
        members: The ranks before the loss.
        left: The remaining ranks.
        copies: For each of `members`, the index of the member that holds its second copy.

    Raises:
        CollectiveError: A member and the holder of its copy are both lost.
    """
    found = []
    for rank, place in zip(members, copies, strict=True):
        copy = members[place]
        holder = rank if rank in left else copy
        if holder not in left:
            raise CollectiveError(
                f"Ranks {rank} and {copy} were lost together, and rank {copy} held the second copy "
                f"of rank {rank}'s optimizer state. Start again from the last checkpoint; with "
                "--restarts the launcher does so."
            ).blaming([rank, copy])
        found.append(left.index(holder))
    return found
