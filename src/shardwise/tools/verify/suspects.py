"""Lists possible causes of a difference, from the first difference and the facts about the script.

watching.py records the facts. Suspects are ordered from specific to general. For example, a
learning rate scaled by the number of workers is reported as such, rather than as code that depends
on the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.tools.verify import learning_rates
from shardwise.tools.verify.causes import Suspect
from shardwise.tools.verify.comparing import Comparison, StepDifference
from shardwise.tools.verify.records import RecordedTraining

MANY = 3
"""Maximum number of lines or names to show for a suspect."""


def list_suspects(
    reference: RecordedTraining,
    other: RecordedTraining,
    comparison: Comparison,
    tolerance: float,
    size: int,
) -> list[Suspect]:
    """Return the suspects to test, most specific first."""
    first = comparison.first(tolerance)
    facts = {**reference.facts, **other.facts}
    if first is None:
        return list(_general(facts))
    apart = list_differing_tensors(other)
    # A library whose total batch grows with the number of workers may also step the schedule once
    # per worker. Only both alterations together reproduce the reference.
    ahead = (
        learning_rates.recorded_rates(reference)
        if learning_rates.find_pace(reference, other, size) > 1
        else {}
    )
    # Test general suspects last, because the alteration "size" also hides specific errors that
    # involve the number of workers.
    return [
        *_of_noise(other.facts),
        *_of_data(facts, comparison, first, size, ahead),
        *_of_weight(facts),
        *_of_loss(reference, other, first, size),
        *learning_rates.suspect_rates(reference, other, size),
        *_of_model(facts),
        *_of_tensors(apart),
        *_general(facts, by_design=other.driver == "horovod"),
    ]


def list_differing_tensors(training: RecordedTraining) -> list[tuple[str, str]]:
    """Return (kind, name) of buffers and attributes that differ between ranks after a step."""
    # Collect the pairs as dict keys, to list each one only once.
    names = {
        key: None
        for steps in training.engines.values()
        for step in steps
        for key, whole in step.tensors.items()
        if key[0] in ("buffer", "attribute") and whole.strays
    }
    return sorted(names)


def quote_lines(facts: Mapping[str, Any], name: str) -> str:
    """Return the lines recorded under `name`, as " at a.py:3, a.py:9", or "" if there are none."""
    lines = list(facts.get(name, ()))
    more = f" and {len(lines) - MANY} more" if len(lines) > MANY else ""
    return f" at {', '.join(lines[:MANY])}{more}" if lines else ""


def _of_noise(facts: Mapping[str, Any]) -> Iterator[Suspect]:
    """Yield suspects if the training loop or a `collate_fn` draws random numbers for samples."""
    if facts.get("collate"):
        yield Suspect(
            name="collate",
            words=f"the collate_fn of {facts['collate'][0]} draws random numbers once per "
            "micro-batch, so they depend on the number of workers. Drawn for each sample alone, "
            "the runs agree. Draw them in the dataset's __getitem__, which is seeded per sample.",
            alter={"collate": True},
            in_reference=True,
        )
    if facts.get("noise"):
        yield Suspect(
            name="noise",
            words=f"random numbers for the samples of a batch{quote_lines(facts, 'noise')}: after "
            "training has begun, each worker draws its own. Drawn once for the total batch, they "
            "do not depend on the number of workers, and the runs agree. Write "
            "world.draw(lambda n: torch.randn(n, ...)), where n is the number of samples of all "
            "workers; it returns this worker's rows.",
            alter={"noise": True},
            in_reference=True,
        )


def _of_data(
    facts: Mapping[str, Any],
    comparison: Comparison,
    first: StepDifference,
    size: int,
    rates: Mapping[str, Any],
) -> Iterator[Suspect]:
    """Yield suspects if the runs' inputs have different samples or different sample counts."""
    seen = [step for step in comparison.steps if 0 < step.number <= max(first.number, 1)]
    odd = next((step for step in seen if not step.fed), None)
    # If the batch size is per worker, a step has exactly `size` times the reference's rows.
    if facts.get("bridge") and odd is not None and odd.rows[1] == size * odd.rows[0]:
        yield _growing(facts["bridge"][-1], odd, size, rates)
    if facts.get("sampler"):
        yield Suspect(
            name="sampler",
            words=f"a DistributedSampler{quote_lines(facts, 'sampler')} gives each worker "
            f"different samples, but the batch is divided among workers already{_rows(odd)}. With "
            "all samples on each worker the runs agree. Remove the sampler: "
            "sw.Loader(dataset, batch_size=TOTAL) or world.share divides the batch.",
            alter={"sampler": True},
        )
    # If all inputs are the same, the data is not the cause.
    if odd is None and all(step.fed for step in comparison.steps):
        return
    if facts.get("split"):
        yield Suspect(
            name="split",
            words=f"random_split{quote_lines(facts, 'split')} runs after training has begun, "
            "when each worker draws its own random numbers, so the workers have different parts of "
            "the data. Split before the first batch, inside `with world.alike():`, or pass "
            "generator=torch.Generator().manual_seed(0).",
            alter={"split": True},
            in_reference=True,
        )
    yield Suspect(
        name="draws",
        words="a batch, or a part of it, is drawn by each worker separately: after training has "
        f"begun, each worker has its own random numbers{_rows(odd)}. With the same numbers on all "
        "workers the runs agree. Draw inside `with world.alike():`, or with "
        "world.draw(lambda n: ...), then take this worker's rows with world.share.",
        alter={"draws": True},
        in_reference=True,
    )


def _growing(library: str, odd: StepDifference, size: int, rates: Mapping[str, Any]) -> Suspect:
    """Return the suspect for a library whose batch size is per worker.

    `rates` are the reference's learning rates if the library also steps schedules once per worker.
    """
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
    "deepspeed": "train_micro_batch_size_per_gpu is the number of rows of each worker",
    "transformers": "Trainer gives each worker per_device_train_batch_size rows",
    "lightning": "Lightning gives each worker a batch of batch_size rows",
}
_TO_DIVIDE = {
    "accelerate": "write DataLoaderConfiguration(split_batches=True): batch_size is the total then",
    "deepspeed": "write train_batch_size, the total, without train_micro_batch_size_per_gpu",
    "transformers": "divide per_device_train_batch_size by the number of workers",
    "lightning": "divide batch_size by the number of workers",
}


def _of_weight(facts: Mapping[str, Any]) -> Iterator[Suspect]:
    """Yield suspects for a `weight=` that contradicts the loss, and for `reduction="ddp"`."""
    if facts.get("losses") and facts.get("weight"):
        yield Suspect(
            name="weight",
            words=f"weight={quote_lines(facts, 'weight')} is not the number of items that this "
            f"loss is a mean over ({facts['losses'][0]}). With the weight that its graph shows, "
            "the runs agree. Leave weight= out.",
            alter={"weight": True},
        )
    by_library = facts.get("reduction ddp by a library") and facts.get("bridge")
    if not by_library and not facts.get("reduction ddp"):
        return
    how = f'reduction="ddp"{quote_lines(facts, "reduction ddp")}'
    fix = "Leave reduction= out."
    if by_library:
        how, fix = by_library[-1], _EXACT_MEAN.get(by_library[-1], "This is how it works.")
    yield Suspect(
        name="reduction",
        words=f"{how} averages the losses of the workers, but each is a mean over a different "
        f"number of items. Weighed by these numbers, the runs agree. {fix}",
        alter={"weight": True},
    )


_EXACT_MEAN = {
    "accelerate": "Write Accelerator(exact_mean=True).",
    "transformers": "Write Trainer(..., exact_mean=True).",
    "lightning": "Write ShardwiseStrategy(exact_mean=True).",
}


def _of_loss(
    reference: RecordedTraining, other: RecordedTraining, first: StepDifference, size: int
) -> Iterator[Suspect]:
    """Yield a suspect if the loss is too large or too small by an integer factor."""
    one, two = (each.engines[first.engine] for each in (reference, other))
    if len(one) < 2 or len(two) < 2:
        return
    # Use the first step, the only one that starts from identical parameters. Later losses also
    # differ for other reasons.
    theirs, ours = one[1].loss, two[1].loss
    # A ratio of zero, infinity or NaN is meaningless.
    if not (math.isfinite(theirs) and math.isfinite(ours) and theirs and ours):
        return
    factor = theirs / ours
    whole = round(factor) if factor > 1 else 1 / round(1 / factor) if factor > 0 else 0
    # Such errors are integer factors, namely the number of workers or of micro-batches.
    if whole in (0, 1) or abs(factor / whole - 1) > 1e-6:
        return
    how = f"divided by {whole}" if whole > 1 else f"multiplied by {round(1 / whole)}"
    of = " (the number of workers)" if size in (whole, 1 / whole) else ""
    yield Suspect(
        name="loss",
        words=f"the loss is {how}{of} by hand, but the engine already takes the mean over all "
        "workers and micro-batches. Without that factor the runs agree. Give engine.backward the "
        'mean of this worker\'s items, or a sum with reduction="sum".',
        alter={"loss": factor},
    )


def _of_model(facts: Mapping[str, Any]) -> Iterator[Suspect]:
    if facts.get("batch_norm"):
        named = ", ".join(facts["batch_norm"][:MANY])
        yield Suspect(
            name="batch_norm",
            words=f"BatchNorm ({named}) normalises over the rows of one worker. With "
            "--sync-batch-norm it normalises over the rows of all workers, and the runs agree: "
            "add this flag.",
            settings={"sync_batch_norm": "on"},
        )
    if facts.get("dropout"):
        yield Suspect(
            name="dropout",
            words=f"dropout{quote_lines(facts, 'dropout')}: each worker draws its own mask. "
            "Without dropout the runs agree, so nothing else differs. --exact V makes the masks "
            "the same on every number of workers, to the bit.",
            alter={"dropout": True},
            in_reference=True,
        )
    if facts.get("sum"):
        yield Suspect(
            name="sum",
            words=f"a sum or gather over the workers, made by hand{quote_lines(facts, 'sum')}, of "
            "values that the engine sums already. Without it the runs agree. Leave it out: "
            "engine.step() returns loss and norm over all workers.",
            alter={"sum": True},
        )


def _of_tensors(apart: Sequence[tuple[str, str]]) -> Iterator[Suspect]:
    """Yield a suspect if module tensors that are not parameters differ between ranks."""
    if not apart:
        return
    names = [name for _, name in apart]
    how = (
        'is not a buffer. Write self.register_buffer("NAME", tensor): buffers are kept equal.'
        if any(kind == "attribute" for kind, _ in apart)
        else "is a buffer that is written through .data, or whose shape differs between workers, "
        "which cannot be noticed. Write into it with torch's ordinary operations."
    )
    yield Suspect(
        name="buffer",
        words=f"{', '.join(names[:MANY])}: forward changes it on each worker from that worker's "
        f"rows, and it {how} Averaged over the workers at each step, the runs agree.",
        alter={"averaged": names},
    )


def _general(facts: Mapping[str, Any], *, by_design: bool = False) -> Iterator[Suspect]:
    if facts.get("rank"):
        yield Suspect(
            name="rank",
            words=f"code that depends on the rank{quote_lines(facts, 'rank')}. If the script sees "
            "rank 0 on every worker, the runs agree. All code that changes the training must do "
            "the same on all workers. world.share and world.draw give each worker its part.",
            alter={"rank": True},
        )
    if facts.get("size"):
        yield Suspect(
            name="size",
            words=f"code that depends on the number of workers{quote_lines(facts, 'size')}. If the "
            f"script sees one worker, the runs agree. {_BY_DESIGN if by_design else _TOTAL}",
            alter={"size": True},
            joint_words="The use of the number of workers"
            f"{quote_lines(facts, 'size')} is part of the same error: the runs agree without both.",
        )


_TOTAL = (
    "A batch size is the total, losses are means, and the learning rate stays the same: do not "
    "multiply or divide by world.size."
)
_BY_DESIGN = (
    "Horovod scripts give each worker its own batch and scale the rate with the number of workers: "
    "they train differently from one worker by design."
)
