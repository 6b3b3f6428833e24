"""Changes to DeepSpeed's configuration, on a stand-in for its classes."""

import sys
from types import ModuleType
from typing import Any

import pytest

from shardwise.tools.report.output import last_words
from shardwise.tools.verify.stock import zero_shards


class Config:
    """Keeps the values that DeepSpeed would read."""

    def _initialize_params(self, section: dict[str, Any]) -> None:
        self.section = section


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> type[Config]:
    """A stand-in for DeepSpeedConfig, without the changes of other tests."""
    kind = type("Config", (Config,), {})
    for name in ("deepspeed", "deepspeed.runtime", zero_shards.ENGINE, "deepspeed.runtime.config"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["deepspeed.runtime.config"].DeepSpeedConfig = kind  # type: ignore[attr-defined]
    return kind


@pytest.mark.parametrize(
    ("total", "own", "steps", "joined"),
    [
        (32, 8, None, 16),  # two ranks make two micro-batches each, and so does one process
        (32, 8, 2, 16),
        (16, 8, None, 8),  # a total that the script has computed for one process
        (16, 8, 2, 8),
        (32, None, 2, None),
        (None, 8, 2, 8),
        ("auto", 8, 2, 8),
    ],
)
def test_batch_of_one_process_is_as_large_as_those_of_all_ranks(
    config: type[Config], total: Any, own: Any, steps: Any, joined: Any
) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {n: v for n, v in zip(names, (total, own, steps), strict=True) if v is not None}
    before = dict(given)
    zero_shards.join_ranks(2)
    made = config()
    made._initialize_params(given)
    assert made.section.get("train_micro_batch_size_per_gpu") == joined
    assert given == before  # the script's own dictionary


def test_last_words_of_torchrun_are_those_of_a_rank() -> None:
    output = """
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in <module>
[rank1]: AssertionError: Invalid data type torch.float64
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
============================================================
"""
    assert last_words(output) == "AssertionError: Invalid data type torch.float64"
    assert last_words("one\nlast\n\n") == "last"
