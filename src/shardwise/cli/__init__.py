"""The `shardwise` command. It starts without importing torch."""
