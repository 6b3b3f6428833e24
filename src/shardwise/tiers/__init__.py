"""Tiers: stores the bytes of a state or of activations on the host or on a disk (NVMe).

nvme.py         records of a state on a disk: read ahead, written asynchronously
copy_stream.py  copies between a device and the host, on one stream for each direction
host_window.py  reads and writes flat tensors of any device from the host, for checkpoints
pieces.py       moves any number of bytes between device and host through a few pinned blocks
spool.py        short-lived records of any size, such as tensors that forward saves for backward
device_spool.py a spool for an accelerator's memory
direct_io.py    the file of a store or spool, and the threads that move its bytes
staging.py      buffers for transfers, which are reused
host_memory.py  pages for transfers, and settings of the C library's heap
"""
