"""A rank names the rank that was lost, and not one that exited because of it."""

import socket
from collections.abc import Iterator

import pytest
import torch

from shardwise.comm.base import GroupRanks
from shardwise.comm.progress_thread import PendingWork
from shardwise.comm.shared_work import (
    FAILED,
    HALFWAY,
    GroupWork,
    Messages,
    ProcessWork,
    Steps,
    first_message,
)
from shardwise.comm.socket_mesh import _HEADER, MeshMessage, SocketMesh
from shardwise.errors import PeerLost
from shardwise.watch.status_server import StatusServer
from shardwise.watch.wait_graph import Abort

CAUSE = "Rank 2 of 4 lost rank 1 in all-reduce (call 7)"


@pytest.fixture
def here() -> Iterator[tuple[GroupWork, StatusServer, socket.socket]]:
    """Rank 3 of 4, whose group has ranks 2 and 3, and the socket of rank 2."""
    mine, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = StatusServer(rank=3, size=4)
    process_work = ProcessWork(server)
    mesh = SocketMesh({0: mine}, process_work.poll)
    work = GroupWork(mesh, process_work, 1, 2, 5.0, GroupRanks((2, 3), 4))
    with others:
        yield work, server, others
    work.close()


def _between_hosts(pending: PendingWork) -> Steps:
    yield pending


def _on_this_host() -> Steps:
    messages: Messages = yield HALFWAY
    raise AssertionError(f"rank 2 is not there: {messages}")


def _message_before_an_exit() -> bytes:
    message = MeshMessage(0, FAILED, kind=1, payload=CAUSE.encode())
    return _HEADER.pack(*message[:8]) + message.payload


def _error(work: GroupWork, steps: Steps) -> str:
    opening = first_message(7, "all-reduce", torch.zeros(1), check=0)
    with pytest.raises(PeerLost) as caught:
        work.start(opening, steps).wait()
    return str(caught.value)


def test_cause_is_named_if_the_other_host_is_lost_at_the_same_time(here):
    work, _, others = here
    pending = PendingWork(lambda: ())
    pending.end(PeerLost("Rank 3 of 4 lost rank 0 in all-reduce (call 7): connection reset."))
    # Both arrive before this rank looks: the reason of rank 2, and the end of its socket.
    others.send(_message_before_an_exit())
    others.close()
    assert CAUSE in _error(work, _between_hosts(pending))


def test_announced_cause_is_named_if_a_rank_exits_without_a_message(here):
    work, server, others = here
    server.abort = Abort(rank=2, text=CAUSE, lost=True)
    others.close()
    assert CAUSE in _error(work, _on_this_host())


def test_rank_that_exits_without_a_reason_is_named(here):
    work, _, others = here
    others.close()
    assert "Rank 3 of 4 lost rank 2 in all-reduce (call 7)" in _error(work, _on_this_host())
