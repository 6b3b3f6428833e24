"""What a run would do, for `--dry-run`. Pure."""

import shlex
from collections.abc import Sequence

from shardwise.launch import ssh
from shardwise.launch.hosts import Share
from shardwise.launch.job import Job
from shardwise.launch.ssh import Way


def words(job: Job, way: Way, here: Sequence[Share]) -> str:
    """Which ranks would run where, by which commands; `here` are the shares of this host."""
    hosts = len(job.shares)
    rows = [
        (
            share.host.name,
            share.ranks,
            "here" if share in here else shlex.join(ssh.words(way, share.host)),
        )
        for share in job.shares
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    listens = f"port {job.port}" if job.port else "a port that is free"
    by = f" of interface {job.interface}" if job.interface else ""
    lines = [
        f"{job.size} rank{'s' * (job.size > 1)} on {hosts} host{'s' * (hosts > 1)}; "
        f"rank 0 listens on {job.shares[0].host.name}, on {listens}{by}",
        *(f"  {name:<{widths[0]}}  {ranks:<{widths[1]}}  {how}" for name, ranks, how in rows),
        f"each rank: {shlex.join(_program(job, way))}",
        f"in folder: {way.folder}",
        f"settings: {shlex.join(f'{name}={value}' for name, value in job.flags.items()) or 'none'}",
    ]
    if job.passed:
        lines.append(f"variables passed on: {', '.join(sorted(job.passed))}")
    if job.log_dir:
        lines.append(f"a log of each rank in: {job.log_dir}")
    return "\n".join(lines)


def _program(job: Job, way: Way) -> list[str]:
    if job.module:
        return [way.python, "-m", *job.words]
    return [way.python, *job.words] if job.is_python else list(job.words)
