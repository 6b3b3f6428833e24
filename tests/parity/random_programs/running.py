"""Runs one program on both sides, and returns the result."""

import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise import errors
from tests.distributed.group import Groups, RankLate, story
from tests.distributed.worker import Outcome
from tests.parity.random_programs import refusals
from tests.parity.random_programs.comparing import differences, reason
from tests.parity.random_programs.plain import Ran
from tests.parity.random_programs.program import Program
from tests.parity.random_programs.sharded import group_settings, run_phase

ROOT = Path(__file__).parents[3]
LIMIT = 60.0
"""Time limit of a phase of a program, in seconds."""

PERTURBED = 3
"""Number of runs of plain PyTorch with parameters one ulp off, if ours differs from it."""

KINDS = ("equal", "refused", "different", "crash", "hang", "no program")
"""The kinds of results. "no program": plain PyTorch cannot run it either."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a program: one of KINDS, in a few `words`, and the details."""

    kind: str
    words: str = ""
    story: str = ""
    seconds: float = 0.0
    """Seconds of CPU on all ranks and in the plain process, if it ran to its end."""

    @property
    def reason(self) -> str:
        """Return the words without their values."""
        return reason(self.words)

    @property
    def right(self) -> str | None:
        """Return why a refusal is valid, if it is."""
        return refusals.why(self.words) if self.kind == "refused" else None

    @property
    def fine(self) -> bool:
        """Return whether the result keeps the promise."""
        return self.kind == "equal" or self.right is not None

    def is_like(self, other: "Result") -> bool:
        """Return whether both have the same cause, by their words."""
        if self.kind == "different":
            return other.kind == "different"
        return (self.kind, self.reason) == (other.kind, other.reason)


class PlainSide:
    """The process that imports nothing of ours."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.parity.random_programs.plain"],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __call__(
        self, program: Program, *, watch: bool = False, perturbed: int | None = None
    ) -> Ran | str:
        """Return the results of `program`, or why plain PyTorch cannot run it.

        With a seed `perturbed`, each parameter is first moved by one ulp.
        """
        assert self._process.stdin
        assert self._process.stdout
        pickle.dump((program, watch, perturbed), self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


class Runner:
    """Runs programs on both sides."""

    def __init__(self, groups: Groups, plain: PlainSide, limit: float = LIMIT) -> None:
        self._groups, self._plain, self._limit = groups, plain, limit

    def __call__(self, program: Program) -> Result:
        """Run `program`; if it differs, run it again to find the first difference."""
        result = self._run(program, watch=False)
        if result.kind == "different":
            watched = self._run(program, watch=True)
            if watched.kind == "different":
                return Result(
                    kind="different",
                    words=watched.words,
                    story=f"{result.story}\nwith a look at all tensors after each step:\n"
                    f"{watched.story}",
                )
            words = f"{result.words} (not when all is looked at after each step)"
            return Result(kind="different", words=words, story=result.story)
        return result

    def _run(self, program: Program, *, watch: bool) -> Result:
        wanted = self._plain(program, watch=watch)
        if isinstance(wanted, str):
            return Result(kind="no program", words=wanted.strip().split("\n")[-1], story=wanted)
        found = self._ranks(program, watch=watch)
        if isinstance(found, Result):
            return found
        seconds = wanted.seconds + found.seconds
        apart = list(differences(program, found, wanted))
        if apart:  # in an unstable program, rounding alone may do that
            spread = [self._plain(program, watch=watch, perturbed=n) for n in range(PERTURBED)]
            others = [each for each in spread if isinstance(each, Ran)]
            apart = list(differences(program, found, wanted, others))
        lines = [f"step {number}: {words}" for number, words in apart]
        lines.sort(key=lambda line: int(line.split()[1].rstrip(":")))
        if lines:
            return Result(kind="different", words=lines[0], story="\n".join(lines[:30]))
        return Result(kind="equal", seconds=seconds)

    def _ranks(self, program: Program, *, watch: bool) -> Ran | Result:
        """Return the results of the ranks in all phases, or the error."""
        found = Ran()
        with tempfile.TemporaryDirectory() as folder:
            for number, phase in enumerate(program.phases):
                group = self._groups(phase.config.size, **group_settings(phase.config))
                try:
                    outcomes = group.outcomes(
                        run_phase, program, number, folder, watch, limit=self._limit
                    )
                except RankLate as error:
                    return Result(kind="hang", words=str(error).split("\n")[0], story=str(error))
                if any(outcome.error for outcome in outcomes):
                    return gone_wrong(outcomes)
                several = [pickle.loads(outcome.result) for outcome in outcomes]
                if len({digest for _, digest in several}) > 1:
                    return Result(kind="different", words="step 99: ranks end with other models")
                ran: Ran = several[0][0]
                found.losses += ran.losses
                found.norms += ran.norms
                found.seen |= ran.seen
                found.seconds += sum(each.seconds for each, _ in several)
        return found


def gone_wrong(outcomes: list[Outcome]) -> Result:
    """Return a refusal or a crash, by the error that is not a consequence of another."""
    failed = [each for each in outcomes if each.error]
    primary = [each for each in failed if not each.secondary] or failed
    first = primary[0]
    assert first.error
    kind, words = first.error
    refused = first.module == errors.__name__ and not first.secondary
    return Result(
        kind="refused" if refused else "crash",
        words=f"{kind}: {words}",
        story=story(run_phase, outcomes),
    )


@dataclass
class Counts:
    """The results of many programs."""

    by_kind: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    refusals: dict[str, int] = field(default_factory=dict)
    configurations: set[Any] = field(default_factory=set)

    def add(self, program: Program, result: Result) -> None:
        """Count one result."""
        self.by_kind[result.kind] += 1
        self.configurations |= {phase.config for phase in program.phases}
        if result.kind == "refused":
            self.refusals[result.reason] = self.refusals.get(result.reason, 0) + 1
