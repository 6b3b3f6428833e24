"""`shardwise pipeline-plan`: times layers, and shows where to cut a model into pipeline stages."""
