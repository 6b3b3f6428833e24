"""`shardwise verify --stock`: compares a distributed script of any library with one process.

    stock_command.py   prints the result, and writes the page, JSON and JUnit files
    stock_flow.py      compares the ranks with one process: decides on the runs and the verdict
    stock_resume.py    compares a resumed run with an uninterrupted one (--resume-at)
    stock_runs.py      starts each run, and stops it if it makes no progress
    own_files.py       shows each run the user's files, without changing them
    start/             imported when Python starts; starts the recorder in each rank
    recorder.py        records gradients, parameters and losses in every step
    batches.py         records each rank's batches, and replays their union in one process
    findings.py        reports mistakes that the records prove
    metrics.py         reports mistakes in evaluations
    suspects.py        lists possible causes of a difference, with alterations that remove them
    alterations.py     removes a suspected cause in a trial run

The ranks and the reference run the script unchanged.
"""
