"""Who is left after a loss, and which step stands, compared with literal tables."""

from __future__ import annotations

import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shardwise.comm import Collectives, GroupRanks
from shardwise.comm.base import Solo
from shardwise.comm.shared_memory import SharedMemory
from shardwise.comm.survivors.admission import JOIN, Admission, publish_members, read_members
from shardwise.comm.survivors.group import REST, SurvivorGroup
from shardwise.comm.survivors.membership import (
    Decision,
    Divisions,
    Report,
    check_number,
    copy_places,
    count_losses,
    decide,
    holders,
    leader,
    stands,
)
from shardwise.comm.survivors.replaceable import PartGroup, Parts, ReplaceableGroup
from shardwise.comm.torch_backend import split_group
from shardwise.config import Settings
from shardwise.data import Loader
from shardwise.engine.repeated_steps import RepeatableSteps
from shardwise.errors import CollectiveError, ConfigError, PeerLost, UsageError
from shardwise.net import environment, listeners, network, progress
from shardwise.net.identity import Identity
from shardwise.net.store import HostStore
from shardwise.watch.status_server import RankAddress, StatusServer
from shardwise.world.mesh import mesh_of
from shardwise.world.survival import Survival, check, divisions_of
from shardwise.world.world import World


@pytest.mark.parametrize(
    ("divisions", "members", "left", "usable"),
    [
        (Divisions(), (0, 1, 2), (0, 2), (0, 2)),
        (Divisions(), (0, 1), (1, 5), (1, 5)),  # 5 joins
        (Divisions(sizes=(1, 2, 4)), (0, 1, 2, 3), (0, 2, 3), (0, 2)),
        (Divisions(sizes=(1, 2, 4)), (0, 2), (2,), (2,)),
        (Divisions(sizes=(1, 2, 6)), tuple(range(6)), (1, 2, 3, 4, 5), (1, 2)),
        (Divisions(sizes=(1, 2, 4)), (0, 2), (0, 2, 7, 8), (0, 2, 7, 8)),
        # Replicas of two ranks.
        (Divisions(unit=2), (0, 1, 2, 3), (0, 1, 3), (0, 1)),
        (Divisions(unit=2), (0, 1, 2, 3, 4, 5), (0, 2, 3, 4, 5), (2, 3, 4, 5)),
        (Divisions(unit=2), (2, 3, 4, 5), (2, 3, 4), (2, 3)),
        (Divisions(unit=2), (0, 1, 2, 3), (1, 2), ()),
    ],
)
def test_ranks_continue_in_whole_replicas_and_possible_numbers(
    divisions: Divisions, members: tuple[int, ...], left: tuple[int, ...], usable: tuple[int, ...]
) -> None:
    assert divisions.usable(members, left) == usable


@pytest.mark.parametrize(
    ("settings", "unit", "sizes"),
    [
        ({}, 1, ()),
        ({"tensor": 2, "context": 2}, 4, ()),
        ({"pipeline": 2, "tensor": 2}, 4, ()),
        ({"tensor": 2, "expert": 2}, 2, ()),
        ({"context": 2, "expert": 4}, 4, ()),
        ({"pipeline": 2, "expert": 4}, 8, ()),
        ({"exact": 8}, 1, (1, 2, 4, 8)),
        ({"exact": 8, "expert": 2}, 2, (2, 4, 8)),
    ],
)
def test_ranks_that_need_each_other_form_a_unit(
    settings: dict[str, int], unit: int, sizes: tuple[int, ...]
) -> None:
    chosen = Settings(**settings)
    found = divisions_of(chosen, mesh_of(chosen, 8, 1))
    assert (found.unit, found.sizes) == (unit, sizes)
    assert found.reason == " ".join(
        f"--{name} {settings[name]}"
        for name in ("tensor", "pipeline", "context", "expert", "exact")
        if name in settings
    )


def test_torch_knows_remaining_ranks_by_their_numbers_in_its_own_group() -> None:
    left = GroupRanks((0, 2, 3), size=4, default=(0, 2, 3))
    assert left.of_torch == [0, 1, 2]
    assert left.part([1, 2]).part([1]).of_torch == [2]
    assert GroupRanks.whole(4).part([1, 3]).of_torch == [1, 3]


def test_a_run_ends_without_a_complete_replica() -> None:
    divisions = Divisions(unit=2, reason="--tensor 2")
    with pytest.raises(CollectiveError, match="group of 2 workers is left for --tensor 2"):
        divisions.check_left((), [1, 2])
    divisions.check_left((0, 1), [2])


def reports(*rows: tuple[int, int, int, int]) -> dict[int, Report]:
    """Return reports from rows of (rank, generation, prepared, confirmed)."""
    return {
        rank: Report(rank=rank, generation=generation, prepared=prepared, confirmed=confirmed)
        for rank, generation, prepared, confirmed in rows
    }


@pytest.mark.parametrize(
    ("rows", "confirmed", "finish"),
    [
        # Rank 1 of 0, 1, 2 is lost; each row is (rank, generation, prepared, confirmed).
        ([(0, 0, 4, 4), (2, 0, 4, 4)], 4, []),  # in the backward passes of step 5
        ([(0, 0, 5, 4), (2, 0, 4, 4)], 4, []),  # rank 2 lacks the row of rank 1 in the exchange
        ([(0, 0, 5, 4), (2, 0, 5, 4)], 4, []),  # nobody knows that all are prepared
        ([(0, 0, 5, 5), (2, 0, 5, 4)], 5, [2]),  # rank 0 has updated, so rank 2 must
        ([(0, 0, 6, 5), (2, 0, 5, 4)], 5, [2]),  # rank 0 is in the exchange of step 6
        ([(0, 0, 0, 0), (2, 0, 0, 0)], 0, []),  # in the first step
    ],
)
def test_a_step_stands_if_any_rank_that_is_left_has_confirmed_it(
    rows: list[tuple[int, int, int, int]], confirmed: int, finish: list[int]
) -> None:
    heard = reports(*rows)
    decision = decide(heard, [0, 1, 2], {1})
    assert decision == Decision(generation=1, members=(0, 2), confirmed=confirmed)
    assert [rank for rank, mine in heard.items() if stands(decision, mine)] == finish


def test_a_step_cannot_stand_if_a_rank_lacks_its_totals() -> None:
    with pytest.raises(CollectiveError, match="totals are missing on rank 2"):
        decide(reports((0, 0, 5, 5), (2, 0, 4, 4)), [0, 1, 2], {1})


@pytest.mark.parametrize(
    ("ended", "heard", "members"),
    [
        ({1}, [0], None),  # ranks 2 and 3 are in a forward pass
        ({1}, [0, 2], None),
        ({1}, [0, 2, 3], (0, 2, 3)),
        ({1, 3}, [0, 2], (0, 2)),  # rank 3 ended while it was awaited
        ({1, 3}, [0, 2, 3], (0, 2)),  # rank 3 ended after its report
        ({0, 1, 3}, [2], (2,)),
    ],
)
def test_ranks_decide_once_all_that_have_not_ended_have_reported(
    ended: set[int], heard: list[int], members: tuple[int, ...] | None
) -> None:
    decision = decide(reports(*((rank, 0, 1, 1) for rank in heard)), [0, 1, 2, 3], ended)
    assert (None if decision is None else decision.members) == members


@pytest.mark.parametrize(
    ("generations", "expected"), [([0, 0], 1), ([3, 3], 4), ([1, 0], 2), ([0, 2], 3)]
)
def test_a_decision_is_newer_than_every_report(generations: list[int], expected: int) -> None:
    # A rank may have heard of a decision whose group never came about.
    heard = reports(*((rank, each, 7, 7) for rank, each in enumerate(generations)))
    decision = decide(heard, [0, 1, 2], {2})
    assert decision is not None
    assert decision.generation == expected


@pytest.mark.parametrize(
    ("members", "ended", "expected"),
    [([0, 1, 2], {2}, 0), ([0, 1, 2], {0}, 1), ([1, 2, 5], {1, 2}, 5)],
)
def test_the_first_rank_that_is_left_decides(
    members: list[int], ended: set[int], expected: int
) -> None:
    assert leader(members, ended) == expected


@pytest.mark.parametrize(
    ("admits", "heard", "ended", "members"),
    [
        # Rank 1 of 0, 2, 1 is lost or not, and ranks 4 and 5 wait. `admits` are those of 0 and 2.
        (((4,), (4,)), (0, 2, 4), {1}, (0, 2, 4)),
        (((4, 5), (4, 5)), (0, 2, 4, 5), {1}, (0, 2, 4, 5)),
        (((4, 5), (4, 5)), (0, 2, 5), {1, 4}, (0, 2, 5)),  # a spare is lost too
        (((4,), (4,)), (0, 2), {1}, None),  # it has not reported yet
        (((4,), ()), (0, 2, 4), {1}, (0, 2)),  # rank 2 noticed the loss before it had all states
        (((4,), ()), (0, 2), {1}, (0, 2)),
    ],
)
def test_spares_join_if_all_ranks_hold_the_full_states(
    admits: tuple[tuple[int, ...], ...],
    heard: tuple[int, ...],
    ended: set[int],
    members: tuple[int, ...] | None,
) -> None:
    spares = admits[0]
    of = {0: admits[0], 2: admits[1]}
    found = {
        rank: Report(rank=rank, generation=1, prepared=3, confirmed=3, admits=of.get(rank, spares))
        for rank in heard
    }
    decision = decide(found, [0, 2, 1], ended, spares)
    assert (decision and decision.members) == members
    if decision is not None:
        assert decision.admits == (admits[0] == admits[1])


def test_a_spare_does_not_continue_alone() -> None:
    with pytest.raises(CollectiveError, match="All ranks of the run were lost"):
        leader([0, 1], {0, 1})


@pytest.mark.parametrize(
    ("left", "most", "refused"),
    [((0, 2, 3), 1, False), ((0, 3), 1, True), ((0, 3), 2, False), ((3,), 2, True)],
)
def test_more_losses_at_once_than_allowed_are_refused(
    left: tuple[int, ...], most: int, refused: bool
) -> None:
    with (
        pytest.raises(CollectiveError, match=f"--survive {most}.*checkpoint")
        if refused
        else (nullcontext())
    ):
        check_number(dict.fromkeys(range(4), "h"), left, most)


@pytest.mark.parametrize(
    ("launcher", "instead"),
    [
        ("Open MPI", "shardwise run -n N --survive 2`, or -H HOST1"),
        ("Slurm", "shardwise run --survive 2` in the job script"),
        (
            "torchrun",
            "torchrun ... --nproc-per-node 1 -m shardwise run --nproc-per-node 2 --survive 2 S",
        ),
    ],
)
def test_other_launchers_are_refused_with_the_command_to_use(launcher: str, instead: str) -> None:
    identity = Identity(launcher=launcher, rank=0, size=4, local_rank=0, local_size=2)
    with pytest.raises(ConfigError, match=rf"started by {launcher}.*`{instead}"):
        check(Settings(survive=2), identity, torch.device("cpu"), {"TORCHELASTIC_RUN_ID": "none"})


def test_a_timeout_shorter_than_that_of_hosts_is_refused() -> None:
    identity = Identity(launcher="shardwise run", rank=0, size=4, local_rank=0, local_size=2)
    variables = {environment.SURVIVES_VARIABLE: "0", environment.LOST_AFTER_VARIABLE: "15.0"}
    with pytest.raises(ConfigError, match=r"--timeout 12 is too short .* wait up to 15 s"):
        check(Settings(survive=1, timeout=12.0), identity, torch.device("cpu"), variables)
    check(Settings(survive=1, timeout=16.0), identity, torch.device("cpu"), variables)


@pytest.mark.parametrize(
    ("hosts", "lost", "expected"),
    [
        ("aabb", (1,), 1),
        ("aabb", (2, 3), 1),  # a whole host
        ("aabb", (1, 2), 2),
        ("aabb", (1, 2, 3), 2),  # a whole host, and one rank of the other
        ("aabbc", (0, 1, 4), 2),
        ("aaa", (0, 1), 2),
    ],
)
def test_a_host_that_is_lost_as_a_whole_counts_once(
    hosts: str, lost: tuple[int, ...], expected: int
) -> None:
    assert count_losses(lost, dict(enumerate(hosts))) == expected


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("a", [0]),
        ("aaa", [1, 2, 0]),
        ("abc", [1, 2, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("abab", [1, 0, 3, 2]),
        ("aabc", [2, 3, 0, 1]),
        ("aab", [2, 0, 1]),  # a host with more than half of the ranks
    ],
)
def test_second_copies_are_on_another_host(hosts: str, expected: list[int]) -> None:
    assert copy_places(hosts) == expected


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_only_a_host_with_most_ranks_holds_copies_of_its_own(hosts: list[str]) -> None:
    copies = copy_places(hosts)
    assert sorted(copies) == list(range(len(hosts)))
    same = sum(hosts[place] == hosts[copy] for place, copy in enumerate(copies))
    largest = max(map(hosts.count, hosts))
    assert same == max(0, 2 * largest - len(hosts))


@pytest.mark.parametrize(
    ("members", "left", "expected"),
    [
        ((0, 1, 2, 3), (0, 1, 2, 3), [0, 1, 2, 3]),
        ((0, 1, 2, 3), (0, 2, 3), [0, 1, 1, 2]),  # rank 2 holds the copy of rank 1
        ((0, 1, 2, 3), (0, 1, 2), [0, 1, 2, 0]),  # rank 0 holds that of the last one
        ((0, 1, 2, 3), (1, 3), [0, 0, 1, 1]),  # two at once that are not neighbours
        ((0, 2, 5), (2, 5), [0, 0, 1]),  # after an earlier loss
        ((1, 3), (3,), [0, 0]),
    ],
)
def test_a_lost_ranks_state_is_on_the_next_rank(
    members: tuple[int, ...], left: tuple[int, ...], expected: list[int]
) -> None:
    assert holders(members, left, copy_places(["h"] * len(members))) == expected


@pytest.mark.parametrize(("left", "named"), [((0, 3), "1 and 2"), ((1, 2), "3 and 0"), ((3,), "0")])
def test_a_rank_lost_together_with_its_copy_is_refused(left: tuple[int, ...], named: str) -> None:
    with pytest.raises(CollectiveError, match=f"Ranks {named}.*last checkpoint"):
        holders((0, 1, 2, 3), left, (1, 2, 3, 0))


def test_a_loss_in_an_evaluation_says_why_the_run_ends() -> None:
    """With ZERO_3, forward passes gather parameters."""
    group = SimpleNamespace(between_steps=None, tolerates=None)
    survival = Survival(group, print)  # type: ignore[arg-type]
    error = PeerLost("Rank 1 lost rank 2.")
    for _ in range(2):
        assert not survival._tolerates(error)
    assert re.fullmatch(r"Rank 1 lost rank 2\. Outside of .* last checkpoint\.", str(error))
    assert str(error).count("evaluation") == 1
    survival.begins(plain=True)
    error = PeerLost("Rank 1 lost rank 2.")
    assert survival._tolerates(error)
    assert str(error) == "Rank 1 lost rank 2."


def test_a_break_ends_the_step_whose_passes_may_be_cut_off(solo: World) -> None:
    solo.survival = survival = Survival(SimpleNamespace(generation=0, admission=0), print)  # type: ignore[arg-type]
    for _ in Loader(list(range(8)), 4):
        assert survival.in_step
        break
    assert not survival.in_step


def test_a_plain_loop_may_skip_its_body_after_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = RepeatableSteps.__new__(RepeatableSteps)
    steps._accumulation = SimpleNamespace(backwards=1)  # type: ignore[assignment]
    steps._survival = SimpleNamespace(loss=PeerLost("rank 1 is gone"))  # type: ignore[assignment]
    monkeypatch.setattr(steps, "_ended_by_loss", lambda: True)
    assert steps._confirm(plain=True)
    steps._survival.loss = None
    with pytest.raises(UsageError, match=r"calls engine\.step"):
        steps._confirm(plain=True)


def admission_of_a_member() -> tuple[Admission, Callable[[int], Any]]:
    """Return an admission, and a function with which a spare asks it to join."""
    server = StatusServer(0, 1)
    server.is_silent = lambda place: False  # type: ignore[method-assign]
    admission = Admission(server)

    def ask(rank: int) -> Any:
        place = RankAddress(rank=rank, name=f"{rank}")
        return server.answers[JOIN]({"place": asdict(place), "holds": None, "grows": False})

    return admission, ask


def test_only_an_invited_spare_loads_the_checkpoint() -> None:
    admission, ask = admission_of_a_member()
    for rank in (2, 3, 4):
        assert ask(rank) == {"offer": None}
    spares = admission.waiting(1, members=(0,))
    assert [place.rank for place in spares] == [2]
    offer = {"id": "a"}
    admission.invite(spares, offer)
    assert [ask(rank) for rank in (2, 3, 4)] == [{"offer": offer}, {"offer": None}, {"offer": None}]
    # After another loss, two may join, and the one that has loaded the checkpoint is one of them.
    admission.invite([RankAddress(rank=4, name="4")], offer)
    assert [place.rank for place in admission.waiting(2, members=(0,))] == [2, 4]
    admission.finish([2])
    assert [ask(rank) for rank in (3, 4)] == [{"offer": None}] * 2


def test_a_late_request_of_a_member_does_not_invite_it_again() -> None:
    admission, ask = admission_of_a_member()
    ask(2)
    assert [place.rank for place in admission.waiting(1, members=(0, 1))] == [2]
    admission.finish([2])
    ask(2)  # sent before it joined
    assert admission.waiting(1, members=(0, 1, 2)) == []
    assert admission.waiting(1, members=(0, 1)) == []
    ask(2)  # a new process, after rank 2 was lost
    assert [place.rank for place in admission.waiting(1, members=(0, 1))] == [2]


def test_all_ranks_divide_the_rows_again_even_if_their_numbers_stay_the_same(
    solo: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = SimpleNamespace(generation=0, admission=0)
    solo.survival = Survival(group, print)  # type: ignore[arg-type]
    loader = Loader(torch.arange(8), batch_size=4)
    builds: list[int] = []
    build = loader._build
    monkeypatch.setattr(loader, "_build", lambda: (builds.append(group.generation), build()))
    with torch.no_grad():
        for group.generation in (0, 0, 2, 2):  # a loss, and the admission of a spare
            assert [len(rows) for rows in loader] == [4, 4]
    assert builds == [2]


def test_datasets_are_compared_again_after_an_admission_but_not_after_a_loss(
    solo: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss, only some of the ranks might still be in the comparison."""
    group = SimpleNamespace(generation=0, admission=0)
    solo.survival = Survival(group, print)  # type: ignore[arg-type]
    loader = Loader(torch.arange(8), batch_size=4)
    compared: list[int] = []
    name = "shardwise.data.batch_schedule.check_same_dataset"
    monkeypatch.setattr(name, lambda world, dataset: compared.append(group.generation))
    with torch.no_grad():
        for group.generation, group.admission in ((0, 0), (1, 0), (2, 2), (3, 2)):
            assert len(list(loader)) == 2
    assert compared == [0, 2]


class LostPeers(Solo):
    """A group that has lost a rank."""

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        raise PeerLost("a rank is gone")


@pytest.mark.parametrize("tolerates", [True, False])
def test_a_channel_may_be_opened_after_a_loss_in_a_step(tolerates: bool) -> None:
    """Stages open their channels in the forward pass, which the script cannot repeat."""
    part = PartGroup(ReplaceableGroup(Solo()), None, Parts(lambda error: tolerates))
    part.inner = LostPeers()
    with nullcontext() if tolerates else pytest.raises(PeerLost):
        channel = part.split([[0]])
        value = torch.ones(2)
        channel.broadcast(value, 0).wait()
        assert value.tolist() == [1, 1]
        assert part.split([[0]]) is not channel, "without another attempt"


def test_ranks_that_leave_wait_for_the_others_of_their_host() -> None:
    """A signal to all ranks of a host reaches some of them a step earlier than others."""
    hosts = {0: "a", 1: "b", 2: "b", 3: "b"}
    group = SimpleNamespace(_hosts=hosts, _most=1, _awaited=0)

    def awaits(*leaving: int) -> bool:
        return SurvivorGroup.awaits_more(group, leaving)  # type: ignore[arg-type]

    assert awaits(1, 2)
    assert not awaits(1, 2, 3)  # a whole host counts once
    assert not awaits()
    assert not awaits(2)
    assert not awaits(0, 1)
    assert [awaits(1, 2) for _ in range(REST + 1)] == [True] * REST + [False]
    group._hosts = dict.fromkeys(range(4), "a")
    assert not awaits(1, 2)


def test_connections_to_a_lost_host_are_closed() -> None:
    """A thread that waits for data from it is woken. Other connections stay open."""
    with ExitStack() as stack:
        ends = {}
        for address in ("127.0.0.1", "127.0.0.2"):
            listener = stack.enter_context(socket.create_server((address, 0)))
            client = stack.enter_context(socket.create_connection(listener.getsockname()))
            ends[address] = client, stack.enter_context(listener.accept()[0])
        listeners.close_connections(["127.0.0.2"])
        assert ends["127.0.0.2"][0].recv(1) == b""
        ends["127.0.0.1"][1].sendall(b"x")
        assert ends["127.0.0.1"][0].recv(1) == b"x"


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_only_connections_of_gloo_are_closed(family: int, address: str) -> None:
    """Gloo publishes its listening addresses as the kernel's sockaddr structures."""
    with ExitStack() as stack:
        ends = []
        for publishes in (True, False):
            listener = stack.enter_context(socket.create_server((address, 0), family=family))
            host = socket.inet_pton(family, address)
            gap = b"" if family == socket.AF_INET else bytes(4)
            port = struct.pack("!H", listener.getsockname()[1])
            if publishes:
                listeners.note(b"abc" + struct.pack("=H", family) + port + gap + host + b"\x02\x00")
            client = stack.enter_context(socket.create_connection(listener.getsockname()[:2]))
            ends.append((client, stack.enter_context(listener.accept()[0])))
        # Another thread may close a socket while the descriptors are listed.
        closed = socket.socket()
        stack.callback(closed.detach)
        os.close(closed.fileno())
        listeners.shut()
        listeners.close_gloo()
        (client, server), (kept, kept_end) = ends
        assert client.recv(1) == server.recv(1) == b""
        kept_end.sendall(b"x")
        assert kept.recv(1) == b"x"


def test_the_scope_of_an_address_does_not_keep_a_connection_open() -> None:
    """A link-local address has a scope, which is a name of an interface of this host."""
    with ExitStack() as stack:
        six = socket.AF_INET6
        listener = stack.enter_context(socket.create_server(("::1", 0), family=six))
        client = stack.enter_context(socket.create_connection(listener.getsockname()[:2]))
        server = stack.enter_context(listener.accept()[0])
        listeners.close_connections(["::1%eth0"])
        assert client.recv(1) == server.recv(1) == b""


def test_a_rank_tells_all_addresses_of_its_interface() -> None:
    """Gloo connects to one of them, which need not be the one of the status server."""
    found = network.all_addresses(["lo"])
    assert "127.0.0.1" in found
    assert not set(found) & set(network.all_addresses())


def test_the_launcher_reports_lost_ranks_of_other_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.REPORTS_VARIABLE, str(tmp_path))
    server = StatusServer(0, 4)
    hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    places = [
        RankAddress(
            rank=rank, host=host, address=f"10.0.0.{host}", others=[f"fd00::{host}"], name="run"
        )
        for rank, host in hosts.items()
    ]
    server.start(places)
    progress.mark_lost(tmp_path, [3, 1])
    assert [server.has_ended(rank) for rank in hosts] == [False, False, False, True]
    assert server.lost_hosts() == []
    progress.mark_lost(tmp_path, [2])
    assert server.lost_hosts() == ["10.0.0.b", "fd00::b"]
    server.continue_with([0, 1], 1)
    assert server.lost_hosts() == []
    server.close()


def test_a_loss_while_ranks_connect_is_reported_after_its_sockets_have_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The launcher reports the end of a rank on another host. The others then agree again."""
    monkeypatch.setenv(environment.REPORTS_VARIABLE, str(tmp_path))
    monkeypatch.setenv(environment.LOST_AFTER_VARIABLE, "17")
    solo = Solo()
    solo.status_server.start([RankAddress(rank=rank, host=f"{rank}") for rank in range(3)])
    group = SurvivorGroup(solo, 30.0, 2)
    group.members = (0, 1, 2)
    decisions = [(0, 1), (0,)]

    def reach(*_: object) -> tuple[Decision, socket.socket]:
        decision = Decision(generation=1, members=decisions.pop(0), confirmed=0)
        return decision, socket.create_server(("127.0.0.1", 0))

    monkeypatch.setattr(group._agreement, "reach", reach)
    # As after a heartbeat that was missing: the sockets have been closed for a while.
    report = threading.Timer(0.5, progress.mark_lost, (tmp_path, [1]))

    def store(listener: socket.socket, *_: object, **__: object) -> HostStore:
        store = HostStore(listener, b"k" * 20, 30.0, survives=True)
        store._table.give_up()
        return store

    monkeypatch.setattr("shardwise.comm.survivors.connecting.HostStore", store)
    report.start()
    try:
        assert group.replace().lost == (1, 2)
        assert group.members == (0,)
    finally:
        report.join()
        group.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_may_be_lost_while_a_channel_opens(rank: int) -> None:
    """The higher rank connects to the lower one, which waits for it."""
    server = SimpleNamespace(secret=b"k" * 20, has_ended=lambda other: other != rank)
    group = SimpleNamespace(
        rank=rank,
        size=2,
        gather_plain=lambda name: [name],
        barrier=lambda: None,
        status_server=server,
        _group_ranks=GroupRanks.whole(2),
        _timeout=30.0,
    )
    with pytest.raises(PeerLost, match=f"Rank {rank} of 2 lost one of ranks 0, 1 while it conn"):
        SharedMemory.split(group, [[0, 1]])  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_a_loss_while_groups_connect_closes_those_that_are_connected(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made, new_group = [], dist.new_group

    def connect(members: list[int], **options: Any) -> dist.ProcessGroup:
        if made:
            raise RuntimeError("Connection refused")
        made.append(new_group([0], **options))
        return made[0]

    monkeypatch.setattr(dist, "new_group", connect)
    aborted: list[str] = []

    def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
        assert group is made[0]
        return SimpleNamespace(abort=lambda: aborted.append(device.type))

    monkeypatch.setattr(dist.ProcessGroup, "_get_backend", backend_of)
    try:
        with pytest.raises(PeerLost, match="Rank 0 of 4 lost another rank in connecting a group"):
            split_group(Solo(), GroupRanks.whole(4), [[0, 1], [2, 3]], backend, lambda *_: Solo())
        assert aborted == ["cpu"]
        assert dist.distributed_c10d._world.pg_map.keys() == {dist.group.WORLD}
    finally:
        dist.destroy_process_group()


def test_a_spare_asks_the_members_of_the_latest_generation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After the loss of the main rank's host, another host may publish the members."""
    monkeypatch.setenv(environment.REPORTS_VARIABLE, str(tmp_path))
    assert read_members() == []
    old, new = (RankAddress(rank=rank, address="h", port=rank, others=[]) for rank in (0, 1))
    publish_members([old, new], 0)
    own, others = (
        tmp_path / name for name in (environment.MEMBERS_FILE, environment.OTHER_MEMBERS_FILE)
    )
    first = own.read_text()
    publish_members([new], 1)
    others.write_text(first)
    assert read_members() == [new]
    others.write_text(own.read_text())
    own.write_text(first)
    assert read_members() == [new]
    own.unlink()
    assert read_members() == [new]
