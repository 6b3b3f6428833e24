"""The commands that measure, predict and prove: verify, plan, simulate, scale, doctor, timeline."""
