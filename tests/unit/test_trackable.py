"""Objects that `engine.track` takes: generators and containers are restored in place."""

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardwise.checkpoint.tracking import Tracking
from shardwise.errors import UsageError


def drawn(each: Any) -> Any:
    if isinstance(each, torch.Generator):
        return torch.rand(3, generator=each).tolist()
    return [each.random() for _ in range(3)]


GENERATORS = [
    lambda seed: torch.Generator().manual_seed(seed),
    random.Random,
    np.random.default_rng,
]


@pytest.mark.parametrize("make", GENERATORS)
def test_a_generator_continues(make: Any, tmp_path: Any) -> None:
    saved, fresh = make(1), make(2)
    drawn(saved)
    first, second = Tracking(), Tracking()
    first.add({"noise": saved})
    second.add({"noise": fresh})
    fields, files = first.states()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    second.restore(second.read(tmp_path, {"tracked": fields, "files": {}}))
    assert drawn(fresh) == drawn(saved)


@pytest.mark.parametrize(
    ("saved", "fresh"),
    [
        ({"best": 0.5, "history": [1, 2]}, {"best": 1.0}),
        ([1, "two"], []),
        (deque([1, 2], maxlen=2), deque([0], maxlen=2)),
        (torch.tensor([1.0, 2.0]), torch.zeros(2)),
    ],
)
def test_containers_are_filled_in_place(saved: Any, fresh: Any, tmp_path: Any) -> None:
    first, second = Tracking(), Tracking()
    first.add({"progress": saved})
    fields, files = first.states()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    second.restore(second.read(tmp_path, {"tracked": fields, "files": {}}))
    second.add({"progress": fresh})  # its loaded state was kept until now
    assert list(fresh) == list(saved)
    assert not isinstance(saved, dict) or fresh == saved


def test_a_number_is_refused_with_advice() -> None:
    with pytest.raises(UsageError, match=r"bests = \{...\}; engine.track\(bests=bests\)"):
        Tracking().add({"best": 0.5})


class Loaderlike(nn.Module):
    name = "Loader(data)"


def test_what_another_engine_tracks_is_tracked() -> None:
    from shardwise.world.current_batch import CurrentBatch, StreamShape

    feed = CurrentBatch()
    stream = feed.open(
        "Loader(data)", StreamShape(batch_size=1, micro_batches=1, steps_per_epoch=1)
    )
    one, other = Tracking(), Tracking()
    assert len(list(other.describe_losses([], [stream]))) == 1
    one.add({"loader": Loaderlike()})
    assert list(other.describe_losses([], [stream])) == []
