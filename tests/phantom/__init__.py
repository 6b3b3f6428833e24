"""A simulated CUDA device that checks order, synchronisations and bytes without a GPU.

In a process that has called `rank.become` there are tensors on cuda:0. Their bytes are in host
memory, and every kernel runs at once on the CPU, so results are the CPU's. The simulation also
tracks which other orders a real device could have chosen:

    clocks.py       vector clocks of the host and of each stream: what happened before what
    accesses.py     the last reads and writes of each block, and pairs that are not in order
    order.py        kernels, events, synchronisations and freed blocks, reported to those two
    device.cpp      the C++ parts that torch needs for a device; building.py compiles them once
    memory.py       tensors of the device in host memory
    operators.py    runs every operation on the host's views of its tensors
    streams.py      torch.cuda's streams and events; torch_cuda.py: the rest of that module
    collectives.py  NCCL's collectives: Gloo moves the bytes, one stream per communicator
    abortable.py    communicators of NCCL that wait for a lost rank until they are aborted
    host.py         reads and writes of pinned memory by the CPU and by files
    warm.py         a process with a device that programs are forked from; script.py: programs
    rank.py         a rank of a warm group with such a device; report.py: the results of a case

It shows missing waits, buffers that are reused or freed while another stream uses them
(record_stream), collectives on tensors that are not complete, host synchronisations and their
lines, the number of kernels, and the bytes on the device at any time.

It cannot show time and overlap, CUDA's numerics and limits, NCCL itself, or races between threads
of the host, which count as one. It never claims to be CUDA.
"""
