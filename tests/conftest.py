"""Fixtures for all tests."""

import signal
from collections.abc import Iterator

import pytest
import torch

from shardwise import world as worlds
from shardwise.collectives import Solo
from shardwise.launch.identity import Identity
from shardwise.world import World
from tests.distributed.group import Groups


def pytest_configure() -> None:
    """Mind the signals that a background job of a shell, or nohup, has ignored.

    The launcher keeps to what it inherits, and is tested for what these do.
    """
    for number, plain in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, plain)


@pytest.fixture(scope="session")
def group() -> Iterator[Groups]:
    """`group(size)(function, *args)` runs `function(world, *args)` on `size` gloo ranks."""
    groups = Groups()
    yield groups
    groups.close()


@pytest.fixture
def solo(monkeypatch: pytest.MonkeyPatch) -> World:
    """A world of one rank as `shardwise.init` makes it, without a process group."""
    world = World(Identity(launcher="python"), Solo(), torch.device("cpu"))
    monkeypatch.setattr(worlds, "_current", world)
    return world
