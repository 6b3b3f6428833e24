"""Tells a process which rank it is, and connects it to the others.

identity.py, environment.py  rank and size, and the variables that carry them
launchers/        reads them from the variables of each launcher
rpc.py            authenticated messages between processes; authentication.py: proofs and seals
rendezvous.py     how all ranks meet; rendezvous_file.py, torchrun_store.py: where
store.py          the key-value store in rank 0; listeners.py: closes its sockets to strangers
network.py, hosts.py  interfaces and addresses; lists of hosts
progress.py, error_file.py, restarts.py  what a rank tells its launcher, through private_files.py
python_command.py the command line of a Python module
"""
