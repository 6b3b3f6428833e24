"""Translates command lines of DeepSpeed's launcher to `shardwise run`.

Each flag in `deepspeed --help` is either translated or rejected with an error that names an
alternative.
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
    "launcher_args": "write shardwise run --ssh 'ssh OPTIONS'",
    "force_multi": "write a hostfile that names this host",
    "save_pid": "take the process id from the shell's $!: that process ends with the run",
    "venv_script": "activate it first, or write shardwise run --python for other hosts",
    "autotuning": "measure the script with shardwise scale",
    "elastic_training": "write shardwise run --nnodes MIN:MAX on each host",
    "min_elastic_nodes": "write shardwise run --nnodes MIN:MAX on each host",
    "max_elastic_nodes": "write shardwise run --nnodes MIN:MAX on each host",
    "bind_core_list": "write taskset -c LIST before the command",
    "log_level": "leave it out; --quiet leaves out the start lines",
}
"""Flags of DeepSpeed's launcher that are not supported, with an alternative for each."""

SWITCHES = ("force_multi", "save_pid", "elastic_training")
"""Flags in REFUSED that take no value."""

LAUNCHERS = {
    "openmpi": "mpirun -n N python SCRIPT",
    "mpich": "mpirun -n N python SCRIPT",
    "impi": "mpirun -n N python SCRIPT",
    "mvapich": "mpirun -n N python SCRIPT",
    "slurm": "srun -n N python SCRIPT",
}
"""Launchers that `--launcher` may name in DeepSpeed, with the command to run instead."""

HOSTFILE = "/job/hostfile"
"""DeepSpeed's default hostfile."""

_HERE = ("localhost", "127.0.0.1")

DEEPSPEED = "deepspeed"

TOP = """\
Instead of DeepSpeed's launcher:   shardwise deepspeed --num_gpus 2 train.py --deepspeed ds.json

shardwise deepspeed [its flags, and settings of run] SCRIPT.py [the script's arguments]
"""


def options() -> Iterator[click.Parameter]:
    """Yield the command-line flags of DeepSpeed's launcher."""
    count = Typed(values.whole(1, values.MOST_ON_A_HOST))
    for names, takes, help in (
        (["--num_gpus", "--num_accelerators"], count, "number of ranks on each host"),
        (["--num_nodes"], count, "number of hosts to use, from the top of the hostfile"),
        (["-H", "--hostfile"], None, f"hosts as node1 slots=4 (default {HOSTFILE} if it exists)"),
        (["-i", "--include"], None, "use only these hosts and slots: node1@node2:0,2"),
        (["-e", "--exclude"], None, "use all except these hosts and slots: node1@node2:0,2"),
        (["--master_addr"], None, "with --no_ssh: address of rank 0"),
        (["--master_port"], Typed(values.whole(1, 65535)), "port of rank 0"),
        (["--node_rank"], Typed(values.whole(0)), "with --no_ssh: number of this host"),
        (["--ssh_port"], Typed(values.whole(1, 65535)), "port of the ssh server on the hosts"),
        (["--enable_each_rank_log"], None, "write the output of each rank to this folder"),
        (["--launcher"], None, "only pdsh: reach hosts over ssh"),
    ):
        yield _flag(names, help, type=takes)
    for names, help in (
        (["--module"], "run a module, as python -m does"),
        (["--no_python"], "run a program other than Python"),
        (["--no_local_rank"], "do not pass --local_rank=N to the script"),
        (["--no_ssh"], "start this on each host, with --node_rank and --master_addr"),
        (["--no_ssh_check"], "no effect: hosts are never checked first"),
        (["--bind_cores_to_rank"], "no effect: the ranks of a host always divide its cores"),
    ):
        yield _flag(names, help, is_flag=True)
    for name, instead in REFUSED.items():
        yield _flag([f"--{name}"], f"refused: {instead}", rare=True, is_flag=name in SWITCHES)


def _flag(names: list[str], help: str, *, rare: bool = False, **more: Any) -> Flag:
    return Flag(names, group="where", shown=", ".join(names), help=help, rare=rare, **more)


@dataclass(frozen=True)
class DeepSpeedCommand:
    """A parsed command line of DeepSpeed's launcher.

    Args:
        flags: Values of the flags by name. None or False if a flag was not passed.
        words: The script and its arguments.
        hosts: Hosts in the hostfile. Empty if there is no hostfile.
    """

    flags: Mapping[str, Any]
    words: Sequence[str]
    hosts: Sequence[Host]


def run_words(command: DeepSpeedCommand) -> list[str]:
    """Return the equivalent flags of `shardwise run`.

    Raises LaunchError if a flag or a combination of flags is not supported.
    """
    _refuse(command.flags)
    flags = command.flags
    words = ["-m"] if flags.get("module") else []
    words += _named("--log-dir", flags.get("enable_each_rank_log"))
    if flags.get("no_ssh"):
        return [*words, *_each_host_by_itself(command)]
    if flags.get("node_rank") is not None:
        raise LaunchError("--node_rank needs --no_ssh, which starts each host separately.")
    words += _named("--port", flags.get("master_port"))
    if not command.hosts:
        return [*words, *_this_host(flags)]
    chosen = _chosen(command)
    _check_master(flags.get("master_addr"), next(iter(chosen)))
    words += _visible(chosen)
    if len(chosen) == 1 and next(iter(chosen)) in _HERE:
        return [*words, "-n", str(len(next(iter(chosen.values()))))]
    words += _named("--ssh-port", flags.get("ssh_port"))
    return [*words, "-H", ",".join(f"{name}:{len(slots)}" for name, slots in chosen.items())]


def _named(flag: str, value: object) -> list[str]:
    return [] if value is None else [flag, str(value)]


def _refuse(flags: Mapping[str, Any]) -> None:
    # Ignoring such a flag would run the script in a different way than the user expects.
    for name, instead in REFUSED.items():
        if flags.get(name):
            raise LaunchError(f"--{name} of DeepSpeed's launcher is not supported: {instead}.")
    launcher = str(flags.get("launcher") or "pdsh").lower()
    if launcher in LAUNCHERS:
        raise LaunchError(
            f"--launcher {launcher} is not supported: run {LAUNCHERS[launcher]} yourself. The "
            "ranks take their numbers from it."
        )
    if launcher != "pdsh":
        raise LaunchError(
            f"--launcher {launcher} is not known: leave it out to reach the hosts over ssh."
        )
    if flags.get("module") and flags.get("no_python"):
        raise LaunchError("--module and --no_python contradict each other: give one of them.")
    if flags.get("include") and flags.get("exclude"):
        raise LaunchError("--include and --exclude contradict each other: give one of them.")
    counted = [n for n in ("num_nodes", "num_gpus") if flags.get(n) is not None]
    if counted and (flags.get("include") or flags.get("exclude")):
        raise LaunchError(
            f"--{counted[0]} cannot be combined with --include or --exclude, which name the hosts: "
            "give one of them."
        )


def _this_host(flags: Mapping[str, Any]) -> list[str]:
    """Return the flags for a run on this host, without a hostfile."""
    if (flags.get("num_nodes") or 1) > 1:
        raise LaunchError(
            f"--num_nodes {flags['num_nodes']} needs the names of the hosts: give --hostfile FILE."
        )
    if flags.get("exclude"):
        raise LaunchError("--exclude needs a list of hosts: give --hostfile FILE.")
    _check_master(flags.get("master_addr"), "localhost")
    if flags.get("include"):
        return _included_here(flags["include"])
    return _named("-n", flags.get("num_gpus"))


def _included_here(text: str) -> list[str]:
    named = _parsed("--include", text)
    slots = named.get("localhost")
    if len(named) > 1 or slots is None:
        raise LaunchError(
            f"--include {text}: without a hostfile only localhost is known, as in localhost:0,1. "
            "Give --hostfile FILE for other hosts."
        )
    if not slots:
        return []
    return [*_visible({"localhost": slots}), "-n", str(len(slots))]


def _check_master(address: str | None, first: str) -> None:
    """Raise LaunchError if `--master_addr` is not the first host.

    `shardwise run` does not support this, because its ranks always connect to the first host.
    """
    if address is not None and address not in (first, *_HERE):
        raise LaunchError(
            f"--master_addr {address}: ranks meet on the first host, {first}. Put {address} first "
            "in the hostfile, or choose the network with shardwise run --interface NAME."
        )


def _visible(chosen: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the flag that selects the GPUs in `chosen`, or [] if no selection is needed."""
    if all(list(slots) == list(range(len(slots))) for slots in chosen.values()):
        return []
    # All hosts receive the same variable, so they must use the same GPU indices.
    several = {tuple(slots) for slots in chosen.values()}
    if len(several) > 1:
        raise LaunchError(
            "--include and --exclude select different GPUs on each host, which is not supported: "
            "take the same numbers on each, as in node1:0,2@node2:0,2, or the first ones."
        )
    return ["-x", f"CUDA_VISIBLE_DEVICES={','.join(map(str, several.pop()))}"]


def _each_host_by_itself(command: DeepSpeedCommand) -> list[str]:
    """Return the flags for a run that the user starts separately on each host, as with torchrun."""
    flags = command.flags
    if flags.get("node_rank") is None or not flags.get("master_addr"):
        raise LaunchError("--no_ssh needs --node_rank N and --master_addr HOST.")
    chosen = _chosen(command) if command.hosts else None
    nodes = len(chosen) if chosen else flags.get("num_nodes")
    counts = {len(slots) for slots in chosen.values()} if chosen else {flags.get("num_gpus")}
    if nodes is None or len(counts) > 1:
        raise LaunchError(
            "--no_ssh needs --num_nodes and --num_gpus, or a hostfile with the same number of "
            "slots on each host."
        )
    port = flags.get("master_port") or 29500  # DeepSpeed's default
    words = ["--nnodes", str(nodes), "--node-rank", str(flags["node_rank"])]
    words += ["--rdzv-endpoint", f"{flags['master_addr']}:{port}"]
    return words + _named("--nproc-per-node", counts.pop())


# -- selecting hosts -------------------------------------------------------------------------


def _chosen(command: DeepSpeedCommand) -> dict[str, list[int]]:
    """Return the slots to use on each host, in the order of the hostfile."""
    flags = command.flags
    there = {host.login: list(range(host.slots or 1)) for host in command.hosts}
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
        raise LaunchError(f"--exclude {flags['exclude']} leaves no slot: exclude fewer of them.")
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
    """Parse `--include` or `--exclude`. Raises LaunchError if a host or slot is not in `there`."""
    named = _parsed(flag, text)
    for host, slots in named.items():
        if host not in there:
            raise LaunchError(
                f"{flag} {text}: {host} is not in the hostfile, which has {', '.join(there)}."
            )
        if odd := [slot for slot in slots if slot not in there[host]]:
            raise LaunchError(
                f"{flag} {text}: {host} has slots 0 to {len(there[host]) - 1}, not {odd[0]}."
            )
    return named


def _parsed(flag: str, text: str) -> dict[str, list[int]]:
    """Parse text such as `host1@host2:0,2` into slots by host. An empty list means all slots.

    Raises LaunchError if the syntax is invalid.
    """
    found: dict[str, list[int]] = {}
    for part in text.split("@"):
        host, colon, slots = part.strip().partition(":")
        numbers = slots.split(",") if colon else []
        if not host or host in found or not all(n.strip().isdecimal() for n in numbers):
            raise LaunchError(
                f"{flag} {text}: {part!r} is not a host with its slots. Write for example "
                "node1@node2:0,2."
            )
        found[host] = sorted({int(n) for n in numbers})
    return found


def parse(flags: Mapping[str, Any], words: Sequence[str]) -> DeepSpeedCommand:
    """Return a DeepSpeedCommand with the hosts from the hostfile.

    Without `--hostfile`, reads DeepSpeed's default hostfile if it exists. Raises LaunchError if the
    hostfile cannot be read.
    """
    named = flags.get("hostfile")
    path = named if named is not None else HOSTFILE if os.path.exists(HOSTFILE) else None
    return DeepSpeedCommand(flags, words, [] if path is None else hosts.read(Path(path)))


def line_of(words: Sequence[str]) -> str:
    """Return a `shardwise run` command line as text, for display."""
    return shlex.join(["shardwise", "run", *words])


# -- the script ------------------------------------------------------------------------------


def adopts(words: Sequence[str], flags: Mapping[str, Any]) -> bool:
    """Return whether to replace DeepSpeed's classes in the script (`--adopt deepspeed`).

    True if the script imports deepspeed, or if its arguments contain DeepSpeed flags, because a
    module that the script imports may use them.
    """
    known = DEEPSPEED in ADOPTED and not flags.get("module") and not flags.get("no_python")
    text = program.text_of(words[0]) if known else ""
    # A script that mentions shardwise already uses it directly.
    if not text or program.names_us(text):
        return False
    given = any(word.partition("=")[0] in ("--deepspeed", "--deepspeed_config") for word in words)
    return given or program.imports(text, DEEPSPEED)


def with_local_rank(words: tuple[str, ...], *, module: bool) -> tuple[str, ...]:
    """Return the arguments of `python -m` that run `words` with --local_rank after the script.

    Raises LaunchError if the script does not exist.
    """
    line = program.command(words[0], words[1:], module=module)
    # `before` is the number of words up to and including the script. With --adopt, the words
    # `shardwise.adopt LIBRARY`, and possibly -m, precede the script.
    before = len(line) - len(words) + 1
    if module and words[0] == "shardwise.adopt":
        before += 3 if words[2] == "-m" else 2
    return ("shardwise.launch.local_rank", str(before), *line)
