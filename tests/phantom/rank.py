"""A rank of a warm group on the simulated device."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from tests.phantom import building


def become() -> None:
    """Give this process a simulated device, before it imports torch."""
    library = building.load()

    from tests.phantom import collectives, host, memory, operators, streams, torch_cuda
    from tests.phantom.clocks import HOST
    from tests.phantom.order import Order
    from tests.phantom.where import where

    streams.Device.library = library
    streams.follow(Order(where, memory.released), HOST)
    torch_cuda.install()
    operators.install()
    collectives.install()
    host.follow_files()


def main(
    connection: Connection, printed: int, environ: Mapping[str, str], settings: dict[str, Any]
) -> None:
    """Run as a rank, like `tests.distributed.worker.main`, with one GPU visible."""
    if "torch" not in sys.modules:  # otherwise this process was forked from one that has a device
        become()
    from shardwise.net.launchers import detection as launcher_detection
    from tests.distributed import worker

    identify = launcher_detection.identify
    launcher_detection.identify = lambda: replace(identify(), own_gpus=True)
    worker.main(connection, printed, environ, settings)
