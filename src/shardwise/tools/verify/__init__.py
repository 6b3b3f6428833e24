"""`shardwise verify`: whether a script trains the same under a placement as in one process."""
