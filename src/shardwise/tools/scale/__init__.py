"""The command `shardwise scale`: measures a script on several numbers of workers."""
