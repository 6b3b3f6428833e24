"""Reaching the other ranks of a host over Unix sockets."""

import socket
import threading
import time
import uuid

import pytest

from shardwise.comm import socket_mesh


@pytest.fixture
def crowded():
    """A listener whose queue is full, and the address that it listens at."""
    address = f"\0shardwise-test-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(1)
        waiting = []
        while True:
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.setblocking(False)
            waiting.append(stranger)
            try:
                stranger.connect(address)
            except BlockingIOError:
                break
        yield listener, address
        for stranger in waiting:
            stranger.close()


def reach(address, seconds):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(5)
        socket_mesh._reach(peer, address, time.monotonic() + seconds)
        return peer.getpeername()


def test_a_full_queue_is_tried_again(crowded):
    listener, address = crowded

    def make_room():
        time.sleep(0.2)
        listener.accept()[0].close()

    thread = threading.Thread(target=make_room)
    thread.start()
    assert reach(address, 5)
    thread.join()


def test_a_queue_that_stays_full_is_told_of_after_the_time_out(crowded):
    _, address = crowded
    began = time.monotonic()
    with pytest.raises(BlockingIOError):
        reach(address, 0.2)
    assert 0.2 <= time.monotonic() - began < 2
