"""A run on this host alone: its ranks meet on the loopback interface and read our input."""

import os
import tempfile
from contextlib import closing
from pathlib import Path

from shardwise.launch import interface, program, rendezvous
from shardwise.launch.crew import Crew
from shardwise.launch.hosts import HERE
from shardwise.launch.job import Job
from shardwise.launch.signals import Signals
from shardwise.launch.supervisor import Supervisor
from shardwise.launch.warden import Warden


def run(job: Job) -> int:
    """Run `job` to its end and return the exit code. Raises LaunchError when it cannot start."""
    command = program.command(job.words[0], job.words[1:], module=job.module)
    address = HERE if job.interface is None else interface.address_of(job.interface)
    console = job.console(os.environ)
    with rendezvous.listen(address, job.port) as meeting:
        port = meeting.getsockname()[1]
        task = job.task(job.shares[0], command, console, address=address, port=port, reads=True)
        voices = job.voices(console)
        folder = Path(tempfile.mkdtemp(prefix="shardwise-"))
        with Warden(folder) as warden, Signals() as signals:
            supervisor = Supervisor(console, voices, signals, grace=job.grace)
            crew = Crew(task, folder, warden, supervisor.selector, supervisor.hear, supervisor.left)
            with closing(supervisor):
                crew.start(meeting)
                meeting.close()
                code = supervisor.watch([crew])
            crew.release()
            return code
