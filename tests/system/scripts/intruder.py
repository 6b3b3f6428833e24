"""Simulates another user of the host, who tries to join a run as rank 1 and then to disturb it.

    python intruder.py PORT FOLDER            as root: it becomes nobody after all imports

Rank 0 listens at PORT. The script writes notes of its actions to FOLDER. It reads the addresses of
the run's other sockets from standard input, as lines of `tcp PORT` or `unix NAME`.
"""

import contextlib
import encodings.idna  # noqa: F401 (nobody may not read where Python is)
import faulthandler
import os
import pickle
import socket
import sys
import time
from pathlib import Path
from typing import Any

NOBODY = 65534
CROWD = 30
"""Connections to each socket that say nothing."""


class Payload:
    """An object that runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def become_nobody() -> None:
    """Give up all rights of root for good."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def wait_for(port: int) -> None:
    """Return once somebody listens there."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.02)


def pose_as_rank_1(port: int, mark: Path) -> str:
    """Join with all that rank 1 is told but the secret, and send pickles that run code."""
    from shardwise.comm import base
    from shardwise.world import initialize

    told = {"RANK": 1, "SIZE": 2, "LOCAL_RANK": 1, "LOCAL_SIZE": 2, "PORT": port}
    os.environ |= {f"SHARDWISE_LAUNCH_{name}": str(value) for name, value in told.items()}
    os.environ |= {"SHARDWISE_LAUNCH_ADDRESS": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ["SHARDWISE_LAUNCH_SECRET"] = "it may be this one"
    harm = pickle.dumps(Payload(mark))

    class Harmful:
        dumps = staticmethod(lambda value: harm)
        loads = staticmethod(lambda data: None)

    base.pickle = Harmful  # type: ignore[assignment]
    try:
        initialize.init(timeout=2.0, device="cpu")
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "joined"


def use_torchs_store(port: int) -> str:
    """Write on what would be torch's store."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    try:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1))
        store.set("default_pg/0//cpu//0/1", "mine")
    except RuntimeError as error:
        return type(error).__name__
    return "written"


def crowd(family: socket.AddressFamily, kind: socket.SocketKind, place: Any) -> list[socket.socket]:
    """Connect many times, and say nothing but once, and that is noise."""
    held = []
    for number in range(CROWD):
        peer = socket.socket(family, kind)
        peer.settimeout(0.3)
        held.append(peer)
        try:
            peer.connect(place)
            if number == 0:
                peer.send(b"[" + pickle.dumps(Payload(folder / "harmed")) + b"]\n")
        except OSError:  # nobody hears there
            break
    return held


faulthandler.enable()
port, folder = int(sys.argv[1]), Path(sys.argv[2])
import torch  # noqa: E402

import shardwise.horovod  # noqa: E402, F401

torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()  # complete all lazy imports first
become_nobody()
wait_for(port)
held = crowd(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", port))
(folder / "store").write_text(use_torchs_store(port))
(folder / "pose").write_text(pose_as_rank_1(port, folder / "harmed"))
(folder / "tried").touch()
for seen, line in enumerate(sys.stdin, start=1):
    kind, name = line.split()
    if kind == "tcp":
        held += crowd(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", int(name)))
    else:
        held += crowd(socket.AF_UNIX, socket.SOCK_SEQPACKET, "\0" + name)
    if seen == 4:  # of each rank Gloo's socket and the watch's
        (folder / "disturbed").touch()
