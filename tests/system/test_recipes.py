"""The recipes, the tour and the notebook run as a reader would run them."""

import os
import re
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.system.documents import ROOT
from tests.system.launcher import Launcher

pytestmark = pytest.mark.slow

RECIPES = ROOT / "examples" / "recipes"
FLAGS = {
    "image_classifier": ["--sync-batch-norm", "--ema-decay", "0.9"],
    "lora": ["--zero", "3"],
    "gan": ["--zero", "2"],
    "long_sequences": ["--context", "2"],
}
ALONE = {"long_sequences": []}
"""Flags for one worker, if they differ."""
SLOW = ("lora", "sft")
"""Recipes that load a large library, which `make test-all` runs."""

RESULT = re.compile(r"epoch|step|best|mean radius|accuracy|adapter")


def results(shardwise: Launcher, *words: str) -> list[str]:
    """Run a program and return its lines that have results, without the rank in front."""
    ran = shardwise.run(*words, env={"OMP_NUM_THREADS": "1"})
    assert ran.code == 0, ran.out + ran.err
    lines = [line.removeprefix("[0] ") for line in ran.out.splitlines()]
    return [line for line in lines if RESULT.match(line)]


def assert_close(some: list[str], others: list[str]) -> None:
    """Compare lines of words and numbers; numbers may differ by the rounding of fp32."""
    number = re.compile(r"\d+\.\d+")
    assert [number.sub("#", line) for line in some] == [number.sub("#", line) for line in others]
    for a, b in zip(some, others, strict=True):
        expected = [float(found) for found in number.findall(a)]
        assert [float(found) for found in number.findall(b)] == pytest.approx(expected, abs=5e-4)


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(path.stem, marks=pytest.mark.full if path.stem in SLOW else ())
        for path in sorted(RECIPES.glob("*.py"))
    ],
)
def test_recipe_prints_the_same_on_one_and_two_workers(
    shardwise: Launcher, tmp_path: Path, recipe: str
) -> None:
    script = str(RECIPES / f"{recipe}.py")
    flags = FLAGS.get(recipe, [])
    two = results(shardwise, "run", "-n", "2", *flags, script)
    for folder in tmp_path.glob("*-checkpoints"):  # one worker begins from the start, too
        shutil.rmtree(folder)
    one = results(shardwise, "run", "-n", "1", *ALONE.get(recipe, flags), script)
    assert len(one) >= 2
    assert_close(one, two)


TEXT = Path(os.environ.get("TESTS_PTB", ROOT.parent / "shared" / "data" / "wikitext-2-small"))
"""Folder of real text, one paragraph per line."""


@pytest.mark.full  # it loads a large library
@pytest.mark.skipif(not TEXT.is_dir(), reason="TESTS_PTB names no folder of text")
@pytest.mark.usefixtures("warm_programs")
def test_fine_tuning_on_real_text_is_the_same_on_two_workers(
    shardwise: Launcher, tmp_path: Path
) -> None:
    for name, count in (("train", 300), ("valid", 60)):
        lines = (TEXT / f"{name}.txt").read_text().splitlines()
        (tmp_path / f"{name}.txt").write_text("\n".join(lines[:count]))
    words = [str(RECIPES / "sft.py"), "--data", str(tmp_path), "--epochs", "2"]
    one, two = (results(shardwise, "run", "-n", workers, *words) for workers in ("1", "2"))
    assert len(one) == 2
    assert_close(one, two)
    first, last = (float(line.split("token, ")[1].split()[0]) for line in one)
    assert last < first < 7


@pytest.mark.usefixtures("warm_programs")
def test_stream_recipe_resumes_in_mid_epoch(shardwise: Launcher) -> None:
    script = str(RECIPES / "streaming.py")
    results(shardwise, "run", "-n", "2", script)
    resumed = results(shardwise, "run", "-n", "1", script)
    assert [line.split(":")[0] for line in resumed] == ["step 30", "step 40"]


def test_every_recipe_has_a_page() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    shown = set(re.findall(r"<!-- include (\S+) -->", pages))
    assert shown == {str(path.relative_to(ROOT)) for path in RECIPES.glob("*.py")}


def test_notebook_runs_from_top_to_bottom() -> None:
    path = ROOT / "examples" / "quickstart.ipynb"
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=100, resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])
    )
    losses = re.findall(r"last loss (\d+\.\d+)", printed)
    assert len(losses) == 3
    assert [float(loss) for loss in losses] == pytest.approx([float(losses[0])] * 3, abs=1e-5)
