"""Translates the command line of DeepSpeed's launcher into that of `shardwise run`.

Each flag of `deepspeed --help` becomes flags of ours, or is refused with what to write instead.
"""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from shardwise.config import values
from shardwise.errors import LaunchError
from shardwise.launch import program
from shardwise.launch.flags import ADOPTED, Flag, Typed
from shardwise.net import hosts
from shardwise.net.hosts import Host

REFUSED = {
    "launcher_args": "say how hosts are reached by `shardwise run --ssh 'ssh OPTIONS'`",
    "force_multi": "a hostfile that names this host does the same",
    "save_pid": "the process that you start ends with the run; the shell has its number in $!",
    "venv_script": "activate it before, or name the other hosts' Python: shardwise run --python",
    "autotuning": "measure a script at several numbers of workers by `shardwise scale`",
    "elastic_training": "write shardwise run --nnodes MIN:MAX on each host",
    "min_elastic_nodes": "write shardwise run --nnodes MIN:MAX on each host",
    "max_elastic_nodes": "write shardwise run --nnodes MIN:MAX on each host",
    "bind_core_list": "write taskset -c LIST before the command",
    "log_level": "leave it out; --quiet leaves out the lines at the start",
}
"""Flags of DeepSpeed's launcher that are not here, and what to write instead."""

SWITCHES = ("force_multi", "save_pid", "elastic_training")
"""Those of REFUSED that take no value."""

LAUNCHERS = {
    "openmpi": "mpirun -n N python SCRIPT",
    "mpich": "mpirun -n N python SCRIPT",
    "impi": "mpirun -n N python SCRIPT",
    "mvapich": "mpirun -n N python SCRIPT",
    "slurm": "srun -n N python SCRIPT",
}
"""What to start instead of naming a launcher; a rank finds out from it who it is."""

HOSTFILE = "/job/hostfile"
"""Where DeepSpeed looks for hosts where none are given."""

_HERE = ("localhost", "127.0.0.1")

DEEPSPEED = "deepspeed"

TOP = """\
A line for DeepSpeed's launcher:   shardwise deepspeed --num_gpus 2 train.py --deepspeed ds.json

shardwise deepspeed [its flags, and settings of run] SCRIPT.py [the script's arguments]
"""


def options() -> Iterator[click.Parameter]:
    """The flags of DeepSpeed's launcher."""
    count = Typed(values.whole(1, values.MOST_ON_A_HOST))
    for names, takes, said in (
        (["--num_gpus", "--num_accelerators"], count, "ranks on each host"),
        (["--num_nodes"], count, "how many hosts of the hostfile, from the first on"),
        (["-H", "--hostfile"], None, f"hosts as node1 slots=4 (default {HOSTFILE}, where it is)"),
        (["-i", "--include"], None, "only these: node1@node2:0,2"),
        (["-e", "--exclude"], None, "all but these: node1@node2:0,2"),
        (["--master_addr"], None, "with --no_ssh: where ranks meet"),
        (["--master_port"], Typed(values.whole(1, 65535)), "where rank 0 listens"),
        (["--node_rank"], Typed(values.whole(0)), "with --no_ssh: which host this is"),
        (["--ssh_port"], Typed(values.whole(1, 65535)), "where ssh listens"),
        (["--enable_each_rank_log"], None, "keep what each rank says in this folder"),
        (["--launcher"], None, "pdsh: hosts over ssh. Others start shardwise themselves"),
    ):
        yield _flag(names, said, type=takes)
    for names, said in (
        (["--module"], "run a module, as python -m does"),
        (["--no_python"], "run a program that is none of Python's"),
        (["--no_local_rank"], "do not give --local_rank=N to the script"),
        (["--no_ssh"], "start this on each host, with --node_rank and --master_addr"),
        (["--no_ssh_check"], "nothing to leave out: no host is tried before"),
        (["--bind_cores_to_rank"], "nothing to do: ranks of a host divide its cores in any case"),
    ):
        yield _flag(names, said, is_flag=True)
    for name, instead in REFUSED.items():
        yield _flag([f"--{name}"], f"refused: {instead}", rare=True, is_flag=name in SWITCHES)


def _flag(names: list[str], said: str, *, rare: bool = False, **more: Any) -> Flag:
    return Flag(names, group="where", shown=", ".join(names), help=said, rare=rare, **more)


@dataclass(frozen=True)
class Asked:
    """A command line of DeepSpeed's: its flags by name (None or False where not given), the script
    and its arguments, and the hosts of its hostfile (none where there is no file)."""

    flags: Mapping[str, Any]
    words: Sequence[str]
    hosts: Sequence[Host]


def run_words(asked: Asked) -> list[str]:
    """The words of `shardwise run` that do the same, without the script. Raises LaunchError for
    what it does not have."""
    _refuse(asked.flags)
    flags = asked.flags
    words = ["-m"] if flags.get("module") else []
    words += _named("--log-dir", flags.get("enable_each_rank_log"))
    if flags.get("no_ssh"):
        return [*words, *_each_host_by_itself(asked)]
    if flags.get("node_rank") is not None:
        raise LaunchError("--node_rank is for --no_ssh, where each host is started by itself.")
    words += _named("--port", flags.get("master_port"))
    if not asked.hosts:
        return [*words, *_this_host(flags)]
    chosen = _chosen(asked)
    _check_master(flags.get("master_addr"), next(iter(chosen)))
    words += _visible(chosen)
    if len(chosen) == 1 and next(iter(chosen)) in _HERE:
        return [*words, "-n", str(len(next(iter(chosen.values()))))]
    words += _named("--ssh-port", flags.get("ssh_port"))
    return [*words, "-H", ",".join(f"{name}:{len(slots)}" for name, slots in chosen.items())]


def _named(flag: str, value: object) -> list[str]:
    return [] if value is None else [flag, str(value)]


def _refuse(flags: Mapping[str, Any]) -> None:
    for name, instead in REFUSED.items():
        if flags.get(name):
            raise LaunchError(f"--{name} of DeepSpeed's launcher is not here: {instead}.")
    launcher = str(flags.get("launcher") or "pdsh").lower()
    if launcher in LAUNCHERS:
        raise LaunchError(
            f"--launcher {launcher}: start it yourself, {LAUNCHERS[launcher]}, and ranks find out "
            "from it who they are."
        )
    if launcher != "pdsh":
        raise LaunchError(
            f"--launcher {launcher} is not known: leave it out, and hosts are reached over ssh."
        )
    if flags.get("module") and flags.get("no_python"):
        raise LaunchError("--module and --no_python contradict each other: give one of them.")
    if flags.get("include") and flags.get("exclude"):
        raise LaunchError("--include and --exclude are given: say one of them.")
    counted = [n for n in ("num_nodes", "num_gpus") if flags.get(n) is not None]
    if counted and (flags.get("include") or flags.get("exclude")):
        raise LaunchError(
            f"--{counted[0]} counts from the first on, and --include and --exclude name: give one."
        )


def _this_host(flags: Mapping[str, Any]) -> list[str]:
    """A run without a hostfile."""
    if (flags.get("num_nodes") or 1) > 1:
        raise LaunchError(
            f"--num_nodes {flags['num_nodes']} needs to know the hosts: give --hostfile FILE."
        )
    if flags.get("exclude"):
        raise LaunchError("--exclude leaves out what a hostfile names: give --hostfile FILE.")
    _check_master(flags.get("master_addr"), "localhost")
    if flags.get("include"):
        return _included_here(flags["include"])
    return _named("-n", flags.get("num_gpus"))


def _included_here(text: str) -> list[str]:
    named = _parsed("--include", text)
    slots = named.get("localhost")
    if len(named) > 1 or slots is None:
        raise LaunchError(
            f"--include {text}: without a hostfile there is localhost alone, as localhost:0,1. "
            "Give --hostfile FILE for other hosts."
        )
    if not slots:
        return []
    return [*_visible({"localhost": slots}), "-n", str(len(slots))]


def _check_master(address: str | None, first: str) -> None:
    """Raise LaunchError for a meeting place that is not the one that ranks have here."""
    if address is not None and address not in (first, *_HERE):
        raise LaunchError(
            f"--master_addr {address}: ranks meet on the first host, {first}. Put the other first "
            "in the hostfile, or name the network by shardwise run --interface NAME."
        )


def _visible(chosen: Mapping[str, Sequence[int]]) -> list[str]:
    """The flag that shows each host its chosen GPUs, where they are not the first ones."""
    if all(list(slots) == list(range(len(slots))) for slots in chosen.values()):
        return []
    several = {tuple(slots) for slots in chosen.values()}
    if len(several) > 1:
        raise LaunchError(
            "--include and --exclude leave other GPUs on each host, which is not here: take the "
            "same numbers on each, as in node1:0,2@node2:0,2, or the first ones."
        )
    return ["-x", f"CUDA_VISIBLE_DEVICES={','.join(map(str, several.pop()))}"]


def _each_host_by_itself(asked: Asked) -> list[str]:
    """A run that is started on each host, as torchrun's."""
    flags = asked.flags
    if flags.get("node_rank") is None or not flags.get("master_addr"):
        raise LaunchError("--no_ssh needs --node_rank N and --master_addr HOST.")
    chosen = _chosen(asked) if asked.hosts else None
    nodes = len(chosen) if chosen else flags.get("num_nodes")
    counts = {len(slots) for slots in chosen.values()} if chosen else {flags.get("num_gpus")}
    if nodes is None or len(counts) > 1:
        raise LaunchError(
            "--no_ssh needs a hostfile with as many slots on each host, or --num_nodes and "
            "--num_gpus."
        )
    port = flags.get("master_port") or 29500
    words = ["--nnodes", str(nodes), "--node-rank", str(flags["node_rank"])]
    words += ["--rdzv-endpoint", f"{flags['master_addr']}:{port}"]
    return words + _named("--nproc-per-node", counts.pop())


# -- which hosts -----------------------------------------------------------------------------


def _chosen(asked: Asked) -> dict[str, list[int]]:
    """By host the slots that are used, in the order of the hostfile."""
    flags = asked.flags
    there = {host.login: list(range(host.slots or 1)) for host in asked.hosts}
    if flags.get("include"):
        named = _known("--include", flags["include"], there)
        chosen = {h: named[h] or slots for h, slots in there.items() if h in named}
    elif flags.get("exclude"):
        named = _known("--exclude", flags["exclude"], there)
        left = {
            h: [s for s in slots if h not in named or (named[h] and s not in named[h])]
            for h, slots in there.items()
        }
        chosen = {h: slots for h, slots in left.items() if slots}
    else:
        chosen = _first(there, flags.get("num_nodes"), flags.get("num_gpus"))
    if not chosen:
        raise LaunchError(f"--exclude {flags['exclude']} leaves no slot: leave some of them in.")
    return chosen


def _first(
    there: dict[str, list[int]], nodes: int | None, slots: int | None
) -> dict[str, list[int]]:
    if nodes is not None and nodes > len(there):
        raise LaunchError(f"--num_nodes {nodes}: the hostfile has {len(there)} hosts.")
    for host, have in there.items():
        if slots is not None and slots > len(have):
            raise LaunchError(f"--num_gpus {slots}: {host} has {len(have)} slots in the hostfile.")
    return {host: have[:slots] for host, have in list(there.items())[:nodes]}


def _known(flag: str, text: str, there: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """What `text` names. Raises LaunchError for a host or slot that is not `there`."""
    named = _parsed(flag, text)
    for host, slots in named.items():
        if host not in there:
            raise LaunchError(
                f"{flag} {text}: {host} is not in the hostfile, which has {', '.join(there)}."
            )
        if odd := [slot for slot in slots if slot not in there[host]]:
            raise LaunchError(
                f"{flag} {text}: {host} has slots 0 to {len(there[host]) - 1}, and no {odd[0]}."
            )
    return named


def _parsed(flag: str, text: str) -> dict[str, list[int]]:
    """`host1@host2:0,2` as slots by host, none of them for all. Raises LaunchError."""
    found: dict[str, list[int]] = {}
    for part in text.split("@"):
        host, colon, slots = part.strip().partition(":")
        numbers = slots.split(",") if colon else []
        if not host or host in found or not all(n.strip().isdecimal() for n in numbers):
            raise LaunchError(
                f"{flag} {text}: {part!r} is not understood. Write hosts with their slots, as in "
                "node1@node2:0,2."
            )
        found[host] = sorted({int(n) for n in numbers})
    return found


def asked(flags: Mapping[str, Any], words: Sequence[str]) -> Asked:
    """A command line, with the hosts of the hostfile that it means: the one it names, or
    DeepSpeed's own where it is there. Raises LaunchError for one that cannot be read."""
    named = flags.get("hostfile")
    path = named if named is not None else HOSTFILE if os.path.exists(HOSTFILE) else None
    return Asked(flags, words, [] if path is None else hosts.read(Path(path)))


def line_of(words: Sequence[str]) -> str:
    """The command line of ours, to be shown."""
    return shlex.join(["shardwise", "run", *words])


# -- the script ------------------------------------------------------------------------------


def adopts(words: Sequence[str], flags: Mapping[str, Any]) -> bool:
    """Whether ours is put in the place of DeepSpeed: in a script that imports it, or is given its
    flags for modules of its own to read."""
    known = DEEPSPEED in ADOPTED and not flags.get("module") and not flags.get("no_python")
    text = program.text_of(words[0]) if known else ""
    if not text or program.names_us(text):
        return False
    given = any(word.partition("=")[0] in ("--deepspeed", "--deepspeed_config") for word in words)
    return given or program.imports(text, DEEPSPEED)


def with_local_rank(words: tuple[str, ...], *, module: bool) -> tuple[str, ...]:
    """The words of a module that runs `words` with --local_rank after the script.

    Raises LaunchError where there is no such program."""
    line = program.command(words[0], words[1:], module=module)
    before = len(line) - len(words) + 1
    if module and words[0] == "shardwise.adopt":
        before += 3 if words[2] == "-m" else 2
    return ("shardwise.launch.local_rank", str(before), *line)
