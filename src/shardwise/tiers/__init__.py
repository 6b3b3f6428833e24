"""Tiers: stores the bytes of a state or of activations on the host or on a disk (NVMe).

nvme.py         records of a state: read ahead, written behind
copy_stream.py  copies between a device and the host, on a stream of their own
spool.py        short-lived records of any size: what forward saves for backward
direct_io.py    the file that either is on, its folder, and the threads that move the bytes
host_memory.py  pages for transfers, and what the C library keeps of freed memory
"""
