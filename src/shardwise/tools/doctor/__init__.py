"""`shardwise doctor`: checks each host, measures the network, and says what to mend."""
