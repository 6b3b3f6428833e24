"""The timeline: the events of each rank, in one file of Chrome's trace format.

    recorder.py    records events of this process on the rows of a rank
    encoding.py    encodes events as lines of JSON
    file.py        the file that all ranks of a host write, valid JSON at every moment

If no timeline is recorded, `span` costs one test of an attribute.
"""

from shardwise.timeline.recorder import Row, span

__all__ = ["Row", "span"]
