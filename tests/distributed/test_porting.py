"""docs/porting.md: each section as plain PyTorch, and on workers, has the same losses in fp64."""

import os
import random
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

import shardwise as sw
from shardwise.world.common_random_stream import CommonRandomStream

GUIDE = Path(__file__).parents[2] / "docs" / "porting.md"
_SECTION = re.compile(
    r"^## (?P<name>[^\n]+)\n(?:(?!^## ).)*?(?:<!-- rows: (?P<rows>[\d ]+) -->\n)?"
    r"```diff\n(?P<code>.*?)```",
    re.MULTILINE | re.DOTALL,
)


def sections():
    return {m["name"]: (m["code"], m["rows"]) for m in _SECTION.finditer(GUIDE.read_text())}


def side(code, sign):
    """Return one side of a diff: unmarked lines and the lines marked with `sign`."""
    return "".join(
        line[1:] for line in code.splitlines(keepends=True) if line[0] in (" ", sign, "\n")
    )


def losses_of(script):
    """Run it in fp64; it leaves its losses."""
    before, names = torch.get_default_dtype(), {"__name__": "__main__"}
    torch.set_default_dtype(torch.float64)
    try:
        exec(compile(script, "script.py", "exec"), names)
    finally:
        torch.set_default_dtype(before)
    for name in ("engine", "vae_engine", "judge_engine"):
        if name in names:
            names[name].close()
    return names["losses"]


def ported_case(world, script, zero):
    def init(seed):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        world.draws, world.current_batch.batch = CommonRandomStream(world.device), None
        world.current_batch.watch(world.draws.before_batch)
        return world

    real, sw.init = sw.init, init
    os.environ["SHARDWISE_ZERO"] = str(zero)
    try:
        return losses_of(script)
    finally:
        del os.environ["SHARDWISE_ZERO"]
        sw.init = real


ALL_CELLS = pytest.param(True, marks=pytest.mark.full, id="every size in every row")


@pytest.mark.parametrize("whole", [pytest.param(False, id="two and three workers"), ALL_CELLS])
@pytest.mark.parametrize("name", list(sections()))
def test_the_losses_are_those_of_plain_pytorch(group, name, whole):
    """`make test` runs this on two workers with one ZeRO stage, by turns, and on three with the
    last one."""
    code, words = sections()[name]
    rows = [int(row) for row in (words or "0 2 3").split()]
    expected = losses_of(side(code, "-"))
    assert len(set(expected)) > 2
    cells = [(2, rows[list(sections()).index(name) % len(rows)]), (3, rows[-1])]
    for size, zero in product((1, 2, 3), rows) if whole else cells:
        for ours in group(size)(ported_case, side(code, "+"), zero):
            assert ours == pytest.approx(expected, rel=1e-8, abs=1e-12), (size, zero)


def test_the_table_leads_to_every_section():
    text = GUIDE.read_text()
    linked = set(re.findall(r"\]\(#([\w-]+)\)", text))
    found = {name.lower().replace(" ", "-") for name in sections()}
    assert linked == found
