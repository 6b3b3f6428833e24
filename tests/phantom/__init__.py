"""A simulated CUDA device: its order, its synchronisations and its bytes, checked without a GPU.

In a process that has called `rank.become` there are tensors on cuda:0. Their bytes lie in the
host's memory, every kernel runs at once on the CPU, and so results are those of the CPU. Beside
that, what a real device would have been free to do is followed:

    clocks.py       vector clocks of the host and of each stream: what happened before what
    accesses.py     who read and wrote which bytes last, and which two were not in order
    order.py        kernels, events, synchronisations and freed blocks, told to those two
    device.cpp      the C++ parts that torch asks a device for; building.py  g++, once
    memory.py       tensors of the device over memory of the host
    operators.py    every operation, run on the host's view of its tensors
    streams.py      torch.cuda's streams and events; torch_cuda.py  the rest of that module
    collectives.py  NCCL's: Gloo moves the bytes, a stream of each communicator has the order
    host.py         what the CPU does with pinned memory, and what files read and write there
    warm.py         a process that programs with such a device are forked from; script.py  they
    rank.py         a rank of a warm group that has such a device; report.py  what a case showed

What it shows: a wait that is left out, a buffer that is reused or freed while another stream is
at it (record_stream), a collective on a tensor that is not there yet, host synchronisations and
where, kernels launched, bytes on the device at any time.

What it cannot show: time and overlap, CUDA's numerics and limits, NCCL itself, races between
threads of the host, which count as one here. It never claims to be CUDA.
"""
