"""Runs on several hosts, over ssh: an agent on each host starts and watches its ranks.

many_hosts.py    the launcher's side of a whole run: first all hosts are ready, then all ranks start
agents.py        starts an agent on each host, and waits until all are ready
remote_host.py   the launcher's side of one host
agent.py         the process that ssh starts on a host
protocol.py      the messages between launcher and agent
command.py       the ssh command, and explanations of its failures
heartbeat.py     tells the agents every second that the launcher is alive
"""
