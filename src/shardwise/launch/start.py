"""Runs a command line: chooses the hosts, and the program that starts the ranks.

no hosts, or -n N           this host                     one_host.py
-H, --hostfile              ssh to each                   ssh/many_hosts.py
a Slurm allocation          srun                          slurm.py
the same, with --survive    an agent on each, by srun     allocations.py, ssh/many_hosts.py
another allocation          ssh to each of its hosts      allocations.py, ssh/many_hosts.py
--nnodes                    torch's elastic agent         elastic.py
the same, with --survive    an agent on each              nodes.py, ssh/many_hosts.py
torchrun, with --survive    the same                      net/torchrun_store.py, nodes.py
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from shardwise.errors import LaunchError
from shardwise.launch import allocations, elastic, flags, nodes, one_host, program, resources
from shardwise.launch.allocations import Allocation
from shardwise.launch.run_spec import RunSpec
from shardwise.launch.ssh import many_hosts
from shardwise.launch.ssh.command import LINK, ssh_command
from shardwise.messages.printable import in_shell, many
from shardwise.net import environment, hosts, network
from shardwise.net.hosts import Host, Share
from shardwise.net.identity import Identity
from shardwise.net.launchers import detection as launcher_detection
from shardwise.net.launchers import platforms, slurm
from shardwise.net.python_command import python_words

if TYPE_CHECKING:  # imports torch
    from shardwise.net.torchrun_store import HostStore

GRACE = 5.0
"""Default number of seconds between asking ranks to exit and killing them."""

HOST_TIMEOUT = 10.0
"""Default number of seconds without a message before a host is considered lost."""

LaunchRequest = SimpleNamespace
"""Values of the launcher's own flags by name (see flag_table.py), or None for flags that were not
given. `words` is the program with its arguments, and `settings` the text of all other flags."""


def run(request: LaunchRequest) -> int:
    """Run a parsed command line, and return the exit code.

    Raises LaunchError if the ranks cannot be started.
    """
    named = request.hosts is not None or request.hostfile is not None
    survives = request.settings.get("survive", "0") != "0"
    if request.nnodes is None:
        outer = launcher_detection.around_command()
        if survives and not named and outer.launcher == "torchrun" and outer.size > 1:
            return _in_torchrun(request, outer)
        is_service = outer.launcher in launcher_detection.SERVICES
        if outer.launcher == platforms.SKYPILOT.launcher and not named and outer.rank:
            # SkyPilot runs the same command on every node. Node 0 starts all ranks over ssh.
            print(f"shardwise: node 0 of {outer.size} starts the ranks of this node.")
            return 0
        # On such a service, the first host may start the ranks of all hosts.
        has_hosts = named or outer.launcher == platforms.SKYPILOT.launcher
        if not (is_service and has_hosts and outer.rank == 0):
            _refuse_in_every_rank(outer)
    # Hosts named by the user take precedence over the allocation, and --nnodes over both.
    by_srun = request.nnodes is None and not named and slurm.needs_srun(os.environ)
    by_srun = by_srun and not survives  # srun would end all ranks with the lost one
    # With srun and no --port, the launcher does not set MASTER_ADDR and MASTER_PORT, so the user
    # may.
    overridable = environment.MASTER if by_srun and not request.port else ()
    passed = environment.passed_variables(
        os.environ, request.pass_on, request.interface, overridable
    )
    if request.nnodes is not None:
        return _by_torch(request, passed)
    _refuse_meeting(request, "needs --nnodes, the number of hosts")
    if by_srun:
        return _by_srun(request, passed)
    return _by_ourselves(request, passed)


def _refuse_meeting(request: LaunchRequest, why: str) -> None:
    for flag in ("node_rank", "rdzv_endpoint"):
        if getattr(request, flag) is not None:
            raise LaunchError(f"--{flag.replace('_', '-')} {why}.")


def _in_torchrun(request: LaunchRequest, outer: Identity) -> int:
    """Join the other hosts, if torchrun has started this command on each host (`--survive`).

    Returns the exit code of the run.
    """
    from shardwise.net import torchrun_store  # imports torch, which other launchers do not need

    if not torchrun_store.has_store():
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise LaunchError(
                f"torchrun has no store for this command ({torchrun_store.AGENT} is not True), and "
                "--survive needs one. Start torchrun with --master-addr and --node-rank, or with "
                "--rdzv-backend c10d and without TORCH_DISABLE_SHARE_RDZV_TCP_STORE."
            )
        _refuse_in_every_rank(outer)
    count = int(os.environ.get("GROUP_WORLD_SIZE", outer.size))
    if outer.size != count or outer.local_size != 1:
        raise LaunchError(
            f"torchrun has started this command {outer.size} times on {many(count, 'host')}. With "
            "--survive, write --nproc-per-node 1 for torchrun on each host, and its number of "
            "workers after shardwise run: torchrun --nproc-per-node 1 -m shardwise run "
            f"--nproc-per-node {outer.local_size} --survive {request.settings['survive']} train.py"
        )
    store = torchrun_store.HostStore(outer)
    with store.telling_others():
        _check_torchrun(request, outer)
        words = torchrun_store.exposed()
        if words and outer.rank == 0 and "quiet" not in request.settings:
            print(f"shardwise: {words}", file=sys.stderr, flush=True)
        passed = environment.passed_variables(os.environ, request.pass_on, request.interface)
        place = {"nnodes": str(count), "rdzv_endpoint": f"{outer.address}:{outer.port}"}
        joined = LaunchRequest(**{**vars(request), **place, "node_rank": outer.rank})
        return _by_torch(joined, passed, store)


def _check_torchrun(request: LaunchRequest, outer: Identity) -> None:
    """Raise LaunchError if torchrun has started this command in a way that cannot survive."""
    _refuse_meeting(request, "is a flag of torchrun here: write it before -m shardwise run")
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0":
        raise LaunchError(
            f"torchrun --max-restarts {restarts} with --survive: after the loss of one host, "
            "torchrun may start the workers of all hosts again. Write --max-restarts 0 for "
            f"torchrun, and --restarts {restarts} after shardwise run."
        )
    assert outer.address is not None
    # The first host's own name may resolve to 127.0.1.1 there.
    if network.is_loopback(outer.address) or (outer.rank and network.is_here(Host(outer.address))):
        raise LaunchError(
            f"torchrun was started several times on this host (MASTER_ADDR={outer.address}). Start "
            "it once on each host. On a single host, write --nnodes 1."
        )


def _by_ourselves(
    request: LaunchRequest, passed: Mapping[str, str], shares: Sequence[Share] = ()
) -> int:
    """Start the ranks: directly on this host, and over ssh on other hosts. Return the exit code.

    `shares` are the ranks of each host, if they are known.
    """
    allocation = None
    if not shares:
        if request.hosts is None and request.hostfile is None:
            allocation = _allocation(request)
        shares = _shares(request, allocation)
    here = [share for share in shares if network.is_here(share.host)]
    is_alone = list(shares) == here[:1]
    # With -H or --hostfile, accept the flags for ssh even if this is the only host.
    if is_alone and request.hosts is None and request.hostfile is None:
        flags.refuse_without_effect(flags.ON_THIS_HOST, {**vars(request), **request.settings})
    size = sum(share.count for share in shares)
    spares = _spares(request)
    has_workers = [share for share in shares if share.count]
    if not is_alone and spares and len(has_workers) == 1:
        raise LaunchError(
            f"--spares {spares} on other hosts needs workers on at least two hosts, which know "
            "each other's addresses. Divide the workers among the hosts, with fewer slots for each."
        )
    if is_alone and spares and size > 1:
        shares = [replace(shares[0], spares=tuple(range(size, size + spares)))]
    parts, settings = 0, request.settings
    if request.part_runner is not None:
        counts = [share.count for share in shares]
        parts, settings = request.part_runner.checked(counts, settings)
    ssh = _ssh(request.ssh or (None if allocation is None else allocation.ssh))
    spec = RunSpec(
        words=request.words,
        module=request.module,
        flags=settings,
        passed=passed,
        size=size,
        shares=tuple(shares),
        port=request.port or 0,
        interface=request.interface,
        folder=environment.working_folder(os.environ),
        python=request.python or sys.executable,
        ssh=ssh,
        ssh_port=request.ssh_port,
        patience=request.host_timeout or HOST_TIMEOUT,
        grace=GRACE if request.grace is None else request.grace,
        restarts=request.restarts,
        parts=parts,
        shown=None if request.shown is None else hosts.ranks(request.shown, size, "--show"),
        log_dir=request.log_dir,
        secret="" if LINK in ssh else environment.draw_secret(),
    )
    if allocation is not None and "quiet" not in request.settings:
        named = ", ".join(f"{share.host.login}:{share.count}" for share in shares)
        print(f"shardwise: hosts of {allocation}: {named}", file=sys.stderr, flush=True)
    if request.dry_run:
        print(dry_run_words(spec, here))
        return 0
    run = one_host.run if is_alone else many_hosts.run
    return run(spec, request.part_runner)


def _by_srun(request: LaunchRequest, passed: Mapping[str, str]) -> int:
    """Replace this process with srun, which starts the ranks of a Slurm allocation.

    Returns only for a dry run.
    """
    flags.refuse_without_effect(flags.BY_SRUN, vars(request))
    if request.part_runner is not None:
        raise flags.started_by_others("inside a Slurm allocation")
    if request.shown is not None or request.log_dir is not None:
        raise LaunchError(
            "--show and --log-dir have no effect in this Slurm job, because srun starts its ranks "
            "and prefixes each line with the rank. Leave them out."
        )
    command = program.command(request.words[0], request.words[1:], module=request.module)
    if request.restarts:
        raise LaunchError(
            "--restarts has no effect in this Slurm job, because srun starts its ranks. Leave it "
            "out, and let Slurm restart the job: sbatch --requeue."
        )
    environ = slurm.srun_environment(
        _with_secret({**os.environ, **passed}), request.settings, request.port or 0
    )
    words = slurm.srun_command(environ, command, size=request.size, per_host=request.per_host)
    if not request.dry_run:
        slurm.become_srun(words, environ)
    print(shlex.join(words))
    return 0


def _by_torch(
    request: LaunchRequest, passed: Mapping[str, str], store: "HostStore | None" = None
) -> int:
    """Replace this process with torch's elastic agent, which starts this host's ranks.

    Returns only for a dry run, or with `--survive` the exit code of the run (see `_by_nodes`).
    """
    assert request.nnodes is not None
    how = "--nnodes" if store is None else "torchrun"
    if request.hosts is not None or request.hostfile is not None or request.shown is not None:
        raise LaunchError(
            f"{how} cannot be combined with -H, --hostfile or --show: with {how} you start the "
            "command on each host, with the others one command starts all ranks. Use one or the "
            "other."
        )
    survives = request.settings.get("survive", "0") != "0"
    way = flags.BY_NODES if survives else flags.BY_TORCH
    flags.refuse_without_effect(way, {**vars(request), **request.settings})
    if request.part_runner is not None:
        raise flags.started_by_others(f"with {how}")
    if request.size is not None and not survives:
        raise LaunchError(
            f"-n {request.size} cannot be combined with --nnodes, which may change the total "
            "number of ranks: give the ranks of each host with --nproc-per-node."
        )
    name = request.rdzv_id or "shardwise"
    meeting = elastic.ElasticRendezvous.of(
        request.nnodes, request.rdzv_endpoint, request.node_rank, name
    )
    if survives:
        return _by_nodes(request, passed, replace(meeting, store=store))
    command = program.command(request.words[0], request.words[1:], module=request.module)
    address = elastic.own_address(meeting, request.interface)
    words = elastic.agent_command(
        meeting,
        command,
        per_host=request.per_host or _ranks_of_a_host(request),
        restarts=request.restarts,
        address=address,
        log_dir=request.log_dir,
    )
    if not request.dry_run:
        leads = None if address is None else network.interface_of(address)
        base = {**os.environ, **passed}
        print(f"shardwise: {elastic.open_agent_warning(meeting, base)}", file=sys.stderr)
        # On several hosts each agent would draw a different secret, so the user must provide one.
        if meeting.most == 1:
            base = _with_secret(base)
        elastic.run(words, elastic.agent_environment(base, request.settings, leads))
    print(shlex.join(words))
    return 0


def _by_nodes(
    request: LaunchRequest, passed: Mapping[str, str], meeting: elastic.ElasticRendezvous
) -> int:
    """Join the other hosts, and start the ranks of all hosts if this is the first one.

    The first one is the host of `--rdzv-endpoint`, or of torchrun's rank 0. Returns the exit code
    of the run.
    """
    if meeting.fewest < meeting.most:
        raise LaunchError(
            f"--nnodes {request.nnodes} with --survive: the run starts with a fixed number of "
            f"hosts, and continues if some are lost. Write --nnodes {meeting.most}."
        )
    count = request.per_host or _ranks_of_a_host(request)
    if meeting.host is None or meeting.most == 1:
        slots = request.per_host or request.size or count
        here = hosts.spread([Host("localhost", slots)], total=request.size)
        return _by_ourselves(request, passed, here)
    if request.pass_on:
        raise LaunchError(
            f"-x {request.pass_on[0].partition('=')[0]}: the hosts would send its value to each "
            "other without encryption. Leave -x out, and set the variable on each host."
        )
    if network.is_loopback(meeting.host):
        raise LaunchError(
            f"--rdzv-endpoint {meeting.host}: every host would take itself for this one. Write a "
            "name or an address at which the other hosts reach it."
        )
    secret = nodes.find_secret(meeting.most)
    # Every host has it, and it must not travel unencrypted.
    passed = {name: passed[name] for name in passed if name != environment.SECRET_VARIABLE}
    store = meeting.store
    is_first = network.is_here(Host(meeting.host)) if store is None else store.is_first
    if request.dry_run:
        does = "accepts the other hosts and starts all ranks" if is_first else "joins"
        print(
            f"{count} ranks on this host, which {does}: {meeting.most} hosts meet at "
            f"{meeting.host}, port {meeting.port}"
        )
        return 0
    command = [request.words, request.module, dict(request.settings), meeting.most, request.size]
    if not is_first:
        patience = request.host_timeout or HOST_TIMEOUT
        return nodes.serve(meeting, secret, count, command, patience)
    with nodes.accepted(meeting, secret, count, command) as found:
        joined = {**vars(request), "ssh": shlex.join(found.ssh)}
        shares = _shares_of_nodes(found.hosts, request)
        found.code = _by_ourselves(LaunchRequest(**joined), passed, shares)
        return found.code


def _shares_of_nodes(named: Sequence[Host], request: LaunchRequest) -> list[Share]:
    """Return the ranks and spares of the hosts of a run with `--nnodes`."""
    more, spares = "Increase --nproc-per-node", _spares(request)
    shares = hosts.spread(named, total=request.size, spares=spares, more=more)
    if len(shares) < len(named):
        raise LaunchError(
            f"-n {request.size}: {many(len(named) - len(shares), 'host')} of {len(named)} would "
            "have no workers and no spares. Increase -n, or use fewer hosts."
        )
    return shares


def _with_secret(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ`, with a new secret for the ranks if it has none."""
    return {environment.SECRET_VARIABLE: environment.draw_secret()} | dict(environ)


def _ssh(text: str | None) -> tuple[str, ...]:
    """Split the value of `--ssh` into words. Raises LaunchError if it cannot be split."""
    try:
        words = ("ssh",) if text is None else tuple(shlex.split(text))
    except ValueError as error:
        raise LaunchError(
            f"--ssh {text} cannot be read as a command: {str(error).lower()}. Write for example "
            "--ssh 'ssh -J gate'."
        ) from None
    if not words:
        raise LaunchError("--ssh is empty: give a command, such as 'ssh -J gate'.")
    return words


def _allocation(request: LaunchRequest) -> Allocation | None:
    """Return the allocation of this batch job, or None outside a batch job.

    Raises LaunchError if the list of hosts cannot be read and the number of ranks depends on it.
    """
    try:
        return allocations.find(os.environ)
    except LaunchError as error:
        if request.size is None and request.per_host is None:
            raise
        print(f"shardwise: {error} All ranks start on this host.", file=sys.stderr, flush=True)
        return None


def _refuse_in_every_rank(outer: Identity) -> None:
    """Raise LaunchError if another launcher has started this command once in each of its ranks."""
    # Each of these commands would start a separate run, and all would train the same model.
    if outer.size == 1:
        return
    raise LaunchError(
        f"shardwise run was started {outer.size} times: {launcher_detection.claim(outer)}. Start "
        "the script itself instead (python train.py); or call shardwise run once; or once on "
        "each host, with --nnodes. If each call is meant to be a separate run, set "
        "SHARDWISE_ALONE=1."
    )


def _shares(request: LaunchRequest, allocation: Allocation | None) -> tuple[Share, ...]:
    """Return each host's ranks. The hosts come from the request, or else from the allocation."""
    size, each = request.size, request.per_host
    if request.hosts is not None and request.hostfile is not None:
        raise LaunchError(
            f"-H {request.hosts} and --hostfile {request.hostfile}: give one of the two."
        )
    if request.hosts is not None:
        named = hosts.from_list(request.hosts)
    elif request.hostfile is not None:
        named = hosts.read(Path(request.hostfile))
    else:
        named = []
    if named:
        spares = _spares(request) if len(named) > 1 else 0
        return tuple(hosts.spread(named, total=size, per_host=each, spares=spares))
    if allocation is not None:
        return tuple(_shares_of(allocation, request))
    if None not in (size, each) and size != each:
        raise LaunchError(
            f"-n {size} and --nproc-per-node {each} contradict each other on one host: give one."
        )
    if size is None and each is None:
        size = slurm.tasks_here(os.environ) or _ranks_of_a_host(request)
    return tuple(hosts.spread([Host("localhost", each or size)], total=size))


def _spares(request: LaunchRequest) -> int:
    """Return the number of spares, which only a run with --survive has."""
    survives = request.settings.get("survive", "0") != "0"
    return int(request.settings.get("spares", "0")) if survives else 0


def _shares_of(allocation: Allocation, request: LaunchRequest) -> list[Share]:
    """Return the ranks of each host in an allocation, by default one per slot or GPU."""
    spares = _spares(request) if len(allocation.hosts) > 1 else 0
    if request.per_host is not None:
        named = [Host(host.name) for host in allocation.hosts]
        each = request.per_host
        return hosts.spread(named, total=request.size, per_host=each, spares=spares)
    on_cpu = request.settings.get("device") == "cpu"
    slots = allocation.with_ranks(0 if on_cpu else resources.gpu_count(os.environ))
    if request.size is not None and request.size > sum(host.slots or 1 for host in slots):
        # The user wants more ranks than there are GPUs, so allow one per slot.
        slots = allocation.with_ranks(0)
    lacks = request.size is not None and request.size > sum(host.slots or 1 for host in slots)
    if lacks and (len(slots) == 1 or {host.slots for host in slots} == {1}):
        # The job did not request slots, so spread the ranks evenly.
        assert request.size is not None
        each = -(-request.size // len(slots))
        slots = tuple(Host(host.name, each) for host in slots)
    return hosts.spread(slots, total=request.size, spares=spares)


def _ranks_of_a_host(request: LaunchRequest) -> int:
    """Return the default number of ranks per host: one per visible GPU, or 1 without GPUs."""
    on_cpu = request.settings.get("device") == "cpu"
    return 1 if on_cpu else max(1, resources.gpu_count(os.environ))


def dry_run_words(spec: RunSpec, here: Sequence[Share]) -> str:
    """Return the text that `--dry-run` prints: each host's ranks, and the command of each rank.

    Args:
        spec: The run.
        here: The shares of this host.
    """
    count = len(spec.shares)
    rows = [
        (
            share.host.name,
            share.ranks,
            "here" if share in here else shlex.join(ssh_command(spec, share.host)),
        )
        for share in spec.shares
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    listens = f"port {spec.port}" if spec.port else "a free port"
    by = f" of interface {spec.interface}" if spec.interface else ""
    words = spec.words
    if spec.module:
        words = (*python_words(words[0], spec.python), *words[1:])
    elif spec.is_python:
        words = (spec.python, *words)
    lines = [
        f"{spec.size} rank{'s' * (spec.size > 1)} on {count} host{'s' * (count > 1)}; "
        f"rank 0 listens on {spec.shares[0].host.name}, on {listens}{by}",
        *(f"  {name:<{widths[0]}}  {ranks:<{widths[1]}}  {how}" for name, ranks, how in rows),
        f"each rank: {in_shell(words)}",
        f"in folder: {spec.folder}",
        f"settings: {in_shell(f'{name}={value}' for name, value in spec.flags.items()) or 'none'}",
    ]
    if spec.passed:
        lines.append(f"variables passed on: {', '.join(sorted(spec.passed))}")
    if spec.log_dir:
        lines.append(f"a log of each rank in: {spec.log_dir}")
    return "\n".join(lines)
