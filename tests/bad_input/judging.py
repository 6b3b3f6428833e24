"""Tries one invalid input, and judges whether the command rejected it in one sentence."""

from __future__ import annotations

from pathlib import Path
from random import Random

from tests.bad_input.drawing import draw
from tests.bad_input.trying import Seen, try_input
from tests.distributed.group import FORKED
from tests.seeded import Command, Result

REAL = 0.1
"""Fraction of inputs that are tried in a new process rather than a forked one."""

TRACES = ("Traceback (most recent call last)", "Exception ignored in")
SLOW = 60.0
LONGEST = 3
"""Most lines that a refusal may have."""

_TELLS = ("does nothing", "has no effect", "overrides")
"""Words in warnings about a setting without effect."""

COMMAND = Command(
    name="bad_input",
    about="Try invalid input from every source, and check that it is refused in one sentence.",
    thing="input",
    things="inputs",
    fine=("sentence", "a line says so"),
    wrong=("traceback", "hang", "silently taken", "no word", "many words", "left behind", "slow"),
)


class Runner:
    """Tries inputs in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        first = FORKED.Process(target=int)  # starts the fork server
        first.start()
        first.join()

    def __call__(self, seed: int) -> Result:
        """Try the input of `seed`."""
        given = draw(seed)
        real = given.around == "no files" or Random(-seed).random() < REAL
        seen = try_input(given, self._folder / f"input-{seed}", real=real)
        kind, words = judge(seen)
        return Result(
            kind=kind,
            of=given.kind,
            words=f"{given}: {words}",
            story=f"exit code {seen.code}\n{seen.out[-3000:]}{seen.err[-6000:]}",
            seconds=seen.seconds,
        )


def judge(seen: Seen) -> tuple[str, str]:
    """Return the kind of result, and a few words about it."""
    lines = [line for line in seen.err.splitlines() if line.strip()]
    last = lines[-1][:300] if lines else ""
    if seen.code is None:
        return "hang", last
    if any(words in seen.out + seen.err for words in TRACES):
        return "traceback", last
    if seen.left:
        return "left behind", ", ".join(seen.left)
    if seen.code == 0:
        said = any(word in line for line in lines for word in _TELLS)
        return ("a line says so" if said else "silently taken"), last
    if not lines or "shardwise: " not in seen.err:
        return "no word", last
    if "\x1b" in seen.err or len(lines) > LONGEST:
        return "many words", " / ".join(lines)[:300]
    if seen.seconds > SLOW:
        return "slow", f"{seen.seconds:.1f} s: {last}"
    return "sentence", last
