"""Forks ranks from a process that has a simulated device and has imported all modules.

multiprocessing has only one fork server, which tests/distributed uses. This is a second one.
"""

from __future__ import annotations

from multiprocessing import context, forkserver, popen_forkserver
from typing import Any
from unittest import mock

SERVER = forkserver.ForkServer()
SERVER.set_forkserver_preload(
    [
        *("tests.phantom.warm", "torch._dynamo", "torch.distributed.pipelining"),
        *(
            "torch.utils.data",
            "shardwise.engine",
            "shardwise.world.initialize",
            "shardwise.data.loader",
        ),
        *("pytest", "tests.distributed.worker", "tests.phantom.cases", "tests.phantom.report"),
    ]
)


class _Popen(popen_forkserver.Popen):
    def _launch(self, process_obj: Any) -> None:
        ours = SERVER.connect_to_new_process
        with mock.patch.object(forkserver, "connect_to_new_process", ours):
            super()._launch(process_obj)  # type: ignore[misc]


class Process(context.ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:  # noqa: N802 (multiprocessing's name)
        return _Popen(process_obj)


class Forked(context.ForkServerContext):
    """Return a multiprocessing context whose processes are forked there."""

    Process = Process
