"""Mixture-of-experts layers, and expert parallelism: ranks hold different experts.

moe.py              the module `sw.MoE`: router, experts, shared expert; also runs on one process
routing.py          selects each token's experts and their gates
dispatch.py         sorts tokens by expert, and exchanges them between ranks
exact_experts.py    runs experts with the same bits on any number of ranks
token_share.py      divides tokens among the ranks of a tensor-parallel replica
router_losses.py    load-balancing loss and z-loss over the whole batch
expert_counts.py    counts the tokens that each expert processes in a step
routing_run.py      connects an engine to its layers: groups, seeds, stand-ins
fused_experts.py    Transformers' experts, which are tensors (E, ...); tested by a trial
compiled_experts.py layers and experts in the graphs of compiled units
planned_blocks.py   user-defined blocks named in `expert_plan`; tested by a trial
split_experts.py    assigns experts to ranks, gathers full models, restores the models
"""
