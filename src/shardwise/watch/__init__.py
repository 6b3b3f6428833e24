"""Finds out who waits for whom in a run that hangs, and what the missing ranks do instead.

    waits.py          the open waits of this process, by thread
    status_server.py  the thread of each rank that answers the others, and what a rank asks
    watchdog.py       the thread of each rank that watches its long waits
    wait_graph.py     finds the ranks that block all others: whom a hang is blamed on
    hang_report.py    words the warning about a long wait
    process_status.py where a thread is in the user's code, and the state of a process

The status server sleeps until another rank asks, so a rank in an endless loop still reports where
it is, and one that is stopped or cut off is known by its silence. Nothing here is on the hot path.
"""
