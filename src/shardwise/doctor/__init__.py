"""`shardwise doctor`: what each host has, how fast ranks talk, what is wrong and how to mend it."""
