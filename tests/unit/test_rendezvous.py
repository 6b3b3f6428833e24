"""The rendezvous file, and the rendezvous of ranks without an address of rank 0."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import LaunchError
from shardwise.net import environment, rendezvous, rendezvous_file
from shardwise.net.identity import Identity
from shardwise.net.rendezvous_file import RendezvousFile

FIRST = Identity(launcher="Slurm", size=2, node=0, address="n1", job="slurm 1.0 0")
SECOND = replace(FIRST, rank=1, node=1)
NOTE = RendezvousFile(
    addresses=("n1", "10.9.0.1"), port=4321, host=socket.gethostname(), pid=os.getpid()
)


class TestPath:
    def test_file_of_one_host_is_in_folder_of_user(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
        alone = replace(FIRST, local_size=2)
        assert rendezvous_file.path(alone).parent == tmp_path / f"shardwise-{os.getuid()}"
        assert rendezvous_file.path(alone) == rendezvous_file.path(replace(alone, rank=1))
        assert rendezvous_file.path(alone) != rendezvous_file.path(
            replace(alone, job="slurm 1.1 0")
        )

    def test_file_of_many_hosts_is_in_working_directory(self) -> None:
        assert rendezvous_file.path(FIRST).parent == Path.cwd()
        assert rendezvous_file.path(FIRST, "/shared/").parent == Path("/shared")

    def test_refuses_run_without_name(self) -> None:
        with pytest.raises(LaunchError, match=r"Name rank 0's host .*SHARDWISE_RENDEZVOUS="):
            rendezvous_file.path(Identity(launcher="MPICH", size=2))


class TestNote:
    def test_file_exists_during_block(self, tmp_path: Path) -> None:
        place = tmp_path / "note"
        assert rendezvous_file.read(place) is None
        with rendezvous_file.publish(place, NOTE):
            assert rendezvous_file.read(place) == NOTE
        assert list(tmp_path.iterdir()) == []

    def test_reports_missing_folder(self, tmp_path: Path) -> None:
        with (
            pytest.raises(
                LaunchError, match=r"cannot write the rendezvous file in .*: No such file"
            ),
            rendezvous_file.publish(tmp_path / "none" / "note", NOTE),
        ):
            pass

    def test_terminated_run_removes_file(self, tmp_path: Path) -> None:
        code = (
            "import sys, time; from pathlib import Path\n"
            "from shardwise.net import rendezvous_file as files\n"
            "note = files.RendezvousFile(addresses=(), port=1, host='h', pid=1)\n"
            "with files.publish(Path(sys.argv[1]), note): print('left', flush=True); time.sleep(60)"
        )
        words = [sys.executable, "-c", code, str(tmp_path / "note")]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"left\n"
            assert len(list(tmp_path.iterdir())) == 1
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 128 + signal.SIGTERM
        assert list(tmp_path.iterdir()) == []

    def test_removes_files_of_killed_runs(self, tmp_path: Path) -> None:
        ended = subprocess.Popen(["true"])
        ended.wait()
        mine, theirs, old = (
            tmp_path / rendezvous_file.PATTERN.format(user=os.getuid(), run=run)
            for run in ("a", "b", "c")
        )
        mine.write_text(json.dumps(asdict(NOTE)))
        theirs.write_text(json.dumps(asdict(replace(NOTE, host="elsewhere", pid=ended.pid))))
        old.write_text(json.dumps(asdict(replace(NOTE, pid=ended.pid))))
        half = tmp_path / f"{rendezvous_file.DRAFT}{old.name}.{ended.pid}"
        half.write_text("{")
        broken = old.with_name(old.name + "d")
        broken.write_text("")
        for place in (mine, theirs, old, half, broken):
            os.utime(place, (1, 1))
        fresh = old.with_name(old.name + "e")
        fresh.write_text(json.dumps(asdict(replace(NOTE, pid=ended.pid))))
        with rendezvous_file.publish(tmp_path / "note", NOTE):
            left = {place.name for place in tmp_path.iterdir()}
        kept = {place.name for place in (mine, theirs, broken, fresh)}
        assert left == {"note", *kept}

    def test_keeps_file_whose_process_id_was_reused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(pid: int, number: int) -> None:
            raise PermissionError

        old = tmp_path / rendezvous_file.PATTERN.format(user=os.getuid(), run="a")
        old.write_text(json.dumps(asdict(NOTE)))
        os.utime(old, (1, 1))
        monkeypatch.setattr(os, "kill", refuse)
        with rendezvous_file.publish(tmp_path / "note", NOTE):
            assert old.exists()

    def test_ignores_malformed_file(self, tmp_path: Path) -> None:
        place = tmp_path / "note"
        for text in ("", "{", "[]", "{}", json.dumps(asdict(NOTE) | {"more": 1})):
            place.write_text(text)
            assert rendezvous_file.read(place) is None

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
    def test_ignores_file_of_other_user(self, tmp_path: Path) -> None:
        place = tmp_path / "note"
        place.write_text(json.dumps(asdict(NOTE)))
        os.chown(place, 65534, 65534)
        assert (
            rendezvous_file.read(place) == NOTE
        )  # a file system may rename owners; nobody else can write
        tmp_path.chmod(0o1777)
        assert rendezvous_file.read(place) is None


class TestMeeting:
    @pytest.fixture(autouse=True)
    def _quiet(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(rendezvous.INTERFACE, "lo")

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Iterator[str]:
        yield f"{tmp_path}/"
        assert list(tmp_path.iterdir()) == []

    def test_ranks_meet(self, folder: str) -> None:
        stores: dict[int, Any] = {}

        def come(identity: Identity) -> None:
            stores[identity.rank] = rendezvous.meet(identity, 20, folder)

        late = threading.Thread(target=come, args=(SECOND,))
        late.start()
        come(FIRST)
        late.join()
        stores[1].store.set("question", "42")
        assert stores[0].store.get("question") == b"42"
        assert stores[0].secret == stores[1].secret
        for met in stores.values():
            assert not met.is_open
            met.close()

    def test_rank_0_names_missing_ranks(
        self, folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(rendezvous, "WARN", 0.1)
        with pytest.raises(LaunchError, match=r"Ranks 1, 2 of the 3 .*share .*SHARDWISE_REND"):
            rendezvous.meet(replace(FIRST, size=3), 0.3, folder)
        assert "Still waiting." in capsys.readouterr().err

    def test_reports_missing_rank_0(self, folder: str) -> None:
        with pytest.raises(
            LaunchError, match=r"Rank 1 of 2, .* found no rendezvous file of rank 0 in"
        ):
            rendezvous.meet(SECOND, 0.2, folder)

    def test_reports_unreachable_addresses(self, folder: str) -> None:
        place = rendezvous_file.path(SECOND, folder)
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        note = replace(NOTE, addresses=("127.0.0.1", "no.such.host.invalid"), port=port)
        began = time.monotonic()
        with (
            rendezvous_file.publish(place, note),
            pytest.raises(
                LaunchError,
                match=rf"at 127.0.0.1 or no.such.*, port {port}, within 0.2 s",
            ),
        ):
            rendezvous.meet(SECOND, 0.2, folder)
        assert time.monotonic() - began < 15

    def test_reports_silent_rank_0(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(environment.RUN_SECRET_VARIABLE, "the secret of the run")
        with socket.create_server(("127.0.0.1", 0)) as inherited:  # the kernel accepts for it
            port = inherited.getsockname()[1]
            told = Identity(
                launcher="shardwise run", rank=1, size=2, address="127.0.0.1", port=port
            )
            began = time.monotonic()
            with pytest.raises(LaunchError, match=r"within 0.5 s .* it does not answer") as error:
                rendezvous.meet(told, 0.5, None)
        assert error.value.at_fault == (0,)
        assert time.monotonic() - began < 5

    def test_all_ranks_name_missing_rank(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(environment.RUN_SECRET_VARIABLE, "the secret of the run")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        told = Identity(launcher="shardwise run", size=3, address="127.0.0.1", port=port)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(rendezvous.meet, told, 3.0, None)
            second = pool.submit(rendezvous.meet, replace(told, rank=1), 1.0, None)
            error = second.exception()
            assert isinstance(error, LaunchError)
            assert "reached rank 0, but rank 2 did not within 1 s" in str(error)
            assert error.at_fault == (2,)
            error = first.exception()
            assert isinstance(error, LaunchError)
            assert error.at_fault == (2,)

    def test_meets_at_address_of_setting(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        alone = replace(FIRST, size=1)
        met = rendezvous.meet(alone, 10, f"127.0.0.1:{port}")
        assert (met.store.num_keys(), met.is_open) == (1, False)
        met.close()
