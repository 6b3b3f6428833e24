"""Runs one fault, and judges which rank the report names, how soon, and any leftovers."""

import json
import re
import shutil
import time
from dataclasses import asdict
from pathlib import Path

from tests.random_faults.drawing import SIGNALS, STEPS, Fault, draw
from tests.seeded import Command, Result
from tests.system.launcher import Launcher, Ran

FAULTY = Path(__file__).with_name("faulty.py")
SLOW = 60.0
"""Longest time in seconds from a fault to the end of the run, on a busy machine. For a rank that is
only stopped, the timeout is added."""

COMMAND = Command(
    name="random_faults",
    about="Try faults at random places of a run, and check the launcher's report.",
    thing="fault",
    things="faults",
    fine=("named",),
    wrong=("wrong rank", "nobody named", "taken for success", "hang", "slow", "left behind"),
)
_CLOSING = re.compile(r"^shardwise: rank (\d+) of \d+", re.MULTILINE)


class Runner:
    """Tries faults in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, seed: int) -> Result:
        """Try the fault of `seed`."""
        fault = draw(seed)
        folder = self._folder / f"fault-{seed}"
        folder.mkdir()
        launcher = Launcher(folder)
        try:
            ran, seconds = run(fault, launcher, folder)
            alive = launcher.wait_until_gone(4)
            left = [str(pid) for pid in alive]
            written = (each.name for each in (folder / "temporary").iterdir())
            left += [name for name in written if not name.startswith("torchinductor_")]
            kind, words = judge(fault, ran, seconds, left)
            story = f"exit code {ran.code}\n{ran.out[-3000:]}{ran.err[-6000:]}"
        except AssertionError as error:  # it did not end
            kind, words, story, seconds = "hang", "", str(error), 0.0
        finally:
            launcher.kill_all()
            shutil.rmtree(folder, ignore_errors=True)
        return Result(
            kind=kind,
            of=fault.kind,
            words=f"{fault}: {words}",
            story=story,
            seconds=seconds,
        )


def run(fault: Fault, launcher: Launcher, folder: Path) -> tuple[Ran, float]:
    """Run the script with the fault. Return the run, and the seconds from the fault to its end."""
    told, moment = folder / "fault.json", folder / "moment"
    told.write_text(json.dumps({**asdict(fault), "signals": SIGNALS, "steps": STEPS}))
    flags = ["-n", str(fault.size), "--zero", str(fault.zero), "--transport", fault.transport]
    flags += ["--timeout", str(fault.timeout), "--warn-after", "2", "--device", "cpu"]
    words = ["run", *flags, str(FAULTY), str(told), str(moment)]
    ran = launcher.finish(launcher.start(*words), limit=180)
    return ran, time.time() - float(moment.read_text()) if moment.exists() else 0.0


def judge(fault: Fault, ran: Ran, seconds: float, left: list[str]) -> tuple[str, str]:
    """Return the kind of result, and a few words about it."""
    named = _CLOSING.findall(ran.err)
    last = ran.err.strip().splitlines()[-1][:200] if ran.err.strip() else ""
    if ran.code == 0:
        return "taken for success", last
    if not named:
        return "nobody named", last
    if int(named[-1]) != fault.victim:
        return "wrong rank", f"rank {named[-1]}: {last}"
    if left:
        return "left behind", ", ".join(left)
    # The other ranks wait for a stopped rank until their timeout.
    if seconds > SLOW + (fault.timeout if fault.kind == "stop" else 0.0):
        return "slow", f"{seconds:.1f} s"
    return "named", f"{seconds:.1f} s"
