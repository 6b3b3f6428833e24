"""The note of a rank stays readable after the disk became full in the middle of it."""

import json
import resource
import subprocess
import sys
from pathlib import Path

from shardwise.checkpoint.background import RESERVED

PROGRAM = f"""
import resource, signal, sys
from pathlib import Path
from shardwise.checkpoint import background
folder = Path(sys.argv[1])
background.reserve(folder, 0)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is an OSError
resource.setrlimit(resource.RLIMIT_FSIZE, ({RESERVED}, {RESERVED}))
note = {{"sums": ["x" * 100] * {RESERVED // 50}, "failure": None}}
background._leave_note(folder, "rank-0", note)
"""


def test_short_note_replaces_a_long_one_that_did_not_fit(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=True, timeout=120)
    note = json.loads((tmp_path / ".rank-0.note").read_bytes())
    assert "File too large" in note["failure"]
