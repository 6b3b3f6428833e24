"""The command `shardwise pipeline-plan`: times layers, and assigns them to pipeline stages."""
