"""The reference of every comparison: plain PyTorch in one process, which imports nothing of ours.

`python -m tests.parity.plain` trains one problem after another: it reads pickled Problems from
stdin and writes pickled Trained to stdout.
"""

import pickle
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.parity.problems import BATCH, MICRO_ROWS, Problem, loss_of, weight_of


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The results of a training: mean loss and norm before clipping by step, and final state."""

    losses: list[float]
    norms: list[float]
    model: dict[str, Tensor]
    optimizer: dict[str, Any]


def train(problem: Problem) -> Trained:
    """Train `problem` in a plain loop, with the gradient of the mean over each window."""
    model, optimizer, scheduler = problem.model_and_optimizer()
    x, y = problem.data()
    losses, norms = [], []
    for first, end in problem.windows():
        total, loss = weight_of(y[first:end]), 0.0
        for rows in micro_batches(problem, first, end):
            part = loss_of(model, x[rows], y[rows]) * (weight_of(y[rows]) / total)
            part.backward()
            loss += part.item()
        clip = problem.clip or float("inf")
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        losses.append(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return Trained(
        losses=losses, norms=norms, model=model.state_dict(), optimizer=optimizer.state_dict()
    )


def micro_batches(problem: Problem, first: int, end: int) -> list[list[int]]:
    """Return the rows of each forward: the whole window, or with BatchNorm its micro-batches.

    With BatchNorm, micro-batch i is the i-th micro-batch of all workers together, in order.
    """
    if problem.model != "convnet" or problem.micro == "1":
        return [list(range(first, end))]
    size, width = problem.workers, MICRO_ROWS[problem.workers]
    cuts = [first + (end - first) * rank // size for rank in range(size + 1)]
    shares = [range(cuts[rank], cuts[rank + 1]) for rank in range(size)]
    unions = [
        [row for share in shares for row in share[start : start + width]]
        for start in range(0, BATCH, width)
    ]
    return [union for union in unions if union]


def serve() -> None:
    """Answer requests until stdin ends."""
    torch.set_num_threads(1)
    while True:
        try:
            problem = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        trained = train(problem)
        assert not any(name.split(".")[0] == "shardwise" for name in sys.modules)
        pickle.dump(trained, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    # Run the module under the name that the tests import, so that pickles have the same names.
    from tests.parity import plain

    plain.serve()
