"""Runs on several hosts, over ssh: an agent on each host starts and watches its ranks.

many_hosts.py    the launcher's side of a whole run: all hosts ready, then all ranks start
agents.py        an agent on each host, all of them ready
remote_host.py   the launcher's side of one host
agent.py         the other side: the process that ssh starts on a host
protocol.py      the messages between the two
command.py       the ssh command, and what its failures mean
heartbeat.py     tells the agents every second that the launcher is alive
"""
