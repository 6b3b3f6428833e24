"""Records each rank's events in a file in Chrome's trace format.

    recorder.py    records this process's events on the rows of a timeline
    encoding.py    encodes events as JSON lines
    file.py        writes the file that all ranks of a host share, which is always valid JSON

If no timeline is recorded, `span` costs only one attribute check.
"""

from shardwise.timeline.recorder import Row, span

__all__ = ["Row", "span"]
