"""Reports of hanging runs: which ranks wait, for which others, and what those do instead.

    waits.py          the open waits of this process, by thread
    status_server.py  a thread of each rank that answers other ranks, and the questions to them
    watchdog.py       a thread of each rank that watches its long waits
    wait_graph.py     finds the ranks that block all others: the cause of a hang
    hang_report.py    builds the warning about a long wait
    process_status.py the position of a thread in the user's code, and the state of a process

The status server sleeps until another rank asks. A rank in an endless loop therefore still reports
its position, and a rank that is stopped or cut off does not answer. Nothing here is on the hot
path.
"""
