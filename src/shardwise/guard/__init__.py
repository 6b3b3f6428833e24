"""Detects corrupted states, wrong computations, slow ranks and loss spikes (`--guard K`).

checks.py       exchanges findings between ranks, and acts on them
findings.py     describes what the guard found, and what the user can do about it
memory.py       lists the tensors of a rank, and detects changes that no code has made
copies.py       compares tensors that must be equal on several ranks, and finds the wrong rank
second_run.py   runs forward and backward passes twice, and compares the results bit by bit
step_times.py   measures the phases of each step, and finds a rank that the others wait for
spikes.py       finds steps whose loss or gradient norm suddenly rises
engine_guard.py the guard of an engine, called by the engine's step
stock.py        `sw.Guard`, for loops with DistributedDataParallel or FSDP2

An engine without `--guard` does not import this package.
"""
