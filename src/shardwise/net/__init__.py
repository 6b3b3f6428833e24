"""Determines the rank of a process and connects it to the other ranks.

identity.py, environment.py  rank and size, and the environment variables that hold them
launchers/                   reads rank and size from each launcher's variables
rpc.py, authentication.py    exchange authenticated messages between processes
rendezvous.py                connects all ranks, with rendezvous_file.py or torchrun_store.py
store.py, listeners.py       rank 0's key-value store; blocks new connections to Gloo's sockets
network.py, hosts.py         network interfaces and addresses; host lists
progress.py, error_file.py   reports from a rank to its launcher
helper_folder.py             folder for the sockets of DataLoader workers
private_files.py             files that only this user can read
restarts.py                  decides whether to restart a failed run
python_command.py            builds the command line that runs a Python module
"""
