"""Says in lines what came of a DeepSpeed JSON, and makes the table of its keys."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.config.deepspeed.batches import MICRO, STEPS, TOTAL
from shardwise.config.deepspeed.job import DeepSpeedJob
from shardwise.config.deepspeed.keys import KEYS, MAPPED, REFUSED, TUNING
from shardwise.config.settings import flag
from shardwise.errors import ConfigError

OF_THE_LOOP = (
    (TOTAL, "sw.Loader(batch_size=...)"),
    (STEPS, "loader.steps()"),
    ("gradient_clipping", "engine.step(max_norm=...)"),
    ("optimizer.type", "torch.optim"),
    ("scheduler.type", "a scheduler"),
    ("fp16.loss_scale", "sw.Engine(scaler=...)"),
    ("gradient_allreduce_op", "engine.backward(reduction=...)"),
)
"""What a loop of sw.Engine says itself, and where."""


def lines(job: DeepSpeedJob, workers: int | None) -> list[str]:
    """What `shardwise run --dry-run --deepspeed` shows: each setting with the key that it comes of,
    the batch sizes, what is left to the script, and what is ignored."""
    shown = {
        name: ("on" if value else "off") if isinstance(value, bool) else f"{value}"
        for name, value in job.settings.items()
    }
    return [
        *(f"{flag(n)} {shown[n]}  ({job.by[n]})" for n in job.settings),
        *_batch_lines(job, workers),
        *short_lines(job),
    ]


def short_lines(job: DeepSpeedJob, *, of_loop: bool = True) -> list[str]:
    """What every run with `--deepspeed` says: "auto", what a script of sw.Engine says itself (where
    it is `of_loop`), what is ignored."""
    document = job.document
    found = []
    if document.resolved:
        words = (f"{key} {'left out' if v is None else v}" for key, v in document.resolved.items())
        found.append(f'"auto" is: {", ".join(words)}')
    own = [f"{key} ({where})" for key, where in OF_THE_LOOP if key in document.values]
    if own and of_loop:
        found.append(f"a script of sw.Engine says itself: {', '.join(own)}")
    if document.ignored:
        found.append(f"ignored as tuning: {', '.join(document.ignored)}")
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
        f"a step: {sizes.total} samples = {sizes.micro} x {sizes.steps} backward(s) x "
        f"{replicas} worker(s)"
    )


_TITLES = {
    MAPPED: ("becomes", "Keys that mean something here"),
    TUNING: ("why", "Tuning, ignored with one line"),
    REFUSED: ("instead", "Refused by name, unless they are off"),
}


def table() -> str:
    """The tables of all keys, as Markdown: what docs/reference/deepspeed_keys.md has."""
    parts = []
    for kind, (column, title) in _TITLES.items():
        rows = [f"| `{k.name}` | {k.text} |" for k in KEYS.values() if k.kind == kind]
        parts += [f"### {title}", "", f"| key | {column} |", "|---|---|", *rows, ""]
    return "\n".join(parts).rstrip() + "\n"
