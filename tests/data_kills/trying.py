"""A training that is killed several times, on other numbers of ranks each time, and its log.

Every rank appends the samples of a step to a file before the step can be saved. A step that was
lost with its rank is in the log of two legs, and the later one counts.
"""

import io
import json
import shutil
import signal
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

import shardwise as sw
from tests.distributed.group import Groups, RankFailed, RankLate
from tests.seeded import Command, Result

EPOCHS = 2
LIMIT = 120.0
"""Maximum seconds of a leg."""
MOST = 0.5
"""Maximum seconds between the first step of a leg and its kill."""

KINDS = (
    "JSON lines",
    "tar",
    "token budget",
    "packed",
    "mixture",
    "stream with a state",
    "stream that draws",
    "stream with shards",
)

COMMAND = Command(
    name="data_kills",
    about="Kill ranks at random moments, resume at other sizes, and check the samples.",
    thing="training",
    things="trainings",
    fine=("each sample once", "each sample once, no kill"),
    wrong=("repeated or missing", "refused", "hang"),
)


@dataclass(frozen=True, kw_only=True)
class Leg:
    """A run on `size` ranks. If `delay` is not None, its `victims` die after so many seconds."""

    size: int
    workers: int
    batch: int
    delay: float | None
    victims: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training on `length` samples of a kind of dataset, which saves every `every` steps."""

    kind: str
    length: int
    every: int
    legs: tuple[Leg, ...]


def draw(seed: int) -> Training:
    """Return the training of `seed`."""
    rng = Random(seed)
    batch = rng.randint(4, 9)
    changes = rng.random() < 0.5
    legs = []
    for number in range(last := rng.randint(1, 3), -1, -1):
        size = rng.randint(1, 4)
        legs.append(
            Leg(
                size=size,
                workers=rng.choice([0, 0, 1, 2]),
                batch=rng.randint(4, 9) if changes and number < last else batch,
                delay=rng.random() ** 2 * MOST if number else None,
                victims=rng.choice([tuple(range(size)), (rng.randrange(size),)]),
            )
        )
    return Training(
        # In turns, so that a few consecutive seeds have many kinds.
        kind=KINDS[seed % len(KINDS)],
        length=rng.randint(20, 70),
        every=rng.randint(1, 4),
        legs=tuple(legs),
    )


class Numbers(IterableDataset):
    """A stream of numbers in shards, in order or in the order of draws."""

    def __init__(self, shards: list[list[int]], *, draws: bool) -> None:
        self.shards, self.num_shards, self.draws = shards, len(shards), draws

    def __iter__(self) -> Iterator[int]:
        for shard in self.shards:
            order = torch.randperm(len(shard)).tolist() if self.draws else range(len(shard))
            for place in order:
                yield shard[place]


class Sharded(Numbers):
    """The same with a method `shard`, as Hugging Face has it."""

    def shard(self, num_shards: int, index: int) -> "Sharded":
        """Return part `index` of `num_shards`."""
        return Sharded(self.shards[index::num_shards], draws=self.draws)


class WithState(IterableDataset):
    """A stream that continues from its state."""

    def __init__(self, length: int) -> None:
        self.length, self.at = length, 0

    def state_dict(self) -> dict[str, int]:
        """Return the number of samples that were read."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after `state`."""
        self.at = state["at"]

    def __iter__(self) -> Iterator[int]:
        while self.at < self.length:
            self.at += 1
            yield self.at - 1
        self.at = 0


def write(training: Training, folder: Path) -> None:
    """Write the files of a training that reads files."""
    half = training.length // 3
    for file, numbers in enumerate((range(half), range(half, training.length))):
        lines = "".join(json.dumps({"n": n, "x": "y" * n}) + "\n" for n in numbers)
        (folder / f"{file}.jsonl").write_text(lines)
        with tarfile.open(folder / f"{file}.tar", "w") as tar:
            for number in numbers:
                for field, content in (("n", b"%d" % number), ("x", b"y" * number * 9)):
                    info = tarfile.TarInfo(f"{number}.{field}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


def number_of(sample: dict[str, Any]) -> int:
    """Return the number in a sample of a file."""
    return int(sample["n"])


def tokens_of(number: int) -> int:
    """Return the number of tokens of a sample."""
    return 1 + number % 5


class Texts:
    """Documents of 1 to 5 tokens, which are their number plus 1."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        return {"input_ids": [number + 1] * tokens_of(number)}


def text_length(sample: dict[str, list[int]]) -> int:
    """Return the number of tokens of a document."""
    return len(sample["input_ids"])


def loader_of(training: Training, leg: Leg, folder: Path) -> sw.Loader:
    """Return the loader of a leg."""
    kind, length = training.kind, training.length
    options: dict[str, Any] = {"batch_size": leg.batch, "shuffle": True}
    dataset: Any = range(length)
    if kind in ("JSON lines", "token budget"):
        dataset = sw.JsonLines(folder / "*.jsonl", index=folder / "index", transform=number_of)
    elif kind == "tar":
        dataset = sw.TarSamples(folder / "{0..1}.tar", transform=number_of)
    elif kind == "mixture":
        sizes = {"a": length // 4, "b": length - length // 4}
        parts = {"a": range(sizes["a"]), "b": range(sizes["a"], length)}
        dataset = sw.Mixture(parts, sizes)
    elif kind == "packed":
        dataset = Texts(length)
    elif kind.startswith("stream"):
        options["shuffle"] = False
        shards = [list(range(length))[first::5] for first in range(5)]
        dataset = {
            "stream with a state": WithState(length),
            "stream that draws": Numbers(shards, draws=True),
            "stream with shards": Sharded(shards, draws=True),
        }[kind]
    if kind == "token budget":
        options = {"tokens": 4 * leg.batch, "length": tokens_of, "shuffle": True}
    if kind == "packed":
        pack = sw.Packing(False, row=8)
        options = {"tokens": 8 * leg.batch, "length": text_length, "pack": pack, "shuffle": True}
    return sw.Loader(dataset, **options, num_workers=leg.workers)


def train(world: Any, training: Training, number: int, folder: Path) -> None:
    """Run leg `number` from the checkpoint in `folder`, and log the samples of each step."""
    leg = training.legs[number]
    model = nn.Linear(1, 1)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    loader = loader_of(training, leg, folder)
    engine.track(loader=loader)
    engine.resume(folder / "checkpoints")
    if leg.delay is not None and world.rank in leg.victims:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(leg.delay, 1e-4))
    with (folder / f"log-{number}-{world.rank}").open("a", buffering=1) as log:
        for epoch in loader.epochs(EPOCHS):
            for batch in loader:
                if isinstance(batch, dict):
                    starts = batch["position_ids"] == 0
                    numbers = (batch["input_ids"][starts & (batch["input_ids"] > 0)] - 1).tolist()
                else:
                    numbers = batch.tolist()
                engine.backward(model(torch.ones(max(len(numbers), 1), 1)).mean())
                engine.step()
                used = numbers if world.rows else []
                log.write(json.dumps([engine.steps, epoch, used]) + "\n")
                if engine.steps % training.every == 0:
                    engine.save(folder / "checkpoints", keep=2)
    signal.setitimer(signal.ITIMER_REAL, 0)
    engine.close()


def counted(training: Training, folder: Path) -> Counter[tuple[int, int]]:
    """Return how often each (epoch, sample) was used, in the legs that count."""
    steps: dict[int, tuple[int, list[tuple[int, int]]]] = {}
    for number, leg in enumerate(training.legs):
        for rank in range(leg.size):
            log = folder / f"log-{number}-{rank}"
            # A kill can cut off the last line.
            lines = log.read_text().splitlines(keepends=True) if log.exists() else []
            for line in lines:
                if not line.endswith("\n"):
                    continue
                step, epoch, samples = json.loads(line)
                if steps.get(step, (-1, []))[0] < number:
                    steps[step] = number, []
                steps[step][1].extend((epoch, sample) for sample in samples)
    assert sorted(steps) == [*range(1, len(steps) + 1)], f"steps {sorted(steps)}"
    return Counter(each for _, samples in steps.values() for each in samples)


class Runner:
    """Tries trainings in `folder`, on ranks of `groups`."""

    def __init__(self, groups: Groups, folder: Path) -> None:
        self._groups, self._folder = groups, folder

    def __call__(self, seed: int) -> Result:
        """Try the training of `seed`."""
        training, folder = draw(seed), self._folder / f"training-{seed}"
        folder.mkdir()
        write(training, folder)
        began = time.monotonic()
        try:
            kind, words = self._tried(training, folder)
        except RankLate as error:
            kind, words = "hang", str(error)
        except RankFailed as error:
            kind, words = "refused", str(error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return Result(
            kind=kind,
            of=training.kind,
            words=words.strip().splitlines()[-1],
            story=f"{training}\n{words}",
            seconds=time.monotonic() - began,
        )

    def _tried(self, training: Training, folder: Path) -> tuple[str, str]:
        killed = 0
        for number, leg in enumerate(training.legs):
            group = self._groups(leg.size)
            if leg.delay is None:
                group(train, training, number, folder, limit=LIMIT)
            else:
                outcomes = group.outcomes(train, training, number, folder, limit=LIMIT)
                killed += any(each.error is not None for each in outcomes)
        return judged(counted(training, folder), training.length, killed)


def judged(found: Counter[tuple[int, int]], length: int, killed: int) -> tuple[str, str]:
    """Return kind and description of the result."""
    wanted = Counter((epoch, sample) for epoch in range(EPOCHS) for sample in range(length))
    if found != wanted:
        return "repeated or missing", f"repeated {found - wanted}, missing {wanted - found}"
    if not killed:
        return "each sample once, no kill", "all kills came too late"
    return "each sample once", f"{killed} kills"
