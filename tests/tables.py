"""The rows of parametrised tables that `make test` runs. `make test-all` runs the others too.

    @each_value(zero=[0, 1, 2, 3], size=[2, 3])
    def test_trains_alike(group, zero, size): ...

    @pytest.mark.parametrize(("first", "second"), covering([(1, "a"), (1, "b"), (2, "a")]))

Together, the rows of `make test` contain each value of each axis at least once. They are chosen
without chance, so that a test is either always in `make test` or never.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def covering(rows: Iterable[Sequence[Any]], often: int = 1) -> list[ParameterSet]:
    """Return the parameters of `rows`, and mark those that `make test` need not run as `full`.

    Each row has one value per axis. `make test` runs each value at least `often` times, or as often
    as it occurs. Each row is chosen for the most values that are still missing, and among such rows
    for the values that have been run least.
    """
    rows = [tuple(row) for row in rows]
    axes = [[(axis, repr(value)) for axis, value in enumerate(row)] for row in rows]
    missing = Counter({value: often for row in axes for value in row})
    run: Counter[tuple[int, str]] = Counter()
    chosen: set[int] = set()
    while len(chosen) < len(rows):
        gains = {
            number: (sum(missing[v] > 0 for v in axes[number]), -sum(run[v] for v in axes[number]))
            for number in range(len(rows))
            if number not in chosen
        }
        best = max(gains, key=lambda number: gains[number])
        if gains[best][0] == 0:
            break
        chosen.add(best)
        run.update(axes[best])
        missing.subtract(axes[best])
    return [
        pytest.param(*row, marks=() if number in chosen else pytest.mark.full)
        for number, row in enumerate(rows)
    ]


def each_value(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by the product of `axes`; `make test` runs each value at least once."""
    return pytest.mark.parametrize(tuple(axes), covering(product(*axes.values())), ids=_name)


def _name(value: Any) -> str | None:
    return str(value) if isinstance(value, dict | list | tuple) else None
