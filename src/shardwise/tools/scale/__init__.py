"""The command `shardwise scale`: measures a script's throughput with several worker counts."""
