"""Lists possible causes of a difference between a stock script and its reference.

Such a suspect is confirmed by a trial run with its alterations (see alterations.py).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.tools.verify.comparing import Comparison, StepDifference
from shardwise.tools.verify.records import Step, WholeTensor
from shardwise.tools.verify.stock.findings import (
    CLOSE,
    clip_norms,
    is_of_batch_norm,
    parallel_ratio,
    some,
)
from shardwise.tools.verify.stock.stock_runs import StockRecords


@dataclass(frozen=True)
class StockSuspect:
    """A possible cause of a difference.

    `ranks` and `reference` are the alterations that remove it from the ranks and the reference.
    """

    name: str
    words: str
    ranks: Mapping[str, Any] = field(default_factory=dict)
    reference: Mapping[str, Any] = field(default_factory=dict)
    is_mistake: bool = True
    """False if a correct script also has this difference."""
    is_proved: bool = False
    """Whether the records prove the cause, so that no trial is needed."""


def suspects(
    reference: StockRecords, made: StockRecords, comparison: Comparison, tolerance: float
) -> list[StockSuspect]:
    """Return possible causes of the first difference, most specific first."""
    first = comparison.first(tolerance)
    if first is None:
        return []
    return [
        *_of_rates(reference, made),
        *_of_gradients(reference, made, first),
        *_of_norms_of_shards(reference, made, first),
        *_of_norms(reference, made, first),
        *_of_updates(reference, made, first, tolerance),
        *_of_loss_weights(reference, made),
        *_of_batch_norm(made),
        *_of_dropout(made),
        *_of_loss_terms(made),
        *of_bf16(made),
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
            f"The learning rate is multiplied by {size}, the number of ranks. With the rate of the "
            "single process, the runs agree. If the total batch needs a larger rate, set it "
            "without using the number of ranks.",
            {"scale_rates": 1 / size},
        )
    counts = [
        Counter(event for events in facts["events"] for event in events)["schedule"]
        for facts in (reference.ranks[0], made.ranks[0])
    ]
    if counts[1] > counts[0]:
        yield StockSuspect(
            "scheduler stepped several times",
            f"Schedulers make {counts[1]} steps on each rank, but {counts[0]} in one process. With "
            "the rates of the single process, the runs agree. Step a scheduler once per optimizer "
            "step.",
            {"rates": theirs},
        )
    yield StockSuspect(
        "other learning rates",
        "The learning rates differ from the rates of one process. With the same rates, the runs "
        "agree. Compute the rate without using the number of ranks or the rank.",
        {"rates": theirs},
    )


def _of_gradients(
    reference: StockRecords, made: StockRecords, first: StepDifference
) -> Iterator[StockSuspect]:
    size, number = len(made.ranks), max(first.number, 1)
    theirs, ours = (_gradients(each, first) for each in (reference, made))
    steps = made.training.engines[first.engine]
    models = {name: whole for (kind, name), whole in steps[0].tensors.items() if kind == "model"}
    if missing := [n for n, w in ours.items() if len(w.copies) < len(models[n].copies)]:
        yield StockSuspect(
            "unused parameters",
            f"In step {number - 1}, only some ranks have a gradient for {some(missing)}, so only "
            "these ranks update it. Give every rank the reduced gradient, or wrap the model in "
            "DistributedDataParallel(find_unused_parameters=True).",
            {"share_gradients": missing},
        )
    if apart := [name for name, whole in ours.items() if whole.strays]:
        yield _unreduced(made, ours, apart, number)
        return
    ratios = _ratios(reference, made, theirs, ours, number)
    if not ratios or all(abs(ratio - 1) < CLOSE for ratio in ratios.values()):
        return
    if _agree(ratios.values()):
        yield _scaled(reference, made, sum(ratios.values()) / len(ratios))
        return
    wrong = {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) >= CLOSE}
    if _agree(wrong.values()):
        yield _partly_scaled(made, models, wrong, size)


def _unreduced(
    made: StockRecords, ours: Mapping[str, WholeTensor], apart: Sequence[str], number: int
) -> StockSuspect:
    """Return the suspect for gradients that differ between ranks."""
    size = len(made.ranks)
    distinct = {(p.bits, p.placed) for p in ours[apart[0]].copies.values()}
    called = {int(key.split()[1]) for key in made.ranks[0]["groups"]}
    which = "all" if len(apart) == len(ours) else some(apart)
    trial = {"average_gradients": list(apart)}
    if 1 < len(distinct) < size or (called and max(called) < size):
        within = max(called) if called else size // len(distinct)
        return StockSuspect(
            "reduced over the wrong group",
            f"Gradients ({which}) are reduced over groups of {within} of the {size} ranks, so in "
            f"step {number - 1} the ranks update with different gradients. If they are averaged "
            "over all ranks, the runs agree. Reduce them over the group of all ranks.",
            trial,
        )
    if made.ranks[0]["static"]:
        return StockSuspect(
            "static_graph with a graph that changes",
            "DistributedDataParallel(static_graph=True) does not reduce gradients "
            f"({which}) in step {number - 1}. If they are averaged over all ranks, the runs agree. "
            "static_graph expects the same graph in each step, and one backward pass per forward "
            "pass. Add up the losses before backward, or remove static_graph=True.",
            trial,
        )
    return StockSuspect(
        "gradients not reduced",
        f"In step {number - 1}, the ranks update with different gradients ({which}). If they are "
        "averaged over all ranks, the runs agree. Wrap the model in DistributedDataParallel and "
        "call the wrapper, not model.module, or all-reduce every gradient over the group of all "
        "ranks.",
        trial,
    )


def _scaled(reference: StockRecords, made: StockRecords, ratio: float) -> StockSuspect:
    """Return the suspect for gradients that are all wrong by the factor `ratio`."""
    size = len(made.ranks)
    if abs(ratio - size) < CLOSE * size:
        rows = [[each["rows"] for each in facts["seen"] if each["trains"]] for facts in made.ranks]
        if rows[0] and all(each == rows[0] for each in rows):
            return StockSuspect(
                "loss multiplied by the ranks",
                f"Gradients are {size} times as large as in one process, and all ranks receive the "
                "same rows, of which each rank computes a part. Either each rank multiplies its "
                f"loss by {size}, or gradients are summed over ranks. Remove the factor, or divide "
                f"the sum by {size}.",
                {"scale_gradients": 1 / size},
            )
        return StockSuspect(
            "gradients summed",
            f"Gradients are {size} times as large as in one process. Either they are summed over "
            f"the {size} ranks instead of averaged, or each rank multiplies its loss by {size}. "
            "Average the gradients, or remove the factor.",
            {"scale_gradients": 1 / size},
        )
    divisors = {*_divisors(reference), *_divisors(made)}
    # A mean over the rows of a batch has a larger divisor in one process than on a rank.
    if abs(ratio * size - 1) < CLOSE and len(divisors) == 1 and None not in divisors:
        return StockSuspect(
            "sums averaged over ranks",
            f"Gradients are 1/{size} as large as in one process. The losses are sums, or sums "
            "divided by a constant, but gradients are averaged over ranks, for example by "
            f"DistributedDataParallel. Multiply each loss by {size}, the number of ranks.",
            {"scale_gradients": float(size)},
        )
    for power in (1, 2):
        if abs(ratio * size**power - 1) < CLOSE:
            return StockSuspect(
                "gradients averaged twice",
                f"Gradients are 1/{size**power} as large as in one process, because they are "
                f"divided by {size}, the number of ranks, "
                f"{'twice' if power == 1 else 'three times'}. Divide them once.",
                {"scale_gradients": float(size**power)},
            )
    return StockSuspect(
        "gradients scaled",
        f"Gradients are {ratio:.6g} times as large as in one process.",
        {"scale_gradients": 1 / ratio},
    )


def _divisors(made: StockRecords) -> set[float | None]:
    """Return the divisors of the sums in losses. None stands for an unknown divisor."""
    terms = [term for rows in made.steps for row in rows for term in row["terms"]]
    return {1.0 if term["is_sum"] else term["items"] for term in terms}


def _partly_scaled(
    made: StockRecords,
    models: Mapping[str, WholeTensor],
    wrong: Mapping[str, float],
    size: int,
) -> StockSuspect:
    """Return the suspect for some gradients, but not all, that are wrong by a common factor."""
    ratio, names = sum(wrong.values()) / len(wrong), list(wrong)
    trial = {"scale_some_gradients": [1 / ratio, names]}
    if all(len(models[name].copies) < size for name in names):
        return StockSuspect(
            "expert gradients multiplied",
            f"Gradients of {some(names)}, which only some ranks have, are {ratio:.6g} times as "
            "large as in one process. The backward pass of the token exchange already sums over "
            "ranks. Divide by the number of all ranks, instead of the number of ranks that have "
            "the same experts.",
            trial,
        )
    return StockSuspect(
        "some gradients scaled",
        f"Gradients of {some(names)} are {ratio:.6g} times as large as in one process. The "
        "other gradients agree.",
        trial,
    )


def _of_norms_of_shards(
    reference: StockRecords, made: StockRecords, first: StepDifference
) -> Iterator[StockSuspect]:
    """Yield a suspect if each rank has scaled its shards of the gradients by its own factor."""
    size, number = len(made.ranks), max(first.number, 1)
    theirs, ours = (_gradients(each, first) for each in (reference, made))
    shapes = {n: s for n, s in made.steps[0][number - 1].get("parameters", [[]])[0] if s}
    factors: dict[int, list[float]] = defaultdict(list)
    for name in set(made.ranks[0]["split"]) & theirs.keys() & ours.keys() & shapes.keys():
        whole, other = theirs[name].values, ours[name].values
        if whole is None or other is None:
            return
        # FSDP2 splits the rows of a parameter like torch.chunk.
        rows = math.ceil(shapes[name][0] / size)
        length = rows * whole.numel() // shapes[name][0]
        parts = (torch.split(values.double(), length) for values in (whole, other))
        for rank, (one, two) in enumerate(zip(*parts, strict=True)):
            if len(one) < 2:
                continue  # any two numbers are multiples of each other
            ratio = parallel_ratio(one, two)
            if ratio is not None:
                factors[rank].append(ratio)
            elif bool(one.any() or two.any()):
                return  # not split like this, or wrong in another way
    if not all(map(_agree, factors.values())):
        return
    each = [values[0] for values in factors.values()]
    if len(each) > 1 and not _agree(each):
        yield StockSuspect(
            "clipping by a local norm",
            f"In step {number - 1}, each rank scales its shards of the gradients by a different "
            f"factor ({min(each):.4g} to {max(each):.4g} times the gradient of one process), for "
            "example by the norm of its shards. Compute one norm over the shards of all ranks, as "
            "clip_grad_norm_(model.parameters(), limit) does.",
            is_proved=True,
        )


def _of_norms(
    reference: StockRecords, made: StockRecords, first: StepDifference
) -> Iterator[StockSuspect]:
    """Yield a suspect if the runs clip with different gradient norms."""
    if len(made.training.engines) > 1:
        return  # events are by step, of any optimizer
    theirs, ours = (
        [clip_norms(events)[-1:] for events in each.ranks[0]["events"]]
        for each in (reference, made)
    )
    place = max(first.number, 1) - 1
    if place >= min(len(theirs), len(ours)) or not theirs[place] or not ours[place]:
        return
    one, two = theirs[place][0], ours[place][0]
    if abs(one - two) <= CLOSE * one:
        return
    yield StockSuspect(
        "norm without a part of the parameters" if two < one else "other gradient norm",
        f"Step {place} clips by a norm of {two:.6g}, but one process by {one:.6g}. With the norm "
        "of the single process, the runs agree. Sum the squares of all gradients, also of "
        "parameters that only some ranks have, and count each gradient once.",
        {"clip_norms": theirs},
    )


def _of_updates(
    reference: StockRecords, made: StockRecords, first: StepDifference, tolerance: float
) -> Iterator[StockSuspect]:
    """Yield a suspect if equal gradients lead to different updates of split parameters."""
    names = {each.name for each in first.beyond(tolerance) if each.kind == "model"}
    gradients = any(each.kind == "gradient" for each in first.beyond(tolerance))
    split = names & set(made.ranks[0]["split"])
    if gradients or not split or first.number < 1:
        return
    yield StockSuspect(
        "update of shards",
        f"In step {first.number - 1}, the gradients agree, but the updates of "
        f"{some(sorted(split))} do not. Each rank has a shard of them, but the optimizer's update "
        "of a matrix depends on the whole matrix. Gather the gradient before such an update.",
        is_proved=True,
    )


def _of_batch_norm(made: StockRecords) -> Iterator[StockSuspect]:
    for steps in made.training.engines.values():
        for step in steps[1:]:
            names = [
                name
                for (kind, name), whole in step.tensors.items()
                if kind == "buffer" and whole.strays and is_of_batch_norm(name, made)
            ]
            if names:
                yield StockSuspect(
                    "BatchNorm with local statistics",
                    "Each rank normalises with the mean and variance of only its rows "
                    f"({some(names)} differ after step {step.number - 1}). With the statistics of "
                    "all rows, the runs agree. Use nn.SyncBatchNorm.convert_sync_batchnorm(model).",
                    {"global_batch_norm": None},
                )
                return


def _of_dropout(made: StockRecords) -> Iterator[StockSuspect]:
    drawn = [
        [event for events in facts["events"] for event in events if event.startswith("dropout")]
        for facts in made.ranks
    ]
    if not any(drawn):
        return
    trial = {"no_dropout": None}
    # Later states may differ if an evaluation draws a different number of masks.
    if len(made.ranks) > 1 and all(each[:1] == drawn[0][:1] for each in drawn):
        yield StockSuspect(
            "same dropout on all ranks",
            "All ranks draw the same dropout masks, so rows of different ranks are not "
            "independent. Without dropout, the runs agree. Seed each rank differently after you "
            "have created the model: torch.manual_seed(seed + rank).",
            trial,
            trial,
        )
        return
    yield StockSuspect(
        "dropout",
        "Each rank draws its own dropout masks, and one process draws others. Without dropout, "
        "the runs agree.",
        trial,
        trial,
        is_mistake=False,
    )


def _of_loss_terms(made: StockRecords) -> Iterator[StockSuspect]:
    """Yield suspects for a loss term multiplied or divided by the number of ranks."""
    size = len(made.ranks)
    terms = [term for rows in made.steps for row in rows[:1] for term in row["terms"]]
    if not terms or any(term["addends"] != 2 for term in terms):
        return
    # Try the second term first, because scripts write loss + weight * penalty.
    for addend in (1, 0):
        for factor, words in ((1 / size, f"{size} times"), (float(size), f"1/{size} of")):
            yield StockSuspect(
                "a term of the loss scaled by the ranks",
                f"The {('first', 'second')[addend]} term of the loss, such as an auxiliary loss, "
                f"adds {words} the gradient that it adds in one process. Without this factor, the "
                "runs agree. Do not scale the term by the number of ranks.",
                {"scale_term": [addend, factor]},
            )


def of_bf16(made: StockRecords) -> Iterator[StockSuspect]:
    """Yield a suspect for bf16 gradients. Autocast with fp32 parameters does not produce any."""
    rows = [row for rows in made.steps for row in rows]
    if not any("bfloat16" in facts["dtypes"] for facts in made.ranks):
        return
    trial = {"no_bf16": None}
    backwards = max(len(row["terms"]) for row in rows)
    if backwards > 1:
        yield StockSuspect(
            "bf16 accumulation",
            f"Gradients of {backwards} micro-batches are added in bf16, which has 8 significant "
            "bits. Without bf16, the runs agree. Keep parameters in fp32 and use autocast, or add "
            "gradients in fp32.",
            trial,
            trial,
        )
        return
    yield StockSuspect(
        "bf16",
        "Parameters or gradients are in bf16 even in the run in fp64. Without bf16, the runs "
        "agree.",
        trial,
        trial,
        is_mistake=False,
    )


def _ratios(
    reference: StockRecords,
    made: StockRecords,
    theirs: Mapping[str, WholeTensor],
    ours: Mapping[str, WholeTensor],
    number: int,
) -> dict[str, float]:
    """Return the ratio of each gradient to the reference's, before clipping.

    The result is empty if some gradient is not a multiple of the reference's.
    """
    ratios = {}
    clipped = [1.0, 1.0]
    if len(made.training.engines) == 1:  # events are by step, of any optimizer
        clipped = [_clip_factor(each.ranks[0]["events"], number - 1) for each in (reference, made)]
    largest = max((whole.fingerprint.norm for whole in theirs.values()), default=0.0)
    for name, whole in theirs.items():
        other = ours.get(name)
        # A gradient that is only rounding error has no meaningful ratio.
        if other is None or whole.fingerprint.norm <= 1e-10 * largest:
            continue
        if whole.values is not None and other.values is not None:
            ratio = parallel_ratio(whole.values.double(), other.values.double())
            if ratio is None:
                return {}
        else:
            ratio = other.fingerprint.norm / whole.fingerprint.norm
        ratios[name] = ratio * clipped[0] / clipped[1]
    return ratios


def _clip_factor(events: Sequence[Sequence[str]], place: int) -> float:
    """Return the factor that a step's last clipping applied to the gradients."""
    words = [e.split() for e in (events[place] if place < len(events) else ()) if e[:5] == "clip "]
    if not words or len(words[-1]) < 3:
        return 1.0
    norm, limit = map(float, words[-1][1:3])
    return min(1.0, limit / (norm + 1e-6))


def _agree(ratios: Collection[float]) -> bool:
    """Return whether all factors are equal within rounding."""
    return max(ratios) - min(ratios) <= CLOSE * max(map(abs, ratios))


def _gradients(made: StockRecords, first: StepDifference) -> dict[str, WholeTensor]:
    steps: Sequence[Step] = made.training.engines[first.engine]
    number = max(first.number, 1)
    return {
        name: whole for (kind, name), whole in steps[number].tensors.items() if kind == "gradient"
    }


def _of_loss_weights(reference: StockRecords, made: StockRecords) -> Iterator[StockSuspect]:
    pairs = [loss_factors(each) for each in (made, reference)]
    if any(each is None for each in pairs) or all(
        abs(f - 1) < CLOSE for each in pairs for rank in each or () for step in rank for f in step
    ):
        return
    yield StockSuspect(
        "mean of means",
        "Losses are means over different numbers of items, but are averaged as if the numbers were "
        "equal. If each loss is weighted by its number of items, the runs agree. Sum the losses, "
        "and divide the sum by the number of items in all micro-batches of all ranks.",
        {"loss_factors": pairs[0]},
        {"loss_factors": pairs[1]},
    )


def loss_factors(made: StockRecords) -> list[list[list[float]]] | None:
    """Return the factors that turn each step's losses into one mean over all items.

    The factors are indexed by rank, step and backward pass. Returns None if the item count of a
    loss is unknown.
    """
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
