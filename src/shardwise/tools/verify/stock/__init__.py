"""`shardwise verify --stock`: compares a distributed script of any library with one process.

    stock_command.py   prints the result, writes page, JSON and JUnit
    stock_flow.py      ranks against one process: which runs, which verdict
    stock_resume.py    a stopped and resumed run against a whole one (--resume-at)
    stock_runs.py      starts a run, and ends it after the time limit
    own_files.py       shows each run the user's files, without changing them
    start/             is imported when Python starts, and starts the recorder in each rank
    recorder.py        writes gradients, parameters and losses of every step
    batches.py         writes the batches of every rank, and replays their union in one process
    findings.py        names the mistakes that records prove
    metrics.py         names the mistakes of evaluations
    suspects.py        possible causes of a difference, with the alterations that would remove it
    alterations.py     removes a suspected cause in a trial run

Ranks and reference run the script unchanged.
"""
