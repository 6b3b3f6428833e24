"""Runs on several hosts: lists of hosts, ssh commands, messages, and output."""

import json
import selectors
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardwise.errors import LaunchError
from shardwise.launch import failure_report, orphan_reaper, start
from shardwise.launch.console import Console
from shardwise.launch.failure_report import ExitStatus, Verdict
from shardwise.launch.run_spec import RunSpec
from shardwise.launch.ssh import agents, command, many_hosts, protocol
from shardwise.launch.ssh.agent import Agent
from shardwise.launch.ssh.remote_host import RemoteHost
from shardwise.launch.worker_output import WorkerOutput, open_log
from shardwise.net import environment, hosts, network
from shardwise.net.error_file import ErrorReport
from shardwise.net.hosts import Host, Share

TWO = [Host("h1", 4), Host("h2", 4)]
WAY = RunSpec(words=(), size=1, shares=(), folder="/home/me/my work", python="/opt/py")


class TestHosts:
    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("h1:4,h2:4", TWO),
            ("h1", [Host("h1")]),
            (
                "alice@node-1.site:2, 10.0.0.7:1",
                [Host("node-1.site", 2, "alice"), Host("10.0.0.7", 1)],
            ),
            ("[fd00::2]:3,[::1]", [Host("fd00::2", 3), Host("::1")]),
            ("bob@[fe80::1%eth0]:1", [Host("fe80::1%eth0", 1, "bob")]),
            ("h1,h1,h2", [Host("h1", 2), Host("h2")]),
            ("h1:2,h2,h1:2", [Host("h1", 4), Host("h2")]),
        ],
    )
    def test_parses_list_of_hosts(self, text: str, found: list[Host]) -> None:
        assert hosts.from_list(text) == found

    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("h1 slots=4\nh2 slots=4\n", TWO),
            ("h1:4\nh2:4", TWO),
            ("# two\n\n  h1\tslots=4   # first\nh2 max_slots=8 slots=4", TWO),
            ("h1 slots=2\nh2 slots=4\nh1 slots=2", TWO),
            ("alice@h1\n[fd00::2] slots=2\n", [Host("h1", None, "alice"), Host("fd00::2", 2)]),
            ("h1 max-slots=2", [Host("h1")]),
        ],
    )
    def test_parses_hostfile(self, text: str, found: list[Host]) -> None:
        assert hosts.from_file(text, "F") == found

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "-H : '' is not a host. Write for example node1:4"),
            ("h1,,h2", "-H h1,,h2: '' is not a host"),
            ("h1:4 h2:4", "'h1:4 h2:4' is not a host"),
            ("h1:0", "'h1:0': the number of slots takes a number above 0, not '0'"),
            ("h1:-2", "takes a number above 0, not '-2'"),
            ("h1:four", "takes a number above 0, not 'four'"),
            ("h1:", "takes a number above 0, not ''"),
            ("fd00::2", r"write an IPv6 address in brackets, such as \[fd00::2\]:4"),
            ("-oProxyCommand=x", "is not a host"),
            ("-l@h", "is not a host"),
            ("a@b@c", "is not a host"),
        ],
    )
    def test_refuses_malformed_list(self, text: str, message: str) -> None:
        with pytest.raises(LaunchError, match=message):
            hosts.from_list(text)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("h1 slots=4\nh2 slot=4", "^F:2: 'slot=4' is not an option of host h2. Write slots=4"),
            ("\n\nh1 4", "^F:3: '4' is not an option of host h1"),
            ("h1:4 slots=2", "^F:1: h1 has :4 and slots=2: write only one of them"),
            ("h1 slots=x", "^F:1: 'slots=x': the number of slots takes a number above 0, not 'x'"),
            ("h1 slots=4 max_slots=2", "^F:1: h1 has 4 slots, more than max_slots=2"),
            ("h1:4\n::1:4", "^F:2: .* in brackets"),
            ("# none\n", "^F contains no hosts. Write one per line"),
        ],
    )
    def test_refuses_malformed_hostfile(self, text: str, message: str) -> None:
        with pytest.raises(LaunchError, match=message):
            hosts.from_file(text, "F")

    def test_refuses_unreadable_hostfile(self, tmp_path: Path) -> None:
        with pytest.raises(LaunchError, match="none cannot be read: No such file or directory"):
            hosts.read(tmp_path / "none")
        (tmp_path / "bytes").write_bytes(b"\xff\xfe")
        with pytest.raises(LaunchError, match="bytes cannot be read: it is not text"):
            hosts.read(tmp_path / "bytes")

    @pytest.mark.parametrize(
        ("given", "total", "per_host", "counts"),
        [
            (TWO, None, None, [(0, 4), (4, 4)]),
            (TWO, 6, None, [(0, 4), (4, 2)]),
            (TWO, 3, None, [(0, 3)]),
            ([Host("h1"), Host("h2")], None, None, [(0, 1), (1, 1)]),
            ([Host("h1"), Host("h2")], None, 2, [(0, 2), (2, 2)]),
            ([Host("h1"), Host("h2", 2)], 3, 2, [(0, 2), (2, 1)]),
        ],
    )
    def test_spreads_ranks_over_hosts(
        self,
        given: list[Host],
        total: int | None,
        per_host: int | None,
        counts: list[tuple[int, int]],
    ) -> None:
        shares = hosts.spread(given, total=total, per_host=per_host)
        assert [(share.first, share.count) for share in shares] == counts
        assert [share.host for share in shares] == given[: len(counts)]

    @pytest.mark.parametrize(
        ("total", "spares", "found"),
        [
            (6, 1, [("ranks 0-3", ()), ("ranks 4-5 and spare 6", (6,))]),
            (3, 2, [("ranks 0-2 and spare 3", (3,)), ("spare 4", (4,))]),
            (None, 2, [("ranks 0-3", ()), ("ranks 4-7 and spares 8, 9", (8, 9))]),
            (4, 0, [("ranks 0-3", ())]),
        ],
    )
    def test_spares_use_the_slots_that_are_left(
        self, total: int | None, spares: int, found: list[tuple[str, tuple[int, ...]]]
    ) -> None:
        shares = hosts.spread(TWO, total=total, spares=spares)
        assert [(share.ranks, share.spares) for share in shares] == found

    @pytest.mark.parametrize(
        ("total", "per_host", "message"),
        [
            (9, None, r"-n 9: 2 hosts with 8 slots in total. Increase their slots \(h1:5\)"),
            (0, None, "-n 0: a run has at least one rank"),
            (None, 2, "--nproc-per-node 2 contradicts the 4 slots of h1"),
        ],
    )
    def test_refuses_ranks_that_do_not_fit(
        self, total: int | None, per_host: int | None, message: str
    ) -> None:
        with pytest.raises(LaunchError, match=message):
            hosts.spread(TWO, total=total, per_host=per_host)

    @pytest.mark.parametrize(
        ("text", "found"),
        [("0", (0,)), ("0,2-3", (0, 2, 3)), (" 1 , 1", (1,)), ("0-3", (0, 1, 2, 3))],
    )
    def test_parses_ranks(self, text: str, found: tuple[int, ...]) -> None:
        assert hosts.ranks(text, 4, "--show") == found

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("4", "--show 4: the 4 ranks of this run are 0 to 3"),
            ("3-1", "'3-1' ends before it begins. Write 1-3."),
            ("", "'' is not a rank"),
            ("-1", "'-1' is not a rank"),
            ("all", "'all' is not a rank"),
        ],
    )
    def test_refuses_malformed_ranks(self, text: str, message: str) -> None:
        with pytest.raises(LaunchError, match=message):
            hosts.ranks(text, 4, "--show")


class TestInterface:
    def test_is_here(self) -> None:
        assert network.is_here(Host("localhost"))
        assert network.is_here(Host("127.0.0.1"))
        assert network.is_here(Host(socket.gethostname()))
        assert not network.is_here(Host("192.0.2.77"))
        assert not network.is_here(Host("no-such-host.invalid"))
        assert not network.is_here(Host("localhost", user="another"))

    def test_finds_loopback_by_address_and_route(self) -> None:
        name = network.interface_of("127.0.0.1")
        assert name is not None
        assert network.address_of_interface(name) == "127.0.0.1"
        assert network.address_towards("127.0.0.1") == "127.0.0.1"
        assert network.interface_of("192.0.2.77") is None

    def test_reports_loopback_that_is_down(self) -> None:
        """In a new network namespace the loopback interface is down."""
        listen = "from shardwise.net import network; network.listen('127.0.0.1', 0)"
        if (
            shutil.which("unshare") is None
            or subprocess.run(["unshare", "--net", "true"]).returncode
        ):
            pytest.skip("no namespaces")
        words = ["unshare", "--net", sys.executable, "-c", listen]
        ran = subprocess.run(words, capture_output=True, text=True)
        assert "LaunchError: Ranks on this host connect over 127.0.0.1" in ran.stderr
        assert "Try: ip link set lo up" in ran.stderr

    def test_refuses_unknown_interface_and_host(self) -> None:
        with pytest.raises(
            LaunchError,
            match=r"has no such interface. Its interfaces are: .*\(127.0.0.1\)",
        ):
            network.address_of_interface("nope0")
        with pytest.raises(LaunchError, match=r"There is no route from this host to no-such"):
            network.address_towards("no-such-host.invalid")


ENVIRON = {
    "HOME": "/root",
    "TERM": "xterm",
    "WANDB_KEY": "s",
    "SHARDWISE_SEED": "7",
    "SHARDWISE_LAUNCH_RANK": "0",
    "SHARDWISE_FLAGS": "{}",
}


class TestPassing:
    @pytest.mark.parametrize(
        ("asked", "name", "found"),
        [
            ([], None, {}),
            (["WANDB_KEY", "A=b=c", "B="], None, {"WANDB_KEY": "s", "A": "b=c", "B": ""}),
            ([], "eth1", {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth1"}),
            (["SHARDWISE_SEED=8"], None, {"SHARDWISE_SEED": "8"}),
        ],
    )
    def test_passed_variables(
        self, asked: list[str], name: str | None, found: dict[str, str]
    ) -> None:
        always = {"SHARDWISE_SEED": "7", "TERM": "xterm"}
        assert environment.passed_variables(ENVIRON, asked, name) == always | found

    def test_refuses_unset_variable(self) -> None:
        with pytest.raises(LaunchError, match="this variable is not set here"):
            environment.passed_variables({}, ["WANDB_KEYS"], None)
        with pytest.raises(LaunchError, match="Did you mean WANDB_KEY"):
            environment.passed_variables(ENVIRON, ["WANDB_KEYS"], None)
        with pytest.raises(LaunchError, match="-x =1: write -x NAME, or -x NAME=VALUE"):
            environment.passed_variables({}, ["=1"], None)

    def test_working_folder_keeps_symbolic_links(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
        monkeypatch.chdir(tmp_path / "real")
        assert environment.working_folder({"PWD": f"{tmp_path}/link"}) == f"{tmp_path}/link"
        for wrong in ("/", "link", ""):
            assert environment.working_folder({"PWD": wrong}) == str((tmp_path / "real").resolve())


class TestSsh:
    def test_ssh_command(self) -> None:
        way = replace(
            WAY,
            ssh=("ssh", "-J", "gate"),
            ssh_port=2222,
            passed={"TOKEN": "secret", "PYTHONPATH": "/a b"},
            patience=20,
        )
        words = command.ssh_command(way, Host("h2", 4, "alice"))
        assert words[:5] == ["ssh", "-J", "gate", "-T", "-x"]
        assert {"BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5"} <= set(words)
        assert words[-5:-1] == ["-p", "2222", "alice@h2", "--"]
        assert words[-1] == (
            "cd '/home/me/my work' || exit 81; "
            "exec env 'PYTHONPATH=/a b' /opt/py -P -m shardwise.launch.ssh.agent"
        )
        assert "secret" not in " ".join(words)

    def test_qrsh_gets_no_flags_of_ssh(self) -> None:
        way = replace(WAY, ssh=("/usr/bin/qrsh", "-inherit"))
        words = command.ssh_command(way, Host("h2", 4))
        assert words[:-1] == ["/usr/bin/qrsh", "-inherit", "h2"]
        assert words[-1].endswith("exec /opt/py -P -m shardwise.launch.ssh.agent")
        with pytest.raises(LaunchError, match="--ssh-port 22: qrsh has no flag for a port"):
            command.ssh_command(replace(way, ssh_port=22), Host("h2"))

    def test_srun_starts_a_shell_on_the_host(self) -> None:
        words = command.ssh_command(replace(WAY, ssh=("srun", "--overlap")), Host("h2", 4))
        assert words[:-1] == ["srun", "--overlap", "--nodelist=h2", "sh", "-c"]

    @pytest.mark.parametrize(
        ("counts", "warns"), [((2, 2), False), ((1, 2), True), ((2, 1, 1), False), ((1, 1), False)]
    )
    def test_host_with_most_workers_is_named(self, counts: tuple[int, ...], warns: bool) -> None:
        shares = hosts.spread([Host(f"h{place}", each) for place, each in enumerate(counts)])
        line = many_hosts.survival_line(shares)
        assert line.startswith("shardwise: --survive: the run ends if this host is lost")
        assert ("it also ends if h1 is lost" in line) == warns

    @pytest.mark.parametrize(
        ("reached", "leads_to"),
        [
            (("", "10.0.0.2", "10.0.0.3"), ("10.0.0.2", "10.0.0.3", "10.0.0.2")),
            # Programs other than ssh do not set SSH_CONNECTION.
            (("", "", ""), ("h2", "h3", "h2")),
        ],
    )
    def test_each_host_finds_network_on_route_to_another(
        self, reached: tuple[str, ...], leads_to: tuple[str, ...]
    ) -> None:
        remotes: list[Any] = [
            SimpleNamespace(
                share=Share(Host(f"h{number}"), 0, 1),
                is_here=number == 1,
                hello={"address": address},
            )
            for number, address in enumerate(reached, 1)
        ]
        assert tuple(agents.peer(remote, remotes) for remote in remotes) == leads_to
        assert agents.peer(remotes[1], remotes[:2]) == socket.gethostname()
        assert agents.peer(remotes[0], remotes[:1]) == "127.0.0.1"

    @pytest.mark.parametrize(
        ("code", "said", "message"),
        [
            (81, "cd: no", "h2 has no folder /home/me/my work, where this run was started. Put"),
            (127, "", "h2 has no /opt/py. Install the same Python there"),
            (1, "/opt/py: No module named 'shardwise'", "/opt/py on h2 cannot import shardwise.l"),
            (
                255,
                "a\nalice@h2: Permission denied (publickey).",
                "until this works: ssh alice@h2 t",
            ),
            (255, "Host key verification failed.", "to accept the key of the host: ssh alice@h2"),
            (
                255,
                "ssh: connect to h2: refused",
                "ssh to h2 fails: ssh: connect to h2: refused. Check",
            ),
            (255, "", "ssh to h2 fails: no reason given. Check its spelling"),
            (-9, "", "The agent on h2 ended (signal 9). Try: ssh alice@h2 /opt/py -m"),
            (3, "oh", "The agent on h2 ended (exit code 3): oh. Try"),
            (None, "", "The agent on h2 ended (exit code 0)"),
        ],
    )
    def test_start_failure_is_explained(self, code: int | None, said: str, message: str) -> None:
        assert message in command.start_failure(WAY, Host("h2", 4, "alice"), code, said)

    def test_lost_host_is_explained(self) -> None:
        share = Share(Host("h2"), 4, 2)
        assert command.lost_host(WAY, share, 255, "", 9.0).startswith(
            "h2 (ranks 4-5) is lost: no sign of life for 10 s. The host or the network"
        )
        assert command.lost_host(WAY, share, -9, "", 9.0).startswith(
            "h2 (ranks 4-5) is lost: the agent on h2 e"
        )
        assert command.lost_host(WAY, share, 255, "", 0.66).startswith(
            "h2 (ranks 4-5) is lost: its agent ended 0.7 s after its last sign of life. It or"
        )

    @pytest.mark.parametrize(
        ("ssh", "code", "said", "silent", "shows"),
        [
            ("ssh", 0, "", 0.5, True),
            ("ssh", 137, "Killed", 0.5, True),
            ("ssh", 255, "", 0.5, True),  # a signal has ended the agent
            ("ssh", 255, "", 9.0, False),  # ssh has closed a silent connection
            ("ssh", 255, "Connection reset by peer", 0.5, False),
            ("ssh", -9, "", 0.5, False),  # ssh itself was killed
            ("ssh", None, "", 0.5, False),
            ("/usr/bin/srun", 137, "", 0.5, False),
        ],
    )
    def test_only_the_end_of_an_agent_shows_that_its_ranks_end(
        self, ssh: str, code: int | None, said: str, silent: float, shows: bool
    ) -> None:
        """Otherwise they may train until the agent notices that the connection is lost."""
        assert command.shows_end(replace(WAY, ssh=(ssh,)), code, said, silent) is shows

    @pytest.mark.parametrize(
        ("code", "least", "most"),
        [(137, orphan_reaper.PATIENCE + 0.5, 4.0), (255, WAY.lost_after - 4, WAY.lost_after)],
    )
    def test_the_others_wait_until_the_ranks_of_a_lost_host_have_ended(
        self, code: int, least: float, most: float
    ) -> None:
        ssh = ("sh", "-c", f"echo broken >&2; exit {code}", "ssh")
        spec = replace(WAY, ssh=ssh, flags={"survive": "1"})
        remote = RemoteHost(spec, Share(Host("h2"), 4, 2), lambda line: None, is_here=False)
        lost: list[float] = []
        remote._supervisor = cast(
            Any, SimpleNamespace(lost=lambda ranks, why, after: lost.append(after))
        )
        with selectors.DefaultSelector() as selector:
            remote.connect(selector)
            remote._read()
            remote.close()
            remote.wait(time.monotonic())
        assert least <= lost[0] <= most


class TestWire:
    def test_messages_survive_splits_and_noise(self) -> None:
        data = bytes(range(256))
        message = protocol.encode("output", rank=1, stream=2, data=protocol.text_of(data))
        sent = b"Welcome!\n" + protocol.HEARTBEAT + message + b"Last login: " + message + b"\n"
        for size in (1, 7, len(sent)):
            taken: list[protocol.Message] = []
            noise: list[bytes] = []
            receiver = protocol.MessageReader(protocol.FROM_AGENT, taken.append, noise.append)
            for place in range(0, len(sent), size):
                receiver.feed(sent[place : place + size] + protocol.HEARTBEAT)
            assert [protocol.bytes_of(one["data"]) for one in taken] == [data, data]
            assert b"".join(noise) == b"Welcome!\nLast login: \n\n"

    def test_end_of_rank_uses_clock_of_launcher(self) -> None:
        report = ErrorReport(rank=3, time=9.0, secondary=True, message="m", text="t")
        sent = {
            "end": {"rank": 3, "code": 1, "time": 10.0, "stopped": False},
            "how": "exit code 1",
            "report": json.loads(json.dumps(vars(report))),
            "progress": None,
            "alone": True,
        }
        told = protocol.rank_exit(sent, -5.0)
        assert told.end == ExitStatus(rank=3, code=1, time=5.0)
        assert told.report is not None
        assert (told.report.time, told.report.secondary) == (4.0, True)
        assert protocol.rank_exit(sent | {"report": None}, 0.0).report is None


class TestPreview:
    def test_dry_run_on_many_hosts(self) -> None:
        shares = (Share(Host("h1", 2), 0, 2), Share(Host("h22", 1, "al"), 2, 1))
        spec = replace(
            WAY,
            words=("train.py", "--name", "a b"),
            size=3,
            shares=shares,
            flags={"zero": "2"},
            passed={"TOKEN": "secret"},
            interface="ib0",
            log_dir="logs",
        )
        lines = start.dry_run_words(spec, shares[:1]).splitlines()
        assert lines[0] == (
            "3 ranks on 2 hosts; rank 0 listens on h1, on a free port of interface ib0"
        )
        assert lines[1] == "  h1   ranks 0-1  here"
        assert lines[2].startswith("  h22  rank 2     ssh -T -x -o BatchMode=yes")
        assert lines[3:] == [
            "each rank: /opt/py train.py --name 'a b'",
            "in folder: /home/me/my work",
            "settings: zero=2",
            "variables passed on: TOKEN",
            "a log of each rank in: logs",
        ]

    def test_dry_run_on_one_host(self) -> None:
        shares = (Share(Host("localhost", 1), 0, 1),)
        spec = replace(WAY, words=("pack.mod", "-v"), module=True, shares=shares, port=7)
        assert start.dry_run_words(spec, shares).splitlines() == [
            "1 rank on 1 host; rank 0 listens on localhost, on port 7",
            "  localhost  rank 0  here",
            "each rank: /opt/py -m pack.mod -v",
            "in folder: /home/me/my work",
            "settings: none",
        ]


class TestVoice:
    def heard(self, tmp_path: Path, capfd: pytest.CaptureFixture[str], shown: bool) -> str:
        console = Console(2, {})
        log = open_log(str(tmp_path / "logs"), 1, 2, ("train.py", "-v"))
        voice = WorkerOutput(1, console, shown=shown, log=log)
        for stream, data in ((1, b"one\ntw"), (2, b"\x1b[31mred\x1b[0m\n"), (1, b"o"), (2, b"")):
            voice.hear(stream, data)
        voice.hear(1, b"")
        voice.close()
        assert voice.tail.text() == "red"
        assert capfd.readouterr().out == ("[1] one\n[1] two\n" if shown else "")
        return (tmp_path / "logs" / "rank1.log").read_text()

    def test_output_goes_to_screen_and_log(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        head, *rest = self.heard(tmp_path, capfd, shown=True).splitlines()
        assert head.startswith("== ")
        assert head.endswith("  rank 1 of 2  train.py -v")
        assert rest == ["one", "red", "two"]

    def test_hidden_output_is_logged_after_earlier_run(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        self.heard(tmp_path, capfd, shown=False)
        assert self.heard(tmp_path, capfd, shown=False).count("two") == 2

    def test_refuses_unwritable_log(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(LaunchError, match="file cannot be written to: File exists"):
            open_log(str(tmp_path / "file"), 0, 1, ())
        assert open_log(None, 0, 2, ()) is None


class TestClosing:
    def test_closing_words_name_host(self) -> None:
        judged = Verdict(rank=1, exit_code=1)
        said = failure_report.closing_words(judged, "exit code 1", "E", size=2, host="h2")
        assert said.startswith("\nshardwise: rank 1 of 2 on h2 failed (exit code 1).")

    def test_lost_hosts(self) -> None:
        assert failure_report.lost_hosts([]) == ""
        assert failure_report.lost_hosts(["a", "b"]) == "\nshardwise: a\n\nshardwise: b\n"


def test_older_addresses_of_members_do_not_replace_newer_ones() -> None:
    """Messages of two hosts arrive in any order after the main rank is lost."""
    received: list[str] = []
    published = [(-1, ""), (0, "zero"), (0, "zero"), (2, "two")]
    with ExitStack() as stack:
        found: Any = Agent(cast(Any, SimpleNamespace()), stack)
        workers = SimpleNamespace(
            set_members=received.append, members=lambda: published[0], joined_spares=list
        )
        found._parts, found._spec = (
            {0: workers},
            replace(WAY, size=2, flags={"survive": "1", "spares": "1"}),
        )
        found._write = lambda: None
        sent: list[Any] = []
        found._send = lambda kind, **values: sent.append((kind, values))
        for generation, text in [(1, "one"), (0, "zero"), (3, "three"), (2, "two")]:
            found.on_members(generation, text)
        assert received == ["one", "three"]
        while published:
            assert found._report_spares()
            published.pop(0)
    assert sent == [
        ("members", {"generation": 0, "text": "zero"}),
        ("members", {"generation": 2, "text": "two"}),
    ]
