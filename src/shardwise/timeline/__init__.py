"""Where the time of a run goes, event by event, in one file of Chrome's trace format.

    nested_batch.py        the rows that a rank has in it
    recorder.py    what is going on in this process, noted at the places where it happens
    encoding.py    from notes to lines of JSON
    file.py        the file that all ranks of a host write, whole at every moment
    memory.py      what this process takes of it

    reading.py     such files, read again
    intervals.py   stretches of time: pure
    steps.py       what each rank did in each step: pure
    verdict.py     who was slowest, and why: pure
    tables.py      the same as tables
    commands.py    `shardwise timeline`

Where nothing is recorded a place costs one test of an attribute.
"""

from shardwise.timeline.recorder import span
from shardwise.timeline.tracks import Row

__all__ = ["Row", "span"]
