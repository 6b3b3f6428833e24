"""`shardwise split`: where to cut a model into stages, from what its layers take."""
