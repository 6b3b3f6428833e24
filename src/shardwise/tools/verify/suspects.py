"""Suspects causes of a difference, from what differs first and from what the script was seen to do
(watching.py).

The order is from the particular to the general: a learning rate that is multiplied by the number of
workers is that, and not just code that depends on their number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.tools.verify import learning_rates
from shardwise.tools.verify.causes import Suspect
from shardwise.tools.verify.comparing import Comparison, StepDifference
from shardwise.tools.verify.records import Training

MANY = 3
"""Lines of a script that are shown of one kind."""


def worth_a_trial(
    reference: Training, other: Training, comparison: Comparison, tolerance: float, size: int
) -> list[Suspect]:
    """What may have made the difference, the most particular first."""
    first = comparison.first(tolerance)
    facts = {**reference.facts, **other.facts}
    if first is None:
        return list(_general(facts))
    apart = astray(other)
    ahead = (
        learning_rates.recorded(reference)
        if learning_rates.pace(reference, other, size) > 1
        else {}
    )
    return [
        *_of_data(facts, comparison, first, size, ahead),
        *_of_weight(facts),
        *_of_loss(reference, other, first, size),
        *learning_rates.suspects(reference, other, size),
        *_of_model(facts),
        *_of_tensors(apart),
        *_general(facts, by_design=other.driver == "horovod"),
    ]


def astray(training: Training) -> list[tuple[str, str]]:
    """Kind and name of buffers, and of plain tensors of modules, that ranks have other values of
    after a step."""
    found = {
        key: None
        for steps in training.engines.values()
        for step in steps
        for key, whole in step.tensors.items()
        if key[0] in ("buffer", "attribute") and whole.strays
    }
    return sorted(found)


def lines(facts: Mapping[str, Any], name: str) -> str:
    """The lines of the script that were noted under a name, as " at a.py:3, a.py:9", or ""."""
    found = list(facts.get(name, ()))
    more = f" and {len(found) - MANY} more" if len(found) > MANY else ""
    return f" at {', '.join(found[:MANY])}{more}" if found else ""


def _of_data(
    facts: Mapping[str, Any],
    comparison: Comparison,
    first: StepDifference,
    size: int,
    rates: Mapping[str, Any],
) -> Iterator[Suspect]:
    """Other samples, or more of them. What was fed before the first difference counts."""
    seen = [step for step in comparison.steps if 0 < step.number <= max(first.number, 1)]
    odd = next((step for step in seen if not step.fed), None)
    if facts.get("bridge") and odd is not None and odd.rows[1] == size * odd.rows[0]:
        yield _growing(facts["bridge"][-1], odd, size, rates)
    if facts.get("sampler"):
        yield Suspect(
            name="sampler",
            words=f"a DistributedSampler{lines(facts, 'sampler')}, which gives each worker other "
            f"samples beside the batch that is shared out already{_rows(odd)}. With all samples on "
            "each worker the runs agree. Let sw.Loader(dataset, batch_size=TOTAL) share out the "
            "batch, or take rows by world.share; nothing else does.",
            alter={"sampler": True},
        )
    if odd is None and all(step.fed for step in comparison.steps):
        return
    if facts.get("split"):
        yield Suspect(
            name="split",
            words=f"random_split{lines(facts, 'split')} after training has begun, when each worker "
            "draws for itself: the workers have other parts of the data. Split before the first "
            "batch, in with world.alike():, or give it generator=torch.Generator().manual_seed(0).",
            alter={"split": True},
            both=True,
        )
    yield Suspect(
        name="draws",
        words="a batch, or a part of it, that each worker draws itself: once training has begun, "
        f"random numbers are each worker's own{_rows(odd)}. With the same numbers on all workers "
        "the runs agree. Draw in with world.alike():, or by world.draw(lambda n: ...), then take "
        "this worker's rows by world.share.",
        alter={"draws": True},
        both=True,
    )


def _growing(library: str, odd: StepDifference, size: int, rates: Mapping[str, Any]) -> Suspect:
    """Batches that grow with the workers, as those of a library do that counts them by worker;
    schedules that follow them go with it."""
    return Suspect(
        name="batches",
        words=f"{_GROWING[library]}, so the total batch grows with the workers{_rows(odd)}. With "
        f"batches of 1/{size} of the rows{' and its rates' if rates else ''} the runs agree. This "
        f"is how the library works; to train as on one worker, {_TO_DIVIDE[library]}.",
        alter={"batches": size, **({"lr": rates} if rates else {})},
    )


def _rows(odd: StepDifference | None) -> str:
    if odd is None or odd.rows[0] == odd.rows[1]:
        return ""
    return (
        f" (step {odd.number - 1} trains on {odd.rows[1]} rows, and on {odd.rows[0]} in the "
        "reference)"
    )


_GROWING = {
    "accelerate": "Accelerate gives each worker a batch of batch_size rows, and steps schedulers "
    "once for each worker",
    "deepspeed": "train_micro_batch_size_per_gpu is the rows of each worker",
    "transformers": "Trainer gives each worker per_device_train_batch_size rows",
    "lightning": "Lightning gives each worker a batch of batch_size rows",
}
_TO_DIVIDE = {
    "accelerate": "write DataLoaderConfiguration(split_batches=True), for which batch_size is the "
    "total",
    "deepspeed": "write train_batch_size, the total, without train_micro_batch_size_per_gpu",
    "transformers": "divide per_device_train_batch_size by the number of workers",
    "lightning": "divide batch_size by the number of workers",
}


def _of_weight(facts: Mapping[str, Any]) -> Iterator[Suspect]:
    """A given weight that is not what a loss is a mean over, and means that are averaged."""
    if facts.get("losses") and facts.get("weight"):
        yield Suspect(
            name="weight",
            words=f"weight={lines(facts, 'weight')} is not what this loss is a mean over "
            f"({facts['losses'][0]}). Weighed by what its graph shows, the runs agree. Leave "
            "weight= out.",
            alter={"weight": True},
        )
    by_library = facts.get("reduction ddp by a library") and facts.get("bridge")
    if not by_library and not facts.get("reduction ddp"):
        return
    how = f'reduction="ddp"{lines(facts, "reduction ddp")}'
    fix = "Leave reduction= out."
    if by_library:
        how, fix = by_library[-1], _EXACT_MEAN.get(by_library[-1], "This is how it works.")
    yield Suspect(
        name="reduction",
        words=f"{how} averages the losses of the workers, and each is a mean over another number "
        f"of items. Weighed by their items, the runs agree. {fix}",
        alter={"weight": True},
    )


_EXACT_MEAN = {
    "accelerate": "Write Accelerator(exact_mean=True).",
    "transformers": "Write Trainer(..., exact_mean=True).",
    "lightning": "Write ShardwiseStrategy(exact_mean=True).",
}


def _of_loss(
    reference: Training, other: Training, first: StepDifference, size: int
) -> Iterator[Suspect]:
    """Losses that are a whole multiple of the reference's, or a whole part."""
    one, two = (each.engines[first.engine] for each in (reference, other))
    if len(one) < 2 or len(two) < 2:
        return
    theirs, ours = one[1].loss, two[1].loss
    if not (math.isfinite(theirs) and math.isfinite(ours) and theirs and ours):
        return
    factor = theirs / ours
    whole = round(factor) if factor > 1 else 1 / round(1 / factor) if factor > 0 else 0
    if whole in (0, 1) or abs(factor / whole - 1) > 1e-6:
        return
    how = f"divided by {whole}" if whole > 1 else f"multiplied by {round(1 / whole)}"
    of = " (the number of workers)" if size in (whole, 1 / whole) else ""
    yield Suspect(
        name="loss",
        words=f"the loss is {how}{of} by hand: the engine takes the mean over all workers and "
        "micro-batches itself. With that taken back the runs agree. Give engine.backward the mean "
        'of this worker\'s items as it is, or a sum with reduction="sum".',
        alter={"loss": factor},
    )


def _of_model(facts: Mapping[str, Any]) -> Iterator[Suspect]:
    if facts.get("batch_norm"):
        named = ", ".join(facts["batch_norm"][:MANY])
        yield Suspect(
            name="batch_norm",
            words=f"BatchNorm ({named}) takes its statistics over the rows of one worker. With "
            "--sync-batch-norm, which takes them over all workers, the runs agree: add the flag.",
            settings={"sync_batch_norm": "on"},
        )
    if facts.get("dropout"):
        yield Suspect(
            name="dropout",
            words=f"dropout{lines(facts, 'dropout')}: each worker drops at random for itself. "
            "Without dropout the runs agree, so nothing else differs. --exact V makes it alike on "
            "all numbers of workers, to the bit.",
            alter={"dropout": True},
            both=True,
        )
    if facts.get("sum"):
        yield Suspect(
            name="sum",
            words=f"a sum or gathering over the workers made by hand{lines(facts, 'sum')}, of what "
            "the engine sums up already. Without it the runs agree: leave it out; "
            "engine.step() returns loss and norm over all workers.",
            alter={"sum": True},
        )


def _of_tensors(apart: Sequence[tuple[str, str]]) -> Iterator[Suspect]:
    """Tensors of modules that no worker shares with the others."""
    if not apart:
        return
    names = [name for _, name in apart]
    how = (
        'is no buffer. Write self.register_buffer("NAME", tensor): buffers are kept in step.'
        if any(kind == "attribute" for kind, _ in apart)
        else "is a buffer that is written through .data, or of another shape on other workers, "
        "which nobody sees. Write into it by torch's own operations."
    )
    yield Suspect(
        name="buffer",
        words=f"{', '.join(names[:MANY])}: forward changes it on each worker by its own rows, and "
        f"it {how} Averaged over the workers at each step the runs agree.",
        alter={"averaged": names},
    )


def _general(facts: Mapping[str, Any], *, by_design: bool = False) -> Iterator[Suspect]:
    if facts.get("rank"):
        yield Suspect(
            name="rank",
            words=f"code that depends on the rank{lines(facts, 'rank')}. With rank 0 told to the "
            "script on every worker the runs agree. What changes the training must be alike on all "
            "workers; world.share and world.draw give each its part.",
            alter={"rank": True},
        )
    if facts.get("size"):
        yield Suspect(
            name="size",
            words=f"code that depends on the number of workers{lines(facts, 'size')}. With 1 told "
            f"to the script the runs agree. {_BY_DESIGN if by_design else _TOTAL}",
            alter={"size": True},
            beside="What the script makes of the number of workers"
            f"{lines(facts, 'size')} belongs to the same mistake: the runs agree without both.",
        )


_TOTAL = (
    "A batch size is the total, losses are means, and rates stay: nothing is to be multiplied or "
    "divided by world.size."
)
_BY_DESIGN = (
    "Scripts of Horovod's give each worker a batch of its own and scale the rate with their "
    "number: that is another training than that of one worker, and meant to be."
)
