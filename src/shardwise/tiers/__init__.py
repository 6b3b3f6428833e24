"""Tiers: stores the bytes of a state or of activations on the host or on a disk (NVMe).

nvme.py         records of a state: read ahead, written behind
copy_stream.py  copies between a device and the host, on a stream of their own for each way
host_window.py  flat tensors of any device, shown to the host by pieces: for checkpoints
pieces.py       any number of bytes between the two, through a few pinned blocks
spool.py        short-lived records of any size: what forward saves for backward
device_spool.py the same for an accelerator's memory
direct_io.py    the file that either is on, its folder, and the threads that move the bytes
staging.py      the buffers that bytes pass through, which are used again all the time
host_memory.py  pages for transfers, and what the C library keeps of freed memory
"""
