"""Activations over the life of a model and an engine: copies, failures, close, and start lines."""

import copy
import errno
import gc
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.errors import TierError
from shardwise.world.world import World
from tests.disk import failing
from tests.unit.activations.models import WAYS, Net, make, on, same, x


def pickled(model: Net) -> Net:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
def test_copies_are_plain(way: str, folder: Path, copied: Callable[[Net], Net]) -> None:
    model = make()
    with on(model, way, folder):
        twin = copied(model)
        again = copied(twin)
        part = copied(model.blocks[1])
    for other in (twin, again):
        ran: list[int] = []
        other.blocks[0].first.register_forward_hook(lambda *_, ran=ran: ran.append(1))
        torch.manual_seed(1)
        other(x()).backward()
        assert len(ran) == 1, "the copy recomputes"
        assert other.blocks[0].forward.__self__ is other.blocks[0]
    torch.manual_seed(1)
    model(x()).backward()
    same(twin, model)
    assert part.forward.__self__ is part


@pytest.mark.parametrize("way", WAYS)
def test_closing_leaves_the_model_as_it_was(way: str, folder: Path) -> None:
    model = make()
    before = [set(vars(module)) for module in model.modules()]
    with on(model, way, folder):
        model(x()).backward()
    assert [set(vars(module)) for module in model.modules()] == before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_full_disk_stops_forward_with_our_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    with on(model, "nvme", folder):
        with monkeypatch.context() as patched:
            failing(patched, "pwritev", errno.ENOSPC)
            with pytest.raises(TierError, match=r"activations of rank 0 .*No space left"):
                model(x(rows=100))
        gc.collect()
        model(x()).backward()
    assert model.head.weight.grad is not None


def test_the_start_lines(solo: World, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for keywords, said in (
        ({"activations": "recomputed"}, "activations: recomputed in 3 units"),
        ({"offload_activations": f"nvme:{folder}"}, f"activations: on nvme:{folder}"),
        ({"offload_activations": "cpu"}, "activations: on cpu, where these workers compute"),
    ):
        model = make()
        engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), **keywords)
        engine.close()
        assert said in capsys.readouterr().out


def test_a_wrong_folder_is_named(solo: World, folder: Path) -> None:
    model = make()
    with pytest.raises(TierError, match="nowhere"):
        sw.Engine(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            offload_activations=f"nvme:{folder / 'nowhere'}",
        )
