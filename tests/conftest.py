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
from tests.system.warm import start_quickly


def pytest_configure() -> None:
    """Prepare the session: signals, time limits and threads.

    The launcher respects signals that it inherits as ignored (from a background job or nohup), so
    restore those that tests send. Hypothesis examples have no time limit, because a slow run on a
    busy machine is not a failure. torch gets one thread, because test tensors are small and its
    threads would wait for each other in busy loops, on cores that ranks need. The same applies to
    programs that tests start, unless a test sets the variable itself. These programs do not import
    torch's compiler unless they compile.
    """
    make_own()
    _check_packages()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    start_quickly(os.environ)
    hypothesis.settings.register_profile("unhurried", deadline=None)
    hypothesis.settings.load_profile("unhurried")
    for number, plain in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, plain)


LIBRARIES = ("accelerate", "transformers", "peft", "lightning", "deepspeed", "trl")
"""Packages whose tests are skipped if they are not installed, unless TESTS_REQUIRE lists them."""


def _check_packages() -> None:
    """Raise UsageError if a library in TESTS_REQUIRE is missing. Its tests would be skipped."""
    asked = os.environ.get(VARIABLE, "").split(",")
    absent = [name for name in LIBRARIES if name in asked and find_spec(name) is None]
    if absent:
        raise pytest.UsageError(f"{VARIABLE} asks for {', '.join(absent)}, not installed here.")


def pytest_collection_finish() -> None:
    """Freeze imported objects, which makes garbage collections half a second faster."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Clean up at the end of the session."""
    remove_own()


@pytest.fixture(scope="session")
def group() -> Iterator[Groups]:
    """`group(size)(function, *args)` runs `function(world, *args)` on `size` ranks."""
    groups = Groups()
    yield groups
    groups.close()


@pytest.fixture
def solo(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Create a world of one rank, as `shardwise.init` does, without a process group."""
    world = World(Identity(launcher="python"), Solo(), torch.device("cpu"))
    monkeypatch.setattr(worlds, "_current", world)
    yield world
    world.preemption.forget()  # a save listens for signals, which other tests send themselves


@pytest.fixture
def folder() -> Iterator[Path]:
    """Create an empty folder on a disk. Tests must leave no files in it and no threads running."""
    before = set(threading.enumerate())
    path = on_a_disk() / f"shardwise-test-{os.getpid()}"
    path.mkdir()
    yield path
    left = list(path.iterdir())
    path.rmdir()
    assert left == []
    gc.collect()
    wait_until(lambda: set(threading.enumerate()) <= before)
