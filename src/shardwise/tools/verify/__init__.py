"""The command `shardwise verify`: compares a script's training with its single-process run."""
