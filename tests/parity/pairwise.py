"""All-pairs testing: a small set of cases that contains every two values of different factors.

The algorithm is greedy, as in AETG (Cohen, Dalal, Fredman and Patton, 1997), but deterministic.
Each case starts from the first two values that no case combines yet. Then, factor by factor, it
adds the value that covers most new pairs.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Factors = Mapping[str, Sequence[Any]]
Case = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairwise(factors: Factors, allowed: Callable[[Case], bool] = lambda case: True) -> list[Case]:
    """Return cases, each with a value of every factor, that cover all allowed pairs of values.

    `allowed` judges complete and incomplete cases. It must refuse an incomplete case only if no
    further value could make it valid. Raises ValueError if an incomplete case cannot be completed.
    """
    open_pairs = dict.fromkeys(p for p in all_pairs(factors) if allowed(dict(p)))
    cases = []
    while open_pairs:
        case = _filled(dict(next(iter(open_pairs))), factors, open_pairs, allowed)
        for pair in pairs_of(case, factors):
            open_pairs.pop(pair, None)
        cases.append(case)
    return cases


def all_pairs(factors: Factors) -> list[Pair]:
    """Return every two values of different factors."""
    return [
        ((one, value), (other, another))
        for one, other in combinations(factors, 2)
        for value in factors[one]
        for another in factors[other]
    ]


def pairs_of(case: Case, factors: Factors) -> list[Pair]:
    """Return the pairs of values that meet in `case`."""
    return list(combinations([(name, case[name]) for name in factors], 2))


def _filled(
    case: Case, factors: Factors, open_pairs: Mapping[Pair, None], allowed: Callable[[Case], bool]
) -> Case:
    for name in factors:
        if name in case:
            continue
        choices = [value for value in factors[name] if allowed(case | {name: value})]
        if not choices:
            raise ValueError(f"No value of {name} goes with {case}.")
        case[name] = max(
            choices, key=lambda value: _new(case, name, value, tuple(factors), open_pairs)
        )
    return {name: case[name] for name in factors}


def _new(
    case: Case, name: str, value: Any, order: tuple[str, ...], open_pairs: Mapping[Pair, None]
) -> int:
    """Return how many new pairs would meet if `case` took `value`."""
    met = (sorted([(name, value), item], key=lambda i: order.index(i[0])) for item in case.items())
    return sum(tuple(pair) in open_pairs for pair in met)
