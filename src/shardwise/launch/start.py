"""Starts what the command line asks for: chooses the hosts, and who starts the ranks.

nothing, or -n N            this host                     one_host.py
-H, --hostfile              ssh to each                   ssh/many_hosts.py
a Slurm allocation          srun                          slurm.py
another allocation          ssh to each of its hosts      allocations.py, ssh/many_hosts.py
--nnodes                    torch's elastic agent         elastic.py
"""

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import LaunchError
from shardwise.launch import allocations, elastic, flags, island_run, one_host, program, resources
from shardwise.launch.allocations import Allocation
from shardwise.launch.job import Job, dry_run_words
from shardwise.launch.ssh import many_hosts
from shardwise.launch.ssh.command import SshOptions
from shardwise.net import environment, hosts, network
from shardwise.net.hosts import Host, Share
from shardwise.net.identity import Identity
from shardwise.net.launchers import detection as launcher_detection
from shardwise.net.launchers import platforms, slurm

GRACE = 5.0
"""Seconds between asking ranks to end and killing them, where the user does not say."""

HOST_TIMEOUT = 10.0
"""Seconds of silence after which a host is lost, where the user does not say."""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The launcher's own flags (see flags.py) and what to run with which `settings`."""

    words: tuple[str, ...]
    settings: Mapping[str, str]
    module: bool
    size: int | None
    per_host: int | None
    hosts: str | None
    hostfile: str | None
    pass_on: tuple[str, ...]
    ssh: str | None
    ssh_port: int | None
    python: str | None
    port: int | None
    interface: str | None
    nnodes: str | None
    node_rank: int | None
    rdzv_endpoint: str | None
    rdzv_id: str | None
    restarts: int
    elastic_islands: bool
    log_dir: str | None
    shown: str | None
    host_timeout: float | None
    grace: float | None
    dry_run: bool


def run(asked: RunRequest) -> int:
    """Run what was asked for and return its exit code. Raises LaunchError when it cannot start."""
    named = asked.hosts is not None or asked.hostfile is not None
    if asked.nnodes is None:
        outer = launcher_detection.around_command()
        is_service = outer.launcher in launcher_detection.SERVICES
        if outer.launcher == platforms.SKYPILOT.launcher and not named and outer.rank:
            # SkyPilot runs the same commands on every node.
            print(f"shardwise: node 0 of {outer.size} starts the ranks of this node.")
            return 0
        # The first host of a service may start the ranks of all others.
        has_hosts = named or outer.launcher == platforms.SKYPILOT.launcher
        if not (is_service and has_hosts and outer.rank == 0):
            _refuse_in_every_rank(outer)
    by_srun = asked.nnodes is None and not named and slurm.needs_srun(os.environ)
    heeded = environment.MASTER if by_srun and not asked.port else ()
    passed = environment.passed_variables(os.environ, asked.pass_on, asked.interface, heeded)
    if asked.nnodes is not None:
        return _by_torch(asked, passed)
    for flag in ("node_rank", "rdzv_endpoint"):
        if getattr(asked, flag) is not None:
            raise LaunchError(f"--{flag.replace('_', '-')} needs --nnodes, the number of hosts.")
    if by_srun:
        return _by_srun(asked, passed)
    return _by_ourselves(asked, passed)


def _by_ourselves(asked: RunRequest, passed: Mapping[str, str]) -> int:
    """Start the ranks here, and over ssh."""
    allocation = None
    if asked.hosts is None and asked.hostfile is None:
        allocation = _allocation(asked)
    shares = _shares(asked, allocation)
    here = [share for share in shares if network.is_here(share.host)]
    is_alone = list(shares) == here[:1]
    if is_alone and asked.hosts is None and asked.hostfile is None:
        flags.refuse_without_effect(flags.ON_THIS_HOST, {**vars(asked), **asked.settings})
    size = sum(share.count for share in shares)
    islands, settings = 0, asked.settings
    if asked.elastic_islands:
        islands, settings = island_run.checked([share.count for share in shares], settings)
    job = Job(
        words=asked.words,
        shares=shares,
        flags=settings,
        passed=passed,
        shown=None if asked.shown is None else hosts.ranks(asked.shown, size, "--show"),
        module=asked.module,
        port=asked.port or 0,
        grace=GRACE if asked.grace is None else asked.grace,
        restarts=asked.restarts,
        elastic_islands=islands,
        interface=asked.interface,
        log_dir=asked.log_dir,
    )
    if allocation is not None and "quiet" not in asked.settings:
        named = ", ".join(f"{share.host.login}:{share.count}" for share in shares)
        print(f"shardwise: hosts of {allocation}: {named}", file=sys.stderr, flush=True)
    options = SshOptions(
        folder=environment.working_folder(os.environ),
        python=asked.python or sys.executable,
        ssh=_ssh(asked.ssh or (None if allocation is None else allocation.ssh)),
        port=asked.ssh_port,
        passed=passed,
        patience=asked.host_timeout or HOST_TIMEOUT,
    )
    if asked.dry_run:
        print(dry_run_words(job, options, here))
        return 0
    return one_host.run(job) if is_alone else many_hosts.run(job, options)


def _by_srun(asked: RunRequest, passed: Mapping[str, str]) -> int:
    """Leave the hosts of a Slurm allocation to srun; returns only from a dry run."""
    flags.refuse_without_effect(flags.BY_SRUN, vars(asked))
    _refuse_elastic(asked, "inside a Slurm allocation")
    if asked.shown is not None or asked.log_dir is not None:
        raise LaunchError(
            "--show and --log-dir are of our own launcher, but the hosts of this Slurm job "
            "are srun's, which writes each line with its rank. Leave them out."
        )
    command = program.command(asked.words[0], asked.words[1:], module=asked.module)
    if asked.restarts:
        raise LaunchError(
            "--restarts is of our own launcher, but the hosts of this Slurm job are srun's. Leave "
            "it out, and let Slurm start the job again: sbatch --requeue."
        )
    environ = slurm.srun_environment(
        _with_secret({**os.environ, **passed}), asked.settings, asked.port or 0
    )
    words = slurm.srun_command(environ, command, size=asked.size, per_host=asked.per_host)
    if not asked.dry_run:
        slurm.become_srun(words, environ)
    print(shlex.join(words))
    return 0


def _by_torch(asked: RunRequest, passed: Mapping[str, str]) -> int:
    """Let torch's elastic agent start the ranks of this host; returns only from a dry run."""
    assert asked.nnodes is not None
    if asked.hosts is not None or asked.hostfile is not None or asked.shown is not None:
        raise LaunchError(
            "--nnodes is for a command that is started on each host by itself; -H, --hostfile and "
            "--show are for one that starts all. Give the one or the other."
        )
    flags.refuse_without_effect(flags.BY_TORCH, {**vars(asked), **asked.settings})
    _refuse_elastic(asked, "with --nnodes")
    if asked.size is not None:
        raise LaunchError(
            f"-n {asked.size} counts all ranks, which --nnodes leaves open: say how many each "
            "host has, with --nproc-per-node."
        )
    name = asked.rdzv_id or "shardwise"
    meeting = elastic.ElasticRendezvous.of(asked.nnodes, asked.rdzv_endpoint, asked.node_rank, name)
    command = program.command(asked.words[0], asked.words[1:], module=asked.module)
    address = elastic.own_address(meeting, asked.interface)
    words = elastic.agent_command(
        meeting,
        command,
        per_host=asked.per_host or _ranks_of_a_host(asked),
        restarts=asked.restarts,
        address=address,
        log_dir=asked.log_dir,
    )
    if not asked.dry_run:
        leads = None if address is None else network.interface_of(address)
        base = {**os.environ, **passed}
        print(f"shardwise: {elastic.exposed(meeting, base)}", file=sys.stderr)
        if meeting.most == 1:
            base = _with_secret(base)
        elastic.run(words, elastic.agent_environment(base, asked.settings, leads))
    print(shlex.join(words))
    return 0


def _refuse_elastic(asked: RunRequest, where: str) -> None:
    """Raise LaunchError for `--elastic-islands` where others than us start the ranks."""
    if asked.elastic_islands:
        raise LaunchError(
            f"--elastic-islands is for ranks that we start, and {where} others start them: leave "
            "it out, or name the hosts with -H or --hostfile."
        )


def _with_secret(environ: Mapping[str, str]) -> dict[str, str]:
    """With a secret for the ranks, where the user has given none."""
    return {environment.SECRET_VARIABLE: environment.draw_secret()} | dict(environ)


def _ssh(text: str | None) -> tuple[str, ...]:
    """The words of `--ssh`."""
    try:
        words = ("ssh",) if text is None else tuple(shlex.split(text))
    except ValueError as error:
        raise LaunchError(
            f"--ssh {text} cannot be read as a command: {str(error).lower()}. Write for example "
            "--ssh 'ssh -J gate'."
        ) from None
    if not words:
        raise LaunchError("--ssh takes a command, such as 'ssh -J gate', not nothing.")
    return words


def _allocation(asked: RunRequest) -> Allocation | None:
    """Return the hosts of this job, if it has any. A list that cannot be read is no hindrance to a
    run whose number of ranks is given."""
    try:
        return allocations.find(os.environ)
    except LaunchError as error:
        if asked.size is None and asked.per_host is None:
            raise
        print(f"shardwise: {error} All ranks start on this host.", file=sys.stderr, flush=True)
        return None


def _refuse_in_every_rank(outer: Identity) -> None:
    """Raise LaunchError if a launcher started this command once per rank: each call would be a run
    of its own, and all of them would train the same model."""
    if outer.size == 1:
        return
    raise LaunchError(
        f"shardwise run was started {outer.size} times: {launcher_detection.claim(outer)}. Start "
        "the script itself (python train.py) in its place; or call shardwise run once; or once on "
        "each host, with --nnodes. If each of them is meant to be a run by itself, set "
        "SHARDWISE_ALONE=1."
    )


def _shares(asked: RunRequest, allocation: Allocation | None) -> tuple[Share, ...]:
    """Return which ranks run on which host."""
    size, each = asked.size, asked.per_host
    if asked.hosts is not None and asked.hostfile is not None:
        raise LaunchError(f"-H {asked.hosts} and --hostfile {asked.hostfile}: give one of the two.")
    if asked.hosts is not None:
        return tuple(hosts.spread(hosts.from_list(asked.hosts), total=size, per_host=each))
    if asked.hostfile is not None:
        return tuple(hosts.spread(hosts.read(Path(asked.hostfile)), total=size, per_host=each))
    if allocation is not None:
        return tuple(_shares_of(allocation, asked))
    if None not in (size, each) and size != each:
        raise LaunchError(f"-n {size} and --nproc-per-node {each} are of one host: give one.")
    if size is None and each is None:
        size = slurm.tasks_here(os.environ) or _ranks_of_a_host(asked)
    return tuple(hosts.spread([Host("localhost", each or size)], total=size))


def _shares_of(allocation: Allocation, asked: RunRequest) -> list[Share]:
    """Return the ranks of each host of `allocation`: its slots or GPUs, unless the user says."""
    if asked.per_host is not None:
        named = [Host(host.name) for host in allocation.hosts]
        return hosts.spread(named, total=asked.size, per_host=asked.per_host)
    on_cpu = asked.settings.get("device") == "cpu"
    slots = allocation.with_ranks(0 if on_cpu else resources.gpu_count(os.environ))
    if asked.size is not None and asked.size > sum(host.slots or 1 for host in slots):
        # More than there are GPUs, but no more than the job asked for.
        slots = allocation.with_ranks(0)
    lacks = asked.size is not None and asked.size > sum(host.slots or 1 for host in slots)
    if lacks and (len(slots) == 1 or {host.slots for host in slots} == {1}):
        # The job has not asked for slots, so the ranks are spread evenly.
        assert asked.size is not None
        each = -(-asked.size // len(slots))
        slots = tuple(Host(host.name, each) for host in slots)
    return hosts.spread(slots, total=asked.size)


def _ranks_of_a_host(asked: RunRequest) -> int:
    """How many ranks this host has where nobody says: one for each visible GPU, else 1."""
    on_cpu = asked.settings.get("device") == "cpu"
    return 1 if on_cpu else max(1, resources.gpu_count(os.environ))
