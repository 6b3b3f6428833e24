"""`shardwise scale`: measures a script on several numbers of workers, and draws the results."""
