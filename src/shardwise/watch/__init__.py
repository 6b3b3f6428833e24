"""The watch: who waits for whom, who does not come and what it does instead. Off the hot path.

    waits.py        the waits of this process, by thread
    whereabouts.py  where in the user's code a thread is, and in which verb of ours
    processes.py    the state of a process in words
    questions.py    one question to other ranks, and their answers
    roots.py        from a rank that waits to those that all wait for: pure
    survey.py       what is said of a long wait: pure
    lookout.py      the thread of each rank that answers, and what a rank asks
    sentry.py       the thread of each rank that minds its long waits

The first thread sleeps until another rank asks, so a rank in an endless loop still tells where it
is, and one that is stopped or cut off is known by its silence.
"""
