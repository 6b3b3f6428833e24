"""Runs all ranks on this host. They connect over loopback, and rank 0 reads standard input."""

import os
import tempfile
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from shardwise.errors import LaunchError
from shardwise.launch import program, worker
from shardwise.launch.console import Console
from shardwise.launch.local_workers import LocalWorkers
from shardwise.launch.orphan_reaper import OrphanReaper
from shardwise.launch.part_runner import PartRunner
from shardwise.launch.run_spec import Meeting, RunSpec
from shardwise.launch.scale_up import ScaleUpSocket
from shardwise.launch.signals import Signals
from shardwise.launch.supervisor import Supervisor
from shardwise.launch.worker import Begin
from shardwise.net import network, private_files, restarts
from shardwise.net.hosts import LOOPBACK
from shardwise.net.restarts import Ending


def run(spec: RunSpec, part_runner: PartRunner | None) -> int:
    """Run `spec` until it finishes, and return the exit code.

    Raises LaunchError if the ranks cannot be started.
    """
    # Find the program first, so that a typo is reported once and not by every rank.
    words = program.command(spec.words[0], spec.words[1:], module=spec.module)
    console = spec.console(os.environ)
    ending = run_begun(spec, console, worker.program(words), part_runner)
    console.say(ending.words)
    return ending.code


def run_begun(
    spec: RunSpec, console: Console, begin: Begin, part_runner: PartRunner | None = None
) -> Ending:
    """Run `spec` until it finishes, with ranks that `begin` starts. Return how it ended.

    Raises LaunchError if the ranks cannot be started.
    """
    with Signals() as signals:
        allowed = restarts.Restarts(spec.restarts)
        once = partial(_once, spec, begin, console, signals)
        if part_runner is not None:
            once = partial(part_runner.on_one_host, spec, begin, console, signals, allowed)
        try:
            return restarts.last_ending(allowed, once, console.say)
        finally:
            # In this file an elastic run stores its last commit for a restart. Now the run is over.
            (private_files.folder_path() / private_files.commit_file(spec.run)).unlink(
                missing_ok=True
            )
            private_files.tidy()


def _once(spec: RunSpec, begin: Begin, console: Console, signals: Signals) -> Ending:
    """Start all ranks, and watch them until they exit."""
    address = LOOPBACK if spec.interface is None else network.address_of_interface(spec.interface)
    with network.listen(address, spec.port) as listener, network.reserve_port(address) as spare:
        meeting = Meeting(
            address=address,
            port=listener.getsockname()[1],
            master_port=spare.getsockname()[1],
        )
        # Open the logs before starting any rank, so that an error does not leave ranks behind.
        outputs = spec.outputs(console)
        folder = Path(tempfile.mkdtemp(prefix="shardwise-"))
        with OrphanReaper(folder) as reaper:
            supervisor = Supervisor(
                console,
                outputs,
                signals,
                grace=spec.grace,
                joins=spec.joins,
                survives=spec.survives,
                spares=spec.spares,
                output_of=partial(spec.output_of, console=console),
            )
            workers = LocalWorkers(
                spec,
                meeting,
                spec.streams(console, reads=True),
                begin,
                folder,
                reaper,
                supervisor.selector,
                supervisor.hear,
                supervisor.left,
                supervisor.saves_first,
            )
            supervisor.substitutes = workers
            if spec.survives:
                supervisor.every_turn.append(workers.kill_stopped)
            with closing(supervisor), ExitStack() as stack:
                if spec.survives and spec.size > 1:
                    try:
                        socket = ScaleUpSocket(supervisor.selector, supervisor.add_workers)
                        stack.enter_context(closing(socket))
                    except (OSError, LaunchError) as error:
                        supervisor.say(f"shardwise: this run cannot be scaled up: {error}\n")
                workers.start(listener)
                # Rank 0 has inherited the socket. If this copy stayed open, the kernel would accept
                # connections even after rank 0 has exited, and ranks would wait instead of failing.
                listener.close()
                ending = supervisor.watch([workers])
            workers.release()
            return ending
