"""The command `shardwise pipeline-plan`: times layers, and divides a model into stages."""
