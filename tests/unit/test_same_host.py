"""Whether ranks share memory, and what they agree on if they cannot."""

import socket

import pytest
import torch

from shardwise.comm import Solo, connect, same_host
from shardwise.comm.survivors.replaceable import ReplaceableGroup
from shardwise.errors import ConfigError, LaunchError
from shardwise.net.identity import Identity


class Told(Solo):
    """A group whose other ranks send the values that a test sets."""

    def __init__(self, *others):
        super().__init__()
        self._others = others

    def gather_plain(self, value):
        return [value, *(other(value) for other in self._others)]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda key: "elsewhere boot 1", "rank 1 elsewhere (elsewhere)"),
        (lambda key: key + "2", "in one network namespace"),
        (lambda key: None, "needs Linux and a readable /proc on every host, and rank 1 lacks them"),
    ],
)
def test_ranks_apart_keep_their_group(other, said, capsys):
    group = Told(other)
    assert same_host.share_memory(group, 1.0, required=False) is group
    assert capsys.readouterr().err == ""
    with pytest.raises(LaunchError) as error:
        same_host.share_memory(group, 1.0, required=True)
    assert said in str(error.value)


def test_a_host_that_refuses_memory_is_said_in_one_line(monkeypatch, capsys):
    def refuse(name):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("os.memfd_create", refuse)
    group = Told(lambda value: value)
    assert same_host.share_memory(group, 1.0, required=False) is group
    assert capsys.readouterr().err == (
        "shardwise: no shared memory, so Gloo is used: rank 0: Function not implemented\n"
    )
    with pytest.raises(LaunchError, match="Write --transport gloo"):
        same_host.share_memory(group, 1.0, required=True)


def test_a_failure_of_another_rank_is_everyones(monkeypatch, capsys):
    group = Told(lambda value: "rank 1: Too many open files" if value == "" else value)
    assert same_host.share_memory(group, 1.0, required=False) is group
    assert "rank 1: Too many open files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "is_even", "fits"),
    [
        # ranks on each of two hosts, numbered host by host
        (3, True, False),  # nodes of 6: 1, 2 and 6
        (2, True, True),
        (2, False, False),
    ],
)
def test_hosts_that_are_no_nodes_of_the_tree_of_sums_do_not_share_memory(
    monkeypatch, count, is_even, fits
):
    """With --exact and --survive, a loss may leave such hosts."""
    places = [0] * count + [1] * count if is_even else [0, 1] * count
    group = Told(*(lambda key, place=place: f"{key}{place or ''}" for place in places[1:]))
    set_up = []
    monkeypatch.setattr(same_host, "_set_up", lambda *given: set_up.append(given) or group)
    same_host.share_memory(group, 1.0, required=False, in_tree=True)
    assert bool(set_up) is fits
    same_host.share_memory(group, 1.0, required=False)
    assert len(set_up) == 1 + fits


def test_a_group_that_may_be_replaced_knows_no_tree_that_its_transport_does_not_know():
    class Uneven(Solo):
        knows_tree = False

    assert not ReplaceableGroup(Uneven()).knows_tree


def test_the_key_tells_hosts_apart(monkeypatch):
    here = same_host.host_key()
    monkeypatch.setattr(socket, "gethostname", lambda: "other")
    assert same_host.host_key() != here


def test_a_transport_of_the_cpu_is_refused_for_gpus():
    with pytest.raises(ConfigError, match="--transport shared is for ranks on the CPU"):
        connect(Identity(launcher="python"), torch.device("cuda", 0), 1.0, "shared")
