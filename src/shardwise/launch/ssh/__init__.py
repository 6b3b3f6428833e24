"""Starts a run on several hosts over ssh. An agent on each host starts and watches its ranks.

many_hosts.py    runs the launcher's part: starts all agents, then the ranks
agents.py        starts an agent on each host, and waits until all are ready
remote_host.py   connects the launcher to the agent on one host
agent.py         implements the agent, which ssh starts on each host
protocol.py      encodes and checks the messages between launcher and agents
command.py       builds the ssh command, and explains why it failed
heartbeat.py     sends the agents a byte every second while the launcher exists
"""
