"""The command `shardwise verify`: compares a distributed run of a script with a run on one rank."""
