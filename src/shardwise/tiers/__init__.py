"""Where the bytes of a state rest when they do not rest on the device.

nvme.py       records of a state: read ahead, written behind
beside.py     copies between a device and the host, on a stream beside the work
spool.py      short-lived records of any size: what forward saves for backward
direct_io.py  the file that either is on: without a name, past the page cache
transfers.py  the threads that move the bytes
extents.py    which ranges of a file are free: pure arithmetic
mounts.py     what a folder lies on: a disk, or memory that looks like one
staging.py    the memory that bytes pass through, and the pages that it consists of
heap.py       memory that is the system's again once it is freed
"""
