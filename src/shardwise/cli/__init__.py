"""Implements the `shardwise` command, which starts without importing torch."""
