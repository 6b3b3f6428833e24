"""Finds mistakes in a stock script that the ranks' records prove without a trial run.

An example is that all ranks train on identical batches. suspects.py lists possible causes that only
a trial run can confirm.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from shardwise.layout.fingerprints import Fingerprint
from shardwise.tools.verify.records import WholeTensor
from shardwise.tools.verify.stock.recorder import CONTRIBUTIONS
from shardwise.tools.verify.stock.stock_runs import StockRecords

CLOSE = 1e-3
"""A ratio of gradients counts as an integer if it differs from it by at most this fraction."""

LEAST_COMMON = 0.05
"""Fraction of the samples of an epoch above which samples of several ranks count as a mistake."""


@dataclass(frozen=True)
class Finding:
    """A mistake that the ranks' records prove."""

    name: str
    words: str


def findings(made: StockRecords, reference: StockRecords | None = None) -> list[Finding]:
    """Return the mistakes that the records prove, most specific first.

    Without `reference`, only mistakes that the ranks' own records prove are returned.
    """
    if len(made.ranks) == 1:
        return []
    return [
        *_other_initial_values(made, reference),
        *_frozen_on_some(made),
        *_other_rates(made),
        *_same_data(made),
        *_read_by_several(made),
        *_without_set_epoch(made),
        *_duplicates_in_evaluation(made),
        *_untied_weights(made),
        *_saved_parts(made),
        *_buffers_apart(made),
        *_normalisation(made, reference),
        *_clipping(made),
        *_norm_of_some(made),
        *_accumulation(reference),
    ]


def parts_of_ranks(made: StockRecords, reference: StockRecords | None) -> list[str]:
    """Return the parameters whose sizes on the ranks differ from those in the reference."""
    if reference is None:
        return []
    # Compare numbers of elements, because fingerprints are of flat values. A parameter with another
    # shape and as many elements, such as a transposed one, is compared element by element.
    return [
        name
        for engine, steps in made.training.engines.items()
        for (kind, name), whole in steps[0].tensors.items()
        if kind == "model"
        and (theirs := reference.training.engines.get(engine)) is not None
        and (other := theirs[0].tensors.get((kind, name))) is not None
        and other.fingerprint.numel != whole.fingerprint.numel
    ]


def _other_initial_values(made: StockRecords, reference: StockRecords | None) -> Iterator[Finding]:
    # Each rank may have its own part of a layer, such as its experts.
    parts = parts_of_ranks(made, reference)
    for steps in made.training.engines.values():
        names = [
            name
            for (kind, name), w in steps[0].tensors.items()
            if kind == "model" and w.strays and name not in parts
        ]
        if names:
            yield Finding(
                "initial values",
                f"The ranks start with different parameters ({some(names)}). Set the same seed on "
                "all ranks before you create the model, or broadcast its parameters from rank 0.",
            )


def _frozen_on_some(made: StockRecords) -> Iterator[Finding]:
    trained = [{name for each in facts["trained"] for name in each} for facts in made.ranks]
    common, any_rank = set.intersection(*trained), set.union(*trained)
    # A rank may not have a parameter at all, such as the experts of other ranks.
    everywhere = {
        name
        for steps in made.training.engines.values()
        for (kind, name), whole in steps[0].tensors.items()
        if kind == "model" and len(whole.copies) == len(made.ranks)
    }
    if names := sorted((any_rank - common) & everywhere):
        yield Finding(
            "frozen on some ranks",
            f"{some(names)} require gradients only on some ranks. Freeze the same parameters on "
            "all ranks.",
        )


def _other_rates(made: StockRecords) -> Iterator[Finding]:
    """Check for ranks whose optimizers have different learning rates."""
    for number, rates in enumerate(zip(*(facts["rates"] for facts in made.ranks), strict=False)):
        # Ranks with different parameters may have different groups.
        if len({len(each) for each in rates}) > 1:
            return
        for group in zip(*rates, strict=True):
            if max(group) > (1 + CLOSE) * min(group):
                yield Finding(
                    "learning rates differ between ranks",
                    f"In step {number}, the ranks use different learning rates ({min(group):.4g} "
                    f"to {max(group):.4g}), so their parameters drift apart. Use the same rate and "
                    "the same number of scheduler steps on all ranks.",
                )
                return


def _same_data(made: StockRecords) -> Iterator[Finding]:
    if made.ranks[0]["tensor_parallel"]:
        return  # ranks that share the layers compute with the same rows
    trained = [
        [tuple(each["rows"]) for each in facts["seen"] if each["trains"] and each["rows"]]
        for facts in made.ranks
    ]
    least = min(map(len, trained))
    if _compute_parts(made):
        return  # ranks that compute parts of the same sequences need the same rows
    if least >= 2 and all(rows[:least] == trained[0][:least] for rows in trained):
        yield Finding(
            "same data on every rank",
            f"All {len(trained)} ranks received the same samples in each of {least} batches. Give "
            "each rank its own part of the dataset: "
            "DataLoader(sampler=DistributedSampler(dataset)).",
        )


def _read_by_several(made: StockRecords) -> Iterator[Finding]:
    """Check whether each rank shuffles the whole dataset instead of a part of it."""
    if made.ranks[0]["tensor_parallel"]:
        return
    for key, loader in made.ranks[0]["loaders"].items():
        if loader["sampler"] != "RandomSampler" or loader["replaces"]:
            continue
        rows = [
            [
                row
                for e in facts["seen"]
                if (e["loader"], e["epoch"]) == (key, 0)
                for row in e["rows"]
            ]
            for facts in made.ranks
            if all(e["trains"] for e in facts["seen"] if e["loader"] == key)
        ]
        total = sum(map(len, rows))
        # A dataset may have equal samples, so compare only loaders whose samples are distinct.
        if len(rows) < len(made.ranks) or any(len(set(each)) < len(each) for each in rows):
            continue
        orders = {tuple(each) for each in rows}
        common = total - len(set().union(*rows))
        if len(orders) == len(rows) and common > len(rows) and common > LEAST_COMMON * total:
            yield Finding(
                "every rank reads all samples",
                f"In the first epoch, the ranks receive {total} samples, but {common} of them have "
                "already been sent to another rank, because each rank shuffles the whole dataset. "
                "Give each rank its own part: DataLoader(sampler=DistributedSampler(dataset)).",
            )
            return


def _compute_parts(made: StockRecords) -> bool:
    """Return whether ranks with the same rows compute different parts of them.

    They do if their losses differ without dropout, or if they hold parts of the parameters.
    """
    values = [[term["value"] for term in rows[0]["terms"]] for rows in made.steps if rows]
    steps = next(iter(made.training.engines.values()))
    models = [whole for (kind, _), whole in steps[0].tensors.items() if kind == "model"]
    if any(whole.strays or len(whole.copies) < len(made.ranks) for whole in models):
        return True
    draws = any(
        event.startswith("dropout") for events in made.ranks[0]["events"] for event in events
    )
    return any(each != values[0] for each in values) and not draws


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
                "Epoch 2 has the same order of samples as epoch 1. Call sampler.set_epoch(epoch) "
                "at the start of each epoch.",
            )


def _duplicates_in_evaluation(made: StockRecords) -> Iterator[Finding]:
    if made.ranks[0]["tensor_parallel"]:
        return
    rows: dict[tuple[str, int], Counter[int]] = defaultdict(Counter)
    if _evaluate_all(made):
        return
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
                f"The evaluation counts {total} samples, but its dataset has {samples}. The "
                "sampler repeats samples so that all ranks receive the same number. Remove the "
                "repeated samples, or split the dataset without repeats and weight each rank's "
                "metric by its number of samples.",
            )
            return


def _evaluate_all(made: StockRecords) -> bool:
    """Return whether every rank evaluates all samples, so that no metric needs to be reduced."""
    rows = [[each["rows"] for each in facts["seen"] if not each["trains"]] for facts in made.ranks]
    return all(each == rows[0] for each in rows)


def _untied_weights(made: StockRecords) -> Iterator[Finding]:
    """Check for an embedding and a linear layer that start with equal values and differ later."""
    kinds = made.ranks[0]["kinds"]
    for steps in made.training.engines.values():
        first = {name: w for (kind, name), w in steps[0].tensors.items() if kind == "model"}
        embeddings = [name for name in first if kinds.get(name) == "Embedding"]
        linear = [name for name in first if kinds.get(name) == "Linear"]
        for one in embeddings:
            for two in linear:
                prints = first[one].fingerprint, first[two].fingerprint
                if not prints[0].same_bits(prints[1]) or _is_constant(prints[0]):
                    continue
                for step in steps[1:]:
                    later = [step.tensors.get(("model", name)) for name in (one, two)]
                    if None in later or _same(later):
                        continue
                    yield Finding(
                        "untied weights",
                        f"{one} and {two} start with equal values, but differ after step "
                        f"{step.number - 1}. They are two parameters with separate gradients. "
                        "Tie them again after you load, move or wrap the model.",
                    )
                    return


def _same(wholes: Sequence[WholeTensor | None]) -> bool:
    prints = [whole.fingerprint for whole in wholes if whole is not None]
    return all(each.same_bits(prints[0]) for each in prints)


def _is_constant(values: Fingerprint) -> bool:
    """Return whether all elements may have the same magnitude, as in a new norm layer's weight."""
    # The norm is an estimate, within a few percent.
    return abs(values.norm**2 - values.largest**2 * values.numel) <= 0.2 * values.norm**2


def _saved_parts(made: StockRecords) -> Iterator[Finding]:
    """Check for a file that one rank saves, and that contains only shards of split tensors."""
    counts = [len(facts["saves"]) for facts in made.ranks]
    if not any(counts) or all(counts):
        return
    facts = made.ranks[max(range(len(counts)), key=counts.__getitem__)]
    for save in facts["saves"]:
        parts = [each for each in save["entries"] if each["has"] < each["of"]]
        if not parts:
            continue
        names, each = some([part["name"] for part in parts]), parts[0]
        is_average = not all(part["is_parameter"] for part in parts)
        yield Finding(
            "EMA of shards" if is_average else "one rank's shard saved",
            f"Only one rank saves a file, and it contains "
            f"{'averages of ' if is_average else ''}only this rank's shards of {names} "
            f"({each['has']} of {each['of']} values). Gather whole tensors before you save them: "
            "full_tensor(), or "
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)).",
        )
        return


def _buffers_apart(made: StockRecords) -> Iterator[Finding]:
    for steps in made.training.engines.values():
        for step in steps[1:]:
            names = [
                n
                for (kind, n), w in step.tensors.items()
                if kind == "buffer" and w.strays and not is_of_batch_norm(n, made)
            ]
            if names:
                yield Finding(
                    "buffers not synchronised",
                    f"After step {step.number - 1}, the ranks have different values in buffers "
                    f"({some(names)}). A checkpoint that rank 0 saves contains only the values of "
                    "rank 0. Reduce the buffers over all ranks in each step.",
                )
                return


def is_of_batch_norm(buffer: str, made: StockRecords) -> bool:
    """Return whether the buffer belongs to a BatchNorm, whose statistics suspects.py checks."""
    return buffer.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked") and (
        any("BatchNorm" in kind for kind in made.ranks[0]["kinds"].values())
    )


def _normalisation(made: StockRecords, reference: StockRecords | None) -> Iterator[Finding]:
    """Check that the losses of each step add up to one mean over all items of the step.

    Each loss is `factor` times a mean over `items`. A factor that all losses share may be
    intentional, such as the weight of a term.
    """
    alone = None if reference is None else _sum_of_factors(reference)
    size = len(made.ranks)
    first: float | None = None
    for number, rows in enumerate(zip(*made.steps, strict=False)):
        terms = [term for row in rows for term in row["terms"]]
        if not terms or any(not term["items"] for term in terms):
            return  # some loss is a mean over an unknown number of items
        backwards = max(len(row["terms"]) for row in rows)
        has_as_many = all(row["batches"] == len(row["terms"]) for row in rows)
        if backwards > 1 and not has_as_many and not all(map(_read_ahead, made.steps)):
            return  # several losses of one batch, or a loss of several batches
        if len({len(row["terms"]) for row in rows}) > 1:
            return  # a rank has skipped a step
        factors = math.fsum(term["factor"] for term in terms) / size
        if first is None:
            first = factors
            wrong = max(factors, 1 / factors)
            if backwards > 1 and abs(wrong - backwards) < CLOSE * backwards:
                # One process with several micro-batches also has a wrong window in its factors, but
                # not the number of ranks.
                if alone is not None and alone[1] > 1:
                    is_window = _is_close(max(alone[0], 1 / alone[0]), alone[1])
                elif backwards in (size, size**2):
                    yield _wrong_by_window_or_ranks(number, backwards, size, factors)
                    return
                else:
                    is_window = True
                if is_window:
                    yield _wrong_sum(number, backwards, is_large=factors > 1)
                    return
        if abs(factors - first) > CLOSE * first:
            yield Finding(
                "last short window",
                f"Step {number} has {backwards} micro-batch{'es' * (backwards != 1)}, but the "
                "script divides each loss by a different number: the factors of the losses add up "
                f"to {factors:.4g}, and to {first:.4g} in the first step. Divide by the number of "
                "micro-batches that the step has.",
            )
            return
        each = [term["factor"] / term["items"] for term in terms]
        if max(each) > (1 + CLOSE) * min(each):
            items = sorted({term["items"] for term in terms})
            times = max(each) / min(each)
            yield Finding(
                "mean of means",
                f"Step {number} averages the means of batches that have {items[0]:g} to "
                f"{items[-1]:g} items, so an item in a small batch counts up to {times:.3g} times "
                "as much as one in a large batch. Sum the losses, and divide the sum by the number "
                "of items in all micro-batches of all ranks.",
            )
            return


def _read_ahead(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a rank computes one loss per batch, but reads a batch before it is needed.

    Accelerate's loaders do this, to know which batch is the last one of an epoch.
    """
    ahead = list(accumulate(row["batches"] - len(row["terms"]) for row in rows))
    return all(0 <= each <= 1 for each in ahead)


def _sum_of_factors(reference: StockRecords) -> tuple[float, int] | None:
    """Return the sum of the factors in the first step's losses, and their number.

    Returns None if the factors are unknown.
    """
    terms = reference.steps[0][0]["terms"] if reference.steps and reference.steps[0] else []
    total = math.fsum(term["factor"] for term in terms if term["items"])
    return (total, len(terms)) if total else None


def _is_close(value: float, expected: float) -> bool:
    return abs(value - expected) < CLOSE * expected


def _wrong_by_window_or_ranks(number: int, backwards: int, size: int, factor: float) -> Finding:
    """Return the finding for losses with a factor that the window and the ranks both explain."""
    window, ranks = ("not divided", "multiplied") if factor > 1 else ("divided twice", "divided")
    by = "multiplies" if factor > 1 else "divides"
    return Finding(
        f"accumulation {window}, or loss {ranks} by the ranks",
        f"The factors of the {backwards} losses in step {number} add up to {factor:.4g} instead of "
        f"1. Either the script {'does not divide' if factor > 1 else 'divides'} the losses by "
        f"{backwards}{'' if factor > 1 else ' twice'}, or it {by} them by a power of {size}, the "
        "number of ranks. Verify the script with another number of ranks to find out which.",
    )


def _wrong_sum(number: int, backwards: int, *, is_large: bool) -> Finding:
    """Return the finding for micro-batches whose factors do not add up to 1."""
    if is_large:
        return Finding(
            "accumulation not divided",
            f"Step {number} adds up {backwards} losses that are means, so its gradient is "
            f"{backwards} times too large. Divide each loss by {backwards}.",
        )
    return Finding(
        "accumulation divided twice",
        f"Step {number} divides the losses or gradients of its {backwards} micro-batches twice by "
        f"{backwards}, so its gradient is {backwards} times too small. Remove one of the two "
        "divisions.",
    )


def _clipping(made: StockRecords) -> Iterator[Finding]:
    for number, events in enumerate(zip(*(facts["events"] for facts in made.ranks), strict=False)):
        norms = [clip_norms(each) for each in events]
        if not all(norms):
            continue
        first = [each[-1] for each in norms]
        if max(first) > (1 + CLOSE) * min(first):
            yield Finding(
                "clipping by a local norm",
                f"In step {number}, the ranks clip by different norms ({min(first):.4g} to "
                f"{max(first):.4g}). Compute one norm over the gradients of all ranks.",
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


def clip_norms(events: Sequence[str]) -> list[float]:
    """Return the gradient norms that were used for clipping in a step."""
    return [float(event.split()[1]) for event in events if event.startswith("clip ")]


def _norm_of_some(made: StockRecords) -> Iterator[Finding]:
    """Check that the norm of the clipped gradients is within the limit."""
    if len(made.training.engines) > 1:
        return  # events are by step, of any optimizer
    for steps in made.training.engines.values():
        for step, events in zip(steps[1:], made.ranks[0]["events"], strict=False):
            clips = [event.split()[1:] for event in events if event.startswith("clip ")]
            wholes = [whole for (kind, _), whole in step.tensors.items() if kind == "gradient"]
            of_rank_0 = [whole for whole in wholes if 0 in whole.copies]
            if len(clips) != 1 or any(whole.strays for whole in wholes):
                continue  # parameters clipped in separate calls may have a larger total norm
            norm, limit, count = map(float, clips[0])
            values = _joined(wholes)
            if norm <= limit or count < len(of_rank_0) or values is None:
                continue
            length = float(values.norm())
            if abs(float(values.abs().max()) - limit) <= CLOSE * limit:
                continue  # clipped by the largest element (norm_type=inf)
            if length > (1 + CLOSE) * limit:
                missing = math.sqrt((length / limit) ** 2 - 1) * norm
                yield Finding(
                    "norm without a part of the parameters",
                    f"Step {step.number - 1} clips by a norm of {norm:.4g}, but the norm of all "
                    f"gradients is {math.hypot(norm, missing):.4g}. The norm leaves out "
                    f"{some(_others(step.tensors, missing * limit / norm))}. Sum the squares of "
                    "all gradients, and count each gradient once.",
                )
                return


def _others(tensors: Mapping[tuple[str, str], WholeTensor], length: float) -> list[str]:
    """Return the names of the gradients that a norm may have left out.

    These are the gradients that only some ranks have, if their norm is `length`. If it is not,
    returns all names.
    """
    wholes = {name: whole for (kind, name), whole in tensors.items() if kind == "gradient"}
    most = max(len(whole.copies) for whole in wholes.values())
    some_ranks = [name for name, whole in wholes.items() if len(whole.copies) < most]
    values = _joined([wholes[name] for name in some_ranks])
    fits = values is not None and abs(float(values.norm()) - length) <= CLOSE * length
    return some_ranks if fits else list(wholes)


def _accumulation(reference: StockRecords | None) -> Iterator[Finding]:
    """Check that the reference's gradients are the sum over each step's backward passes."""
    # Facts of losses are by step of the first optimizer.
    if reference is None or len(reference.training.engines) > 1:
        return
    for steps in reference.training.engines.values():
        for step in steps[1:]:
            tensors = step.tensors
            names = [name for kind, name in tensors if kind == "contributions"]
            used, total, first, last = (
                _joined([tensors.get((kind, name)) for name in names])
                for kind in ("gradient", *CONTRIBUTIONS)
            )
            if used is None or total is None or first is None or last is None:
                continue
            backwards = len(reference.steps[0][step.number - 1]["terms"])
            ratio = parallel_ratio(total, used)
            if ratio is not None:
                if backwards > 1 and abs(ratio * backwards - 1) < CLOSE:
                    # The losses were divided already if their factors add up to 1.
                    terms = reference.steps[0][step.number - 1]["terms"]
                    if abs(math.fsum(term["factor"] for term in terms) - 1) < CLOSE:
                        yield _wrong_sum(step.number - 1, backwards, is_large=False)
                        return
                continue
            if any(parallel_ratio(each, used) is not None for each in (first, last)):
                yield Finding(
                    "micro-batches dropped",
                    f"Step {step.number - 1} runs {backwards} backward passes, but the optimizer "
                    "receives the gradients of only one of them. Gradients are overwritten or "
                    "cleared between micro-batches. Clear them only after optimizer.step().",
                )
                return


def _joined(wholes: Sequence[WholeTensor | None]) -> torch.Tensor | None:
    """Return the tensors' values, concatenated, or None if some of them were not recorded."""
    values = [whole.values for whole in wholes if whole is not None and whole.values is not None]
    if not values or len(values) < len(wholes):
        return None
    return torch.cat([each.double() for each in values])


def parallel_ratio(one: torch.Tensor, two: torch.Tensor) -> float | None:
    """Return r if `two` equals r times `one` within rounding, or None if there is no such r."""
    square = float(torch.dot(one, one))
    if not square:
        return None
    ratio = float(torch.dot(one, two)) / square
    is_parallel = float((two - ratio * one).norm()) <= CLOSE * abs(ratio) * math.sqrt(square)
    return ratio if is_parallel and ratio else None


def some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
