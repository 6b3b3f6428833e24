"""Starts the ranks of a run, watches them to their end, and tells a rank who it is.

start.py             reads the command line, chooses who starts the ranks
one_host.py, ssh/    start them: on this host, on several hosts over ssh
slurm.py, elastic.py leave it to srun, to torch's elastic agent
allocations.py       the hosts of a batch job, for runs over ssh
supervisor.py        watches the ranks, and ends all when one fails
failure_report.py    says which rank failed and why
launcher_detection.py  the table of launchers: each rank reads from it which rank it is
launchers/           reads the variables of each launcher, and the signs of an unknown one
environment.py       the variables that a rank is given
deepspeed_flags.py   the command line of DeepSpeed's launcher, as flags of ours
"""
