"""Which stock scripts can be forked from a process that has imported torch."""

from pathlib import Path

import pytest

from shardwise.tools.verify.stock.warm_rank import can_be_forked


@pytest.mark.parametrize(
    ("line", "forked"),
    [
        ('rank = int(os.environ["LOCAL_RANK"])', True),
        ('if os.environ["MODE"] == "fast": pass', True),
        ('os.environ["OMP_NUM_THREADS"] = "1"', False),
        ('os.environ.setdefault("OMP_NUM_THREADS", "1")', False),
        ('os.environ |= {"CUDA_VISIBLE_DEVICES": ""}', False),
        ('os.environ[names[0]] = "1"', False),
        ("from os import environ as env", False),
        ('os.environ.get("MODE")', True),
        ('os.putenv("A", "1")', False),
        ("from dotenv import load_dotenv", False),
    ],
)
@pytest.mark.parametrize("place", ["script", "module"])
def test_script_that_sets_variables_starts_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, line: str, *, forked: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("import helper\n" if place == "module" else line)
    (tmp_path / "helper.py").write_text(line)
    (tmp_path / "helper.yaml").write_text("a: 1")
    assert can_be_forked([str(path), "--epochs", "3"]) is forked


@pytest.mark.parametrize("words", [["-m", "train"], ["missing.py"], []])
def test_command_without_a_readable_script_starts_as_usual(words: list[str]) -> None:
    assert not can_be_forked(words)
