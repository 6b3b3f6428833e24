"""The note of a rank stays readable after the disk became full in the middle of it."""

import json
import os
import resource
import signal
from pathlib import Path

from shardwise.checkpoint import background
from shardwise.checkpoint.background import RESERVED


def leave_long_note(folder: Path) -> None:
    background.reserve(folder, 0)
    # A write beyond the limit is then an OSError.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (RESERVED, RESERVED))
    note = {"sums": ["x" * 100] * (RESERVED // 50), "failure": None}
    background._leave_note(folder, "rank-0", note)


def test_short_note_replaces_a_long_one_that_did_not_fit(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    child = os.fork()
    if child == 0:
        try:
            leave_long_note(tmp_path)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    note = json.loads((tmp_path / ".rank-0.note").read_bytes())
    assert "File too large" in note["failure"]
