"""Identifies the rank of a process, and connects it to the other ranks.

identity.py, environment.py  rank and size, and the variables that hold them
launchers/                   reads them from the variables of each launcher
rpc.py, authentication.py    authenticated messages between processes
rendezvous.py                all ranks meet: by rendezvous_file.py, or on torchrun_store.py
store.py, listeners.py       rank 0's key-value store; closes Gloo's sockets to new connections
network.py, hosts.py         interfaces and addresses; lists of hosts
progress.py, error_file.py   reports from a rank to its launcher, in private_files.py
restarts.py                  decides whether a failed run starts again
python_command.py            the command line of a Python module
"""
