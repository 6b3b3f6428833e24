"""Fixtures for all tests."""

import gc
import os
import signal
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import pytest
import torch

from shardwise.comm import Solo
from shardwise.net.identity import Identity
from shardwise.world import world as worlds
from shardwise.world.world import World
from tests.disk import make_own, on_a_disk, remove_own, wait_until
from tests.distributed.group import Groups
from tests.system.components import VARIABLE


def pytest_configure() -> None:
    """Mind the signals that a background job of a shell, or nohup, has ignored.

    The launcher keeps to what it inherits, and is tested for what these do. Examples of hypothesis
    have no time limit of their own: a busy machine is no failure. Tensors of tests are small:
    several threads of torch would wait for each other in busy loops, on cores that ranks need. So
    would those of the programs that tests start, unless a test sets the variable itself.
    """
    make_own()
    _check_packages()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    hypothesis.settings.register_profile("unhurried", deadline=None)
    hypothesis.settings.load_profile("unhurried")
    for number, plain in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, plain)


LIBRARIES = ("accelerate", "transformers", "peft", "lightning")
"""Packages whose tests skip where they are absent; TESTS_REQUIRE may ask for them."""


def _check_packages() -> None:
    """Raise UsageError for a library that TESTS_REQUIRE asks for and that is not there: its tests
    would be skipped."""
    asked = os.environ.get(VARIABLE, "").split(",")
    absent = [name for name in LIBRARIES if name in asked and find_spec(name) is None]
    if absent:
        raise pytest.UsageError(f"{VARIABLE} asks for {', '.join(absent)}, not installed here.")


def pytest_collection_finish() -> None:
    """Put aside what the tests have imported: else each collection of garbage that a test asks for
    looks at all of it, for half a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Leave nothing behind."""
    remove_own()


@pytest.fixture(scope="session")
def group() -> Iterator[Groups]:
    """`group(size)(function, *args)` runs `function(world, *args)` on `size` ranks."""
    groups = Groups()
    yield groups
    groups.close()


@pytest.fixture
def solo(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A world of one rank as `shardwise.init` makes it, without a process group."""
    world = World(Identity(launcher="python"), Solo(), torch.device("cpu"))
    monkeypatch.setattr(worlds, "_current", world)
    yield world
    world.preemption.forget()  # a save listens for signals, which other tests send themselves


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder on a disk; whoever uses it leaves no file in it and no thread behind."""
    before = set(threading.enumerate())
    path = on_a_disk() / f"shardwise-test-{os.getpid()}"
    path.mkdir()
    yield path
    left = list(path.iterdir())
    path.rmdir()
    assert left == []
    gc.collect()
    wait_until(lambda: set(threading.enumerate()) <= before)
