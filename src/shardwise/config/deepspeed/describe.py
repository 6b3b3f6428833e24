"""Describes the settings that result from a DeepSpeed config, and renders the table of its keys."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.config.deepspeed.batches import MICRO, STEPS, TOTAL
from shardwise.config.deepspeed.job import DeepSpeedJob
from shardwise.config.deepspeed.keys import KEYS, MAPPED, REFUSED, TUNING
from shardwise.config.settings import flag
from shardwise.errors import ConfigError
from shardwise.messages.printable import many

OF_THE_LOOP = (
    (TOTAL, "sw.Loader(batch_size=...)"),
    (STEPS, "loader.steps()"),
    ("gradient_clipping", "engine.step(max_norm=...)"),
    ("optimizer.type", "torch.optim"),
    ("scheduler.type", "a scheduler"),
    ("fp16.loss_scale", "sw.Engine(scaler=...)"),
    ("gradient_allreduce_op", "engine.backward(reduction=...)"),
)
"""Keys without effect in a script with sw.Engine, and the call that the script makes instead."""


def lines(job: DeepSpeedJob, workers: int | None) -> list[str]:
    """Return the lines that `shardwise run --dry-run --deepspeed` prints.

    They show each setting with its key in the config, the batch sizes, and the lines from
    `short_lines`.
    """
    shown = {
        name: ("on" if value else "off") if isinstance(value, bool) else f"{value}"
        for name, value in job.settings.items()
    }
    return [
        *(f"{flag(n)} {shown[n]}  ({job.source_keys[n]})" for n in job.settings),
        *_batch_lines(job, workers),
        *short_lines(job),
    ]


def short_lines(job: DeepSpeedJob, *, of_loop: bool = True) -> list[str]:
    """Return the lines that every run with `--deepspeed` prints.

    They show the ignored keys, and the values that replaced "auto". If `of_loop` is true, they also
    show the keys that have no effect because a script that uses sw.Engine does this work itself.
    """
    document = job.document
    found = []
    if document.resolved:
        words = (f"{key} {'left out' if v is None else v}" for key, v in document.resolved.items())
        found.append(f'"auto" is: {", ".join(words)}')
    own = [f"{key} ({where})" for key, where in OF_THE_LOOP if key in document.values]
    if own and of_loop:
        found.append(f"left to a script with sw.Engine: {', '.join(own)}")
    if document.ignored:
        found.append(f"ignored, because they only tune DeepSpeed: {', '.join(document.ignored)}")
    return found


def _batch_lines(job: DeepSpeedJob, workers: int | None) -> Iterator[str]:
    given = (job.document.get(key) for key in (TOTAL, MICRO))
    if workers is None or all(each is None for each in given):
        return
    replicas, rest = divmod(workers, job.settings.get("tensor", 1))
    if rest:
        raise ConfigError(
            f"{job.document.name}: {workers} workers do not divide into groups of "
            f"tensor_parallel.autotp_size {job.settings['tensor']}."
        )
    sizes = job.batches(replicas)
    yield (
        f"samples per step: {sizes.total} = {sizes.micro} x "
        f"{many(sizes.steps, 'backward')} x {many(replicas, 'worker')}"
    )


_TITLES = {
    MAPPED: ("becomes", "Keys with a meaning here"),
    TUNING: ("why", "Tuning keys, ignored with one line"),
    REFUSED: ("instead", "Keys that raise an error, unless they are off"),
}


def table() -> str:
    """Render the tables of keys as Markdown, for docs/reference/deepspeed_keys.md."""
    parts = []
    for kind, (column, title) in _TITLES.items():
        rows = [f"| `{k.name}` | {k.text} |" for k in KEYS.values() if k.kind == kind]
        parts += [f"### {title}", "", f"| key | {column} |", "|---|---|", *rows, ""]
    return "\n".join(parts).rstrip() + "\n"
