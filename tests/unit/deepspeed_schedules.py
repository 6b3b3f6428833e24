"""Writes the learning rates and betas of DeepSpeed's schedules, for a test that compares ours.

    python -m tests.unit.deepspeed_schedules

Requires deepspeed. The results are in deepspeed_schedules.json next to this file.
"""

import json
from pathlib import Path
from typing import Any

import torch

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_num_steps": 8}),
    ("WarmupLR", {"warmup_min_lr": 0.1, "warmup_max_lr": 0.2, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_min_lr": [0.1, 0.2], "warmup_max_lr": [1, 2], "warmup_num_steps": 1}),
    ("WarmupDecayLR", {"total_num_steps": 16, "warmup_num_steps": 5}),
    ("WarmupDecayLR", {"total_num_steps": 4, "warmup_num_steps": 9, "warmup_type": "linear"}),
    ("WarmupCosineLR", {"total_num_steps": 16, "warmup_num_steps": 5}),
    ("WarmupCosineLR", {"total_num_steps": 12, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.2}),
    (
        "WarmupCosineLR",
        {"total_num_steps": 14, "warmup_num_steps": 3, "warmup_type": "linear"},
    ),
    ("LRRangeTest", {"lr_range_test_step_size": 4}),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": [0.1, 0.2],
            "lr_range_test_step_size": 5,
            "lr_range_test_step_rate": 0.5,
            "lr_range_test_staircase": True,
        },
    ),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 6}),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 1.0,
            "cycle_first_step_size": 4,
            "cycle_second_step_size": 7,
            "decay_step_size": 3,
            "decay_lr_rate": 0.5,
            "decay_mom_rate": 0.1,
        },
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": [0.1, 0.3],
            "cycle_max_lr": [1.0, 2.0],
            "cycle_first_step_size": 6,
            "cycle_second_step_size": 9,
            "cycle_first_stair_count": 3,
            "cycle_second_stair_count": 2,
            "cycle_momentum": False,
        },
    ),
]
"""Schedules and their keywords."""


def rates(kind: Any, params: dict[str, Any]) -> list[list[float]]:
    """Rates and first betas of two groups, at the start and after each of 24 steps."""
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [weights[0]], "lr": 0.01}, {"params": [weights[1]], "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups)
    schedule = kind(optimizer, **params)
    found = []
    for _ in range(25):
        found.append([g["lr"] for g in optimizer.param_groups])
        found[-1] += [g["betas"][0] for g in optimizer.param_groups]
        schedule.step()
    return found


def main() -> None:
    """Write the figures."""
    import deepspeed
    from deepspeed.runtime import lr_schedules

    rows = [
        {"name": name, "params": params, "rates": rates(getattr(lr_schedules, name), params)}
        for name, params in VARIANTS
    ]
    head = {"command": "python -m tests.unit.deepspeed_schedules"}
    head["deepspeed"] = deepspeed.__version__
    lines = ",\n".join(json.dumps(row) for row in rows)
    path = Path(__file__).with_suffix(".json")
    path.write_text(f'{json.dumps(head)[:-1]}, "figures": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
