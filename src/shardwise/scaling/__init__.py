"""`shardwise scale`: a script at several numbers of workers, measured and drawn."""
