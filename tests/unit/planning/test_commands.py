"""Printed commands are accepted by the launcher, for every placement and any words."""

import random
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardwise.cli import main as cli
from shardwise.layout.placement import Placement, Tier
from shardwise.messages.printable import in_shell
from shardwise.tools.plan import plan_command
from shardwise.tools.plan.catalogue import read_catalogue
from shardwise.tools.plan.choice import Choice
from shardwise.tools.plan.cluster import parse_cluster
from shardwise.tools.plan.memory import MemoryPlan
from shardwise.tools.plan.observe import PLAIN, ObservedStep, Script
from shardwise.tools.plan.plans import Plan, PlanRequest
from shardwise.tools.plan.search import Line, Question

WORDS = (
    *("--lr=1e-3", "-n", "3", "", "a b", "it's", '"q"', "$HOME", "`x`", "a\\b", "*", ";", "~"),
    *("tab\there", "new\nline", "\x1b[31m", "\x85", "ü", "\u2028", "\udcff", "--", "a\x01f", "!1"),
)
SCRIPTS = ("train.py", "my train.py", "-odd.py", "it's.py", "tab\t.py", "ü/träin.py")
FLAGS = ((), ("--precision", "bf16-mixed"), ("--units", "Block*,head.?"), ("--seed", "3"))
SHOW = "shardwise() { printf '%s\\0' \"$@\" ==; }\n"
"""A bash command that prints its arguments, with == after the last."""


def plan_of(script, on):
    cluster = parse_cluster(on, read_catalogue(user=False))
    question = Question({PLAIN: ObservedStep(None)}, cluster)
    return Plan(PlanRequest(script, on), question)


def typed(commands):
    """Return the words that bash makes of each command."""
    text = SHOW + "\n".join(f"shardwise {each}" for each in commands)
    shell = ["bash", "-c", text.encode("utf-8", "surrogateescape")]
    found = subprocess.run(shell, capture_output=True, timeout=30, check=True).stdout
    rows = found.decode("utf-8", "surrogateescape").split("\0==\0")[:-1]
    return [row.split("\0") for row in rows]


def drawn(rng, folder):
    """Return a line that a search may produce, for up to 8 devices."""
    data, tensor, pipeline = rng.choice([(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)])
    away = rng.choice(["", "optimizer", "both"])
    level = rng.choice([0, 1, 2, 3] if data > 1 else [0, 2] if away else [0])
    row, tier = Placement.zero(level), rng.choice([Tier("cpu"), Tier("nvme", folder)])
    if away and level != 1:
        row = row.resting(optimizer=tier)
    if away == "both" and level == 3:
        row = row.resting(parameters=tier, optimizer=tier)
    schedules = ("1f1b", "gpipe", "interleaved", "zero-bubble") if level < 3 else ("1f1b", "gpipe")
    schedule = rng.choice(schedules) if pipeline > 1 else "1f1b"
    choice = Choice(
        row=row,
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        schedule=schedule,
        micro_batch=2,
        micro_batches=rng.choice([1, 4]),
        recomputed=schedule != "zero-bubble" and rng.random() < 0.5,
        in_rows=rng.random() < 0.5,
    )
    return Line(choice, MemoryPlan({}, {}, [], {}, 0, 0, "", (), 0), None, 0)


@pytest.mark.parametrize(
    ("apart", "quantised", "changes", "expected"),
    [
        (False, False, {}, True),
        (True, False, {}, False),  # on GPUs
        (False, True, {}, False),
        (False, False, {"expert": 2}, False),
        (False, False, {"context": 2}, True),
        (False, False, {"context": 4}, False),  # no worker could continue after a loss
        (False, False, {"row": Placement.zero(2).resting(optimizer=Tier("nvme", "d"))}, False),
        (False, False, {"row": Placement.zero(2).resting(optimizer=Tier("cpu"))}, True),
    ],
)
def test_second_copies_are_noted_only_for_placements_that_survive(
    apart, quantised, changes, expected
):
    made = SimpleNamespace(
        question=SimpleNamespace(hardware=SimpleNamespace(apart=apart)),
        record=SimpleNamespace(groups=[SimpleNamespace(quantised=quantised)], parameters=[]),
    )
    choice = Choice(**{"row": Placement.zero(2), "data": 4, "micro_batch": 1} | changes)
    assert Plan._can_survive(made, choice) is expected


@pytest.mark.parametrize("seed", range(3))
def test_printed_command_is_accepted_as_typed(seed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("ü").mkdir()
    for name in SCRIPTS:
        Path(name).touch()
    rng = random.Random(seed)
    folders = ["disk", "dis k", "it's", "a:b", "tab\t"]
    asked, printed = [], []
    for _ in range(40):
        words = (rng.choice(SCRIPTS), *rng.choices(WORDS, k=rng.randrange(5)))
        if rng.random() < 0.2:
            words = ("-m", "shardwise.tools.plan.hf_model", *words[1:])
        made = plan_of(Script(words, rng.choice(FLAGS)), "8xH100")
        line = drawn(rng, rng.choice(folders))
        asked.append(words)
        printed.append(in_shell(made.command_words(line)))
        assert shlex.split(made.command(line)) == made.command_words(line)
        assert printed[-1].isprintable()
    commands = typed(printed)
    assert len(commands) == len(asked)
    ranks = []
    for _, run, *given in commands:
        assert cli.main([run, "--dry-run", *given]) == 0, capsys.readouterr().err
        told = capsys.readouterr().out
        ranks.append("run " + told.split("each rank: ")[1].split("\nin folder: ")[0])
    python = {True: [sys.executable, "-P"], False: [sys.executable]}
    expected = [["run", *python[words[0] == "-m"], *words] for words in asked]
    assert typed(ranks) == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on", "8xH1000"], "H1000"),
        (["--on", "8x"], "--on '8x' is not a cluster"),
        (["--within", "10"], "--within and --budget need --tokens"),
        (["--tokens", "2e9", "--within", "soon"], "--within takes days or hours"),
        (["--json", "none/plan.json"], "no such folder: none. Create it first"),
        (["--json", "made"], "--json made is a folder"),
        (["--page", "train.py"], "--page train.py is a file"),
        (["--hf", "train.py"], "--hf train.py is not JSON"),
        (["--hf", "list.json"], "--hf list.json has no model_type"),
        (["--hf", "none.json"], "--hf none.json: no such file"),
        (["--hardware", "none.toml"], "none.toml"),
    ],
)
def test_refuses_bad_arguments_before_the_script_runs(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("open('ran', 'w')")
    Path("list.json").write_text("[]")
    Path("made").mkdir()
    on = [] if "--on" in words else ["--on", "2xH100"]
    assert cli.main(["plan", *on, *words, "train.py"]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1, told
    assert not Path("ran").exists()


def test_shows_the_context_size_that_the_user_asks_for():
    def line(context, method, number=0):
        choice = SimpleNamespace(context=context, context_method=method)
        return SimpleNamespace(choice=choice, number=number)

    slow = [line(2, "ulysses"), line(4, "gathered"), line(4, "ulysses"), line(4, "ulysses", 1)]
    lines = [*(line(1, "", number) for number in range(plan_command.SHOWN)), *slow]
    assert plan_command.shown(lines, 0) == lines[: plan_command.SHOWN]
    assert plan_command.shown(lines, 4) == [*lines[: plan_command.SHOWN], *slow[1:3]]
    assert plan_command.shown(slow, 4) == slow
