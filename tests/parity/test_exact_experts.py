"""The exact mode with mixtures of experts: identical bits for every `--expert` and `-n`."""

from typing import Any

import pytest

from tests.parity.test_exact_mode import alone, trained  # noqa: F401, the fixture `alone`
from tests.tables import covering

PLAN = {"expert_plan": {"blocks.*": {"router": "gate", "experts": "experts", "top_k": 2}}}
FURTHER: dict[str, dict[str, Any]] = {
    "moe": {},
    "planned": PLAN,
    "mixtral": {},
    "mixtral-grouped": {},
}

SIZES = ((4, 4), (4, 2), (2, 2), (4, 1), (2, 1))
"""Numbers of workers, and `--expert`."""


@pytest.mark.parametrize(
    ("sizes", "zero", "model"),
    covering(
        [(sizes, zero, model) for sizes in SIZES for zero in (0, 3) for model in FURTHER], often=2
    ),
)
def test_same_bits_as_one_worker(group, alone, sizes, zero, model):  # noqa: F811
    workers, expert = sizes
    expected = alone(model, settings=tuple(FURTHER[model].items()))
    found = group(workers, expert=expert)(trained, 4, model, {"zero": zero, **FURTHER[model]})
    assert set(found) == {expected}
