"""Recognises what went wrong in a stock script, from what its ranks and its reference recorded.

A finding needs no comparison: the records of the ranks alone prove it, such as equal batches on all
ranks. A suspect is a possible cause of a difference: a trial run with an alteration confirms it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.tools.verify.comparing import Comparison, StepDifference
from shardwise.tools.verify.records import Step, WholeTensor
from shardwise.tools.verify.stock.stock_runs import StockRecords

CLOSE = 1e-3
"""Relative difference up to which a ratio of gradients is taken for a whole number."""


@dataclass(frozen=True)
class Finding:
    """A mistake that the records of the ranks prove."""

    name: str
    words: str


@dataclass(frozen=True)
class StockSuspect:
    """A possible cause: `ranks` and `reference` are the alterations that take it away."""

    name: str
    words: str
    ranks: Mapping[str, Any] = field(default_factory=dict)
    reference: Mapping[str, Any] = field(default_factory=dict)


# -- findings -------------------------------------------------------------------------------


def findings(made: StockRecords) -> list[Finding]:
    """Return what the records of the ranks alone prove, the most particular first."""
    if len(made.ranks) == 1:
        return []
    return [
        *_other_initial_values(made),
        *_frozen_on_some(made),
        *_same_data(made),
        *_without_set_epoch(made),
        *_duplicates_in_evaluation(made),
        *_buffers_apart(made),
        *_normalisation(made),
        *_clipping(made),
    ]


def _other_initial_values(made: StockRecords) -> Iterator[Finding]:
    for steps in made.training.engines.values():
        names = [
            name for (kind, name), w in steps[0].tensors.items() if kind == "model" and w.strays
        ]
        if names:
            yield Finding(
                "initial values",
                f"The ranks start with different parameters ({_some(names)}). Seed all ranks alike "
                "before the model is made, or broadcast it from rank 0.",
            )


def _frozen_on_some(made: StockRecords) -> Iterator[Finding]:
    trained = [{name for each in facts["trained"] for name in each} for facts in made.ranks]
    common, any_rank = set.intersection(*trained), set.union(*trained)
    if names := sorted(any_rank - common):
        yield Finding(
            "frozen on some ranks",
            f"{_some(names)} require gradients on some ranks only. Freeze the same parameters on "
            "all ranks.",
        )


def _same_data(made: StockRecords) -> Iterator[Finding]:
    if made.ranks[0]["tensor_parallel"]:
        return  # ranks that share the layers compute with the same rows
    trained = [
        [tuple(each["rows"]) for each in facts["seen"] if each["trains"] and each["rows"]]
        for facts in made.ranks
    ]
    least = min(map(len, trained))
    if least >= 2 and all(rows[:least] == trained[0][:least] for rows in trained):
        yield Finding(
            "same data on every rank",
            f"All {len(trained)} ranks were given the same samples in each of {least} batches. "
            "Give each rank its own part: DataLoader(sampler=DistributedSampler(dataset)).",
        )


def _without_set_epoch(made: StockRecords) -> Iterator[Finding]:
    facts = made.ranks[0]
    if any("set_epoch" in events for events in facts["events"]):
        return
    orders: dict[str, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for each in facts["seen"]:
        if each["trains"]:
            orders[each["loader"]][each["epoch"]].append(each["rows"])
    for key, epochs in orders.items():
        loader = facts["loaders"][key]
        if loader["sampler"] != "DistributedSampler" or not loader["shuffles"] or len(epochs) < 2:
            continue
        first, second = (rows for _, rows in sorted(epochs.items())[:2])
        least = min(len(first), len(second))
        if least and first[:least] == second[:least]:
            yield Finding(
                "sampler without set_epoch",
                "Epoch 2 has the order of epoch 1. Call sampler.set_epoch(epoch) at the start of "
                "each epoch.",
            )


def _duplicates_in_evaluation(made: StockRecords) -> Iterator[Finding]:
    if made.ranks[0]["tensor_parallel"]:
        return
    rows: dict[tuple[str, int], Counter[int]] = defaultdict(Counter)
    for facts in made.ranks:
        for each in facts["seen"]:
            if not each["trains"]:
                rows[each["loader"], each["epoch"]].update(each["rows"])
    for (key, _), counts in rows.items():
        samples = made.ranks[0]["loaders"][key]["samples"]
        total = sum(counts.values())
        if samples is not None and total > samples and len(counts) <= samples:
            yield Finding(
                "duplicates in evaluation",
                f"Evaluation counted {total} samples of a dataset with {samples}: the sampler "
                "repeats samples so that all ranks have as many. Drop the repeated ones, or "
                "weigh each rank's metric by its own number of samples.",
            )
            return


def _buffers_apart(made: StockRecords) -> Iterator[Finding]:
    for steps in made.training.engines.values():
        for step in steps[1:]:
            names = [n for (kind, n), w in step.tensors.items() if kind == "buffer" and w.strays]
            if names:
                yield Finding(
                    "buffers not synchronised",
                    f"After step {step.number - 1} the ranks have different values in buffers "
                    f"({_some(names)}). A checkpoint of rank 0 has those of rank 0 only.",
                )
                return


def _normalisation(made: StockRecords) -> Iterator[Finding]:
    """Check that the losses of each step add up to one mean over all its items.

    Each loss is `factor` times a mean over `items`. A factor that all losses have in common may be
    the script's own, such as the weight of a term.
    """
    size = len(made.ranks)
    first: float | None = None
    for number, rows in enumerate(zip(*made.steps, strict=False)):
        terms = [term for row in rows for term in row["terms"]]
        if not terms or any(not term["items"] for term in terms):
            return  # what a loss is a mean over is not known
        backwards = max(len(row["terms"]) for row in rows)
        if backwards > 1 and any(row["batches"] != len(row["terms"]) for row in rows):
            return  # several losses of one batch, or a loss of several batches
        factors = math.fsum(term["factor"] for term in terms) / size
        if first is None:
            first = factors
            wrong = max(factors, 1 / factors)
            if backwards > 1 and abs(wrong - backwards) < CLOSE * backwards:
                yield _wrong_sum(number, backwards, is_large=factors > 1)
                return
        if abs(factors - first) > CLOSE * first:
            yield Finding(
                "last short window",
                f"The losses of step {number} have factors that add up to {factors:.4g}, and those "
                f"of the first step to {first:.4g}: it has {backwards} micro-batches, and the "
                "script divides by another number.",
            )
            return
        each = [term["factor"] / term["items"] for term in terms]
        if max(each) > (1 + CLOSE) * min(each):
            items = sorted({term["items"] for term in terms})
            times = max(each) / min(each)
            yield Finding(
                "mean of means",
                f"Step {number} averages means over different numbers of items ({items[0]:g} to "
                f"{items[-1]:g}), so items of small batches count up to {times:.3g} times as much "
                "as others. Sum the losses, and divide by the number of items of all ranks and "
                "micro-batches.",
            )
            return


def _wrong_sum(number: int, backwards: int, *, is_large: bool) -> Finding:
    """Return the finding for micro-batches whose factors do not add up to 1."""
    if is_large:
        return Finding(
            "accumulation not divided",
            f"Step {number} adds up {backwards} losses, each a mean, without dividing by "
            f"{backwards}: its gradient is {backwards} times too large.",
        )
    return Finding(
        "accumulation divided twice",
        f"Step {number} divides the losses of {backwards} micro-batches twice: its gradient is "
        f"{backwards} times too small.",
    )


def _clipping(made: StockRecords) -> Iterator[Finding]:
    for number, events in enumerate(zip(*(facts["events"] for facts in made.ranks), strict=False)):
        norms = [[float(e.split()[1]) for e in each if e.startswith("clip ")] for each in events]
        if not all(norms):
            continue
        first = [each[-1] for each in norms]
        if max(first) > (1 + CLOSE) * min(first):
            yield Finding(
                "clipping by a local norm",
                f"In step {number} the ranks clip by different norms ({min(first):.4g} to "
                f"{max(first):.4g}). Compute the norm over the parameters of all ranks.",
            )
            return
        for each in events:
            names = [event.split()[0] for event in each]
            both = "unscale" in names and "clip" in names
            if both and names.index("clip") < names.index("unscale"):
                yield Finding(
                    "clipping before unscaling",
                    f"Step {number} clips gradients that are still multiplied by the loss scale. "
                    "Call scaler.unscale_(optimizer) before clip_grad_norm_.",
                )
                return


# -- suspects -------------------------------------------------------------------------------


def suspects(
    reference: StockRecords, made: StockRecords, comparison: Comparison, tolerance: float
) -> list[StockSuspect]:
    """Return what may have made the first difference, the most particular first."""
    first = comparison.first(tolerance)
    if first is None:
        return []
    return [
        *_of_rates(reference, made),
        *_of_gradients(reference, made, first),
        *_of_loss_weights(reference, made),
        StockSuspect(
            "dropout",
            "Each rank draws its own dropout masks, and one process draws others. Without dropout "
            "the runs agree.",
            {"no_dropout": None},
            {"no_dropout": None},
        ),
    ]


def _of_rates(reference: StockRecords, made: StockRecords) -> Iterator[StockSuspect]:
    size = len(made.ranks)
    theirs, ours = reference.ranks[0]["rates"], made.ranks[0]["rates"]
    ratios = [
        b / a
        for one, two in zip(theirs, ours, strict=False)
        for a, b in zip(one, two, strict=True)
        if a
    ]
    if not ratios or all(abs(ratio - 1) < 1e-9 for ratio in ratios):
        return
    if all(abs(ratio - size) < CLOSE for ratio in ratios):
        yield StockSuspect(
            "rate scaled by the number of ranks",
            f"The learning rate is multiplied by {size}, the number of ranks. With the rate of one "
            "process the runs agree. If the total batch needs a larger rate, one process with that "
            "batch needs it as well.",
            {"scale_rates": 1 / size},
        )
    counts = [
        Counter(event for events in facts["events"] for event in events)["schedule"]
        for facts in (reference.ranks[0], made.ranks[0])
    ]
    if counts[1] > counts[0]:
        yield StockSuspect(
            "scheduler stepped several times",
            f"Schedulers made {counts[1]} steps on each rank and {counts[0]} in one process. With "
            "the rates of one process the runs agree. Step a scheduler once per optimizer step.",
            {"rates": theirs},
        )
    yield StockSuspect(
        "other learning rates",
        "The learning rates differ from those of one process. With the same rates the runs agree.",
        {"rates": theirs},
    )


def _of_gradients(
    reference: StockRecords, made: StockRecords, first: StepDifference
) -> Iterator[StockSuspect]:
    size = len(made.ranks)
    theirs, ours = (_gradients(each, first) for each in (reference, made))
    if any(whole.strays for whole in ours.values()):
        yield StockSuspect(
            "gradients not reduced",
            f"The ranks update with different gradients in step {first.number - 1}. If they are "
            "averaged over all ranks, the runs agree. Wrap the model in "
            "DistributedDataParallel, call its forward (not model.module's), or all-reduce every "
            "gradient over the group of all ranks.",
            {"average_gradients": None},
        )
        return
    ratio = common_ratio(theirs, ours)
    if ratio is None or abs(ratio - 1) < CLOSE:
        return
    if abs(ratio - size) < CLOSE * size:
        yield StockSuspect(
            "gradients summed",
            f"Gradients are {size} times those of one process: they are summed over {size} ranks, "
            "and not averaged.",
            {"scale_gradients": 1 / size},
        )
    elif abs(ratio * size - 1) < CLOSE:
        yield StockSuspect(
            "gradients averaged twice",
            f"Gradients are 1/{size} of those of one process: they are divided by {size} twice.",
            {"scale_gradients": float(size)},
        )
    else:
        yield StockSuspect(
            "gradients scaled",
            f"Gradients are {ratio:.6g} times those of one process.",
            {"scale_gradients": 1 / ratio},
        )


def _of_loss_weights(reference: StockRecords, made: StockRecords) -> Iterator[StockSuspect]:
    pairs = [loss_factors(each) for each in (made, reference)]
    if any(each is None for each in pairs) or all(
        abs(f - 1) < CLOSE for each in pairs for rank in each or () for step in rank for f in step
    ):
        return
    yield StockSuspect(
        "mean of means",
        "Losses are means over different numbers of items, and are averaged as if the numbers were "
        "equal. If each is weighed by its number of items, the runs agree.",
        {"loss_factors": pairs[0]},
        {"loss_factors": pairs[1]},
    )


def loss_factors(made: StockRecords) -> list[list[list[float]]] | None:
    """Return by rank, step and backward the factor that makes a step's losses one mean over all
    items; None if the items of a loss are not known."""
    size = len(made.ranks)
    factors: list[list[list[float]]] = [[] for _ in made.ranks]
    for rows in zip(*made.steps, strict=False):
        terms = [term for row in rows for term in row["terms"]]
        if not terms or any(term["items"] is None or not term["factor"] for term in terms):
            return None
        total = math.fsum(term["items"] for term in terms)
        for rank, row in enumerate(rows):
            factors[rank].append(
                [term["items"] / total * size / term["factor"] for term in row["terms"]]
            )
    return factors


def _gradients(made: StockRecords, first: StepDifference) -> dict[str, WholeTensor]:
    steps: Sequence[Step] = made.training.engines[first.engine]
    number = max(first.number, 1)
    return {
        name: whole for (kind, name), whole in steps[number].tensors.items() if kind == "gradient"
    }


def common_ratio(
    theirs: Mapping[str, WholeTensor], ours: Mapping[str, WholeTensor]
) -> float | None:
    """Return the factor that all gradients have in common; None if there is none."""
    ratios = []
    for name, whole in theirs.items():
        other = ours.get(name)
        if other is None or not whole.fingerprint.norm:
            continue
        if whole.values is not None and other.values is not None:
            one, two = whole.values.double(), other.values.double()
            ratio = float(torch.dot(one, two) / torch.dot(one, one))
            if float((two - ratio * one).norm()) > CLOSE * abs(ratio) * float(one.norm()):
                return None
        else:
            ratio = other.fingerprint.norm / whole.fingerprint.norm
        ratios.append(ratio)
    if not ratios or max(ratios) - min(ratios) > CLOSE * max(map(abs, ratios)):
        return None
    return sum(ratios) / len(ratios)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
