"""Implements mixture-of-experts layers, and expert parallelism: ranks hold different experts.

moe.py              the module `sw.MoE`: router, experts, shared expert; runs on one process too
routing.py          decides which experts a token uses, and with which gates
dispatch.py         sorts tokens by expert, and exchanges them between ranks
router_losses.py    load-balancing loss and z-loss of the whole batch
expert_counts.py    counts the tokens of each expert in a step
routing_run.py      the engine's side of its layers: groups, seeds, stand-ins
fused_experts.py    experts of Transformers, which are tensors (E, ...); a trial tests them
planned_blocks.py   a user's own blocks, which `expert_plan` names; a trial tests them
split_experts.py    gives each rank its experts, gathers full models, restores the models
"""
