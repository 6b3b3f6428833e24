"""The command `shardwise doctor`: checks each host, measures the network, and gives advice."""
