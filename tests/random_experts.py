"""Random mixtures of experts, trained by an engine and by a loop in one plain process.

    python -m tests.random_experts --count 500
    python -m tests.random_experts --count 100 --compile

A seed chooses the number of experts, k, scores, losses, a shared expert, the batches and their
masks, the optimizer, the row, and the numbers of ranks. Each program must match to 1e-8 in fp64,
also if its units are compiled.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from typing import Any

from tests.distributed.experts import LIMIT, ONE_GRAPH, Problem, compare, compiled, plain, trained

SIZES = (
    *((1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 2, 1), (4, 4, 1)),
    *((2, 2, 2), (4, 2, 2), (4, 4, 2), (4, 4, 4)),
)
"""Numbers of ranks, `--expert` and `--tensor`."""


def program(seed: int) -> tuple[tuple[int, int, int], Problem]:
    """Return the number of ranks, `--expert`, `--tensor`, and the training of a seed."""
    draw = random.Random(seed)
    size, expert, tensor = SIZES[seed % len(SIZES)]
    experts = draw.randint(max(expert, 2), 9)
    options: dict[str, Any] = {
        "experts": experts,
        "shared": draw.random() < 0.5,
        "top_k": draw.randint(1, min(experts, 4)),
        "scores": draw.choice(["softmax", "sigmoid"]),
        "normalize": draw.random() < 0.6,
        "scale": draw.choice([1.0, 1.7]),
        "balance": draw.choice([0.0, 0.3]),
        "z_loss": draw.choice([0.0, 0.05]),
        "bias_rate": draw.choice([0.0, 0.02]),
    }
    rows = tuple(
        tuple(draw.randint(1, 6) for _ in range(draw.randint(1, 3)))
        for _ in range(draw.randint(1, 3))
    )
    settings: dict[str, Any] = {"zero": draw.randint(0, 3)}
    if draw.random() < 0.2:
        settings["activations"] = "recomputed"
    problem = Problem(
        optimizer=draw.choice(["sgd", "adamw"]),
        steps=3,
        rows=rows,
        options=options,
        max_norm=draw.choice([None, 0.05]),
        settings=settings,
        few_labels=draw.random() < 0.2,
        seed=seed,
    )
    return (size, expert, tensor), problem


def check(groups: Any, seed: int, *, compiles: bool = False) -> None:
    """Train the program of `seed` in both ways, and compare. Raises AssertionError.

    If `compiles` is true, units must be compiled as one graph each.
    """
    (size, expert, tensor), problem = program(seed)
    expected = plain(problem)
    ranks = groups(size, expert=expert, tensor=tensor)
    if not compiles:
        for ours in ranks(trained, problem):
            compare(ours, expected)
        return
    problem = replace(problem, settings={**problem.settings, "compile": True})
    for ours, _ in ranks(compiled, ONE_GRAPH, trained, problem, limit=LIMIT):
        compare(ours, expected)


def main() -> None:
    """Check programs of consecutive seeds, and exit with 1 if any differs."""
    from tests.distributed.group import Groups

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100, help="number of programs (default 100)")
    parser.add_argument("--first", type=int, default=0, help="first seed (default 0)")
    parser.add_argument("--compile", action="store_true", help="compile units")
    args = parser.parse_args()
    groups, failed = Groups(), []
    try:
        for seed in range(args.first, args.first + args.count):
            try:
                check(groups, seed, compiles=args.compile)
            except AssertionError as error:
                failed.append(seed)
                print(f"seed {seed}: {str(error)[:400]}", flush=True)
    finally:
        groups.close()
    print(f"{args.count} programs, {len(failed)} differences {failed or ''}")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
