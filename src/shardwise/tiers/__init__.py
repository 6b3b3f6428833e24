"""Stores the bytes of a state or of activations in host memory or on a disk (NVMe).

nvme.py         records of a state on a disk: read ahead of use, written back asynchronously
copy_stream.py  copies between a device and the host, on one stream per direction
host_window.py  lets the host read and write flat tensors of any device, for checkpoints
pieces.py       copies any number of bytes between device and host through a few pinned blocks
spool.py        short-lived records of any size, such as tensors saved for the backward pass
device_spool.py a spool for accelerator memory
direct_io.py    the file of a store or spool, and the threads that transfer its bytes
staging.py      reusable buffers for transfers
host_memory.py  page-aligned memory for transfers, and settings of the C library's heap
"""
