"""Reports hangs: which ranks are waiting, for which ranks, and where those ranks are.

    waits.py          the open waits of this process, by thread
    status_server.py  a thread on each rank that answers other ranks' requests, and functions that
                      send such requests
    watchdog.py       a thread on each rank that watches its long waits
    wait_graph.py     finds the ranks that block all others: the cause of a hang
    hang_report.py    builds the warning about a long wait
    process_status.py finds a thread's position in the user's code, and a process's state

The status server sleeps until another rank sends a request. A rank in an infinite loop therefore
still reports its position, while a rank that is stopped or disconnected does not answer. None of
this code is on the hot path.
"""
