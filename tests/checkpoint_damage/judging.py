"""Judgement of one damage: does the load keep our promises?"""

import shutil
from pathlib import Path
from random import Random

from tests import seeded
from tests.checkpoint_damage.damaging import Damage, damage
from tests.checkpoint_damage.training import STEPS, Seen, saved, verify_and_continue
from tests.distributed.group import Group, RankFailed, RankLate
from tests.seeded import Result

LIMIT = 60.0
"""Maximum seconds of a trial."""

SLOW = 10.0
"""Maximum CPU seconds of a rank for the resume of a few kilobytes. LIMIT covers waiting."""

COMMAND = seeded.Command(
    name="checkpoint_damage",
    about="Damage checkpoints at random, and check their loads.",
    thing="damage",
    things="damages",
    fine=("sentence", "fell back with a line", "equal", "starts from scratch"),
    wrong=(
        "silent difference",
        "fell back in silence",
        "verify sees nothing",
        "traceback",
        "ranks differ",
        "slow",
        "hang",
    ),
)


class Runner:
    """Damages copies of the checkpoints of two runs in `folder`, one with split files."""

    def __init__(self, group: Group, folder: Path) -> None:
        self._group, self._folder = group, folder
        self.runs: list[tuple[Path, list[str]]] = []
        """Folders of the runs, with the digest of each step."""
        for name, split in (("whole", 5.0), ("split", 2e-6)):
            run = folder / name
            digests = group(saved, run, split, limit=120)[0]
            self.runs.append((run, digests))

    def __call__(self, seed: int) -> Result:
        """Damage a copy according to `seed`, and judge the load."""
        rng = Random(-seed)
        run, digests = rng.choice(self.runs)
        row, call = rng.choice([0, 1, 2, 3]), rng.choice(["resume", "resume", "load"])
        copy = self._folder / f"damaged-{seed}"
        shutil.copytree(run, copy)
        done = damage(seed, copy)
        words = f"{done.words}; {call} in row {row}, {run.name} files"
        try:
            seen = self._group(verify_and_continue, copy, row, call, limit=LIMIT)
            kind, said, story = judged(done, seen, digests, call)
            seconds = max(each.seconds for each in seen)
        except RankLate as error:
            kind, said, story, seconds = "hang", f"more than {LIMIT} s", str(error), LIMIT
        except RankFailed as error:
            kind, said, story, seconds = "traceback", "a rank failed", str(error), 0.0
        finally:
            shutil.rmtree(copy, ignore_errors=True)
        return Result(
            kind=kind,
            of=done.kind,
            words=f"{words}: {said}",
            story=story,
            seconds=seconds,
        )


def judged(done: Damage, seen: list[Seen], digests: list[str], call: str) -> tuple[str, str, str]:
    """Return kind, words and details of the result that all ranks saw."""
    main = seen[0]
    traces = [each.trace or each.verify_trace for each in seen if each.trace or each.verify_trace]
    if traces:
        return "traceback", traces[0].strip().split("\n")[-1], "\n".join(traces)
    if len({(each.steps, each.digest, bool(each.refusal)) for each in seen}) > 1:
        return "ranks differ", str(seen), ""
    if max(each.seconds for each in seen) > SLOW:
        return "slow", f"{max(each.seconds for each in seen):.1f} s", ""
    if main.verified == 0 and not done.known:
        return "verify sees nothing", main.refusal, "\n".join(main.lines)
    if main.refusal:
        return "sentence", main.refusal, ""
    if not main.steps:
        kind = "starts from scratch" if done.kind == "most files gone" else "silent difference"
        return kind, "from step 0", "\n".join(main.lines)
    if main.digest != digests[main.steps - 1]:
        return "silent difference", f"at step {main.steps}", "\n".join(main.lines)
    if main.steps == STEPS:
        return "equal", "", ""
    told = [line for line in main.lines if "skipped a checkpoint" in line]
    if call == "resume" and (told or done.kind == "most files gone"):
        return "fell back with a line", told[0] if told else "nothing was left of it", ""
    return "fell back in silence", f"to step {main.steps}", "\n".join(main.lines)
