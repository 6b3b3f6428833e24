"""`make test` runs every value of a table, and `make test-all` every row."""

from itertools import product

from tests.tables import covering


def often(rows: list[tuple[object, ...]], at_least: int = 1) -> list[tuple[object, ...]]:
    """Return the rows that `make test` runs."""
    return [tuple(each.values) for each in covering(rows, at_least) if not each.marks]


def test_each_value_is_run_and_no_row_is_lost() -> None:
    rows = list(product(range(4), ("gloo", "shared"), (True, False)))
    assert [tuple(each.values) for each in covering(rows)] == rows
    assert often(rows) == [
        (0, "gloo", True),
        (1, "shared", False),
        (2, "gloo", True),
        (3, "shared", False),
    ]


def test_values_are_run_as_often_as_asked() -> None:
    rows = list(product(range(3), "ab"))
    chosen = often(rows, 2)
    assert all(sum(value in row for row in chosen) >= 2 for value in (0, 1, 2, "a", "b"))


def test_rows_that_are_no_product() -> None:
    assert often([(1, "a"), (1, "b"), (2, "a")]) == [(1, "a"), (1, "b"), (2, "a")]
    assert often([(1, "a"), (2, "b"), (1, "b"), (3, "b")]) == [(1, "a"), (2, "b"), (3, "b")]
    assert often([(settings(),), (settings(),)]) == [(settings(),)]


def settings() -> dict[str, int]:
    """Return a value that has no hash, as settings have none."""
    return {"zero": 3}
