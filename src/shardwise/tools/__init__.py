"""Commands that measure, predict or verify runs, such as `shardwise plan` and `verify`."""
