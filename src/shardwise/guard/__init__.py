"""Finds corrupted states, wrong computations, slow ranks and spikes during a run (`--guard K`).

checks.py       exchanges findings, and acts on them
findings.py     what the guard can find, in words, and what to do about it
memory.py       lists the tensors that a rank holds, and detects changes that no code has made
copies.py       compares tensors that must be equal on several ranks, and finds the wrong rank
second_run.py   computes forward and backward passes twice, and compares them in bits
step_times.py   measures the phases of steps, and finds a rank that the others wait for
spikes.py       finds steps with a sudden large loss or gradient
engine_guard.py the guard of an engine, whose step calls it
stock.py        `sw.Guard`, for loops with DistributedDataParallel or FSDP2

An engine without `--guard` does not import this package.
"""
