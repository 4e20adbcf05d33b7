"""Schedules of DeepSpeed: deepspeed_schedules.json.

{"type", "params": the section's, "lr": the rates of AdamW's two groups, "lrs": their rates before the
scheduler's first step and after each, of OneCycle "beta1", "beta2": those of both groups, likewise}.

Run with torch and deepspeed 0.19.8: python3 deepspeed_cases.py. Not a part of generate.py, which needs no deepspeed.
"""

import torch
from deepspeed.runtime import lr_schedules

from golden_io import write_lines

GROUP_RATES = [0.1, 0.03]
CYCLE = {"cycle_min_lr": 0.003, "cycle_max_lr": 0.11}
CASES = [
    ("WarmupLR", 9, {"warmup_num_steps": 5}),
    ("WarmupLR", 9, {"warmup_min_lr": 0.013, "warmup_max_lr": 0.17, "warmup_num_steps": 7}),
    ("WarmupLR", 9, {"warmup_min_lr": 0.01, "warmup_num_steps": 6, "warmup_type": "linear"}),
    ("WarmupLR", 5, {"warmup_max_lr": 0.2, "warmup_num_steps": 1}),
    ("WarmupLR", 12, {}),
    ("WarmupDecayLR", 16, {"warmup_num_steps": 4, "total_num_steps": 13}),
    ("WarmupDecayLR", 16, {"warmup_min_lr": 0.02, "warmup_max_lr": 0.1, "warmup_num_steps": 3,
                           "warmup_type": "linear", "total_num_steps": 11}),
    ("WarmupDecayLR", 7, {"warmup_max_lr": 0.1, "warmup_num_steps": 4, "total_num_steps": 4}),
    ("WarmupDecayLR", 6, {"warmup_max_lr": 0.1, "warmup_num_steps": 1, "total_num_steps": 3}),
    ("WarmupCosineLR", 16, {"warmup_num_steps": 3, "total_num_steps": 9}),
    ("WarmupCosineLR", 18, {"warmup_min_ratio": 0.1, "warmup_num_steps": 5, "cos_min_ratio": 0.05,
                            "warmup_type": "linear", "total_num_steps": 14}),
    ("WarmupCosineLR", 8, {"warmup_min_ratio": 0.3, "warmup_num_steps": 4, "total_num_steps": 4}),
    ("LRRangeTest", 6, {}),
    ("LRRangeTest", 14, {"lr_range_test_min_lr": 0.002, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 1.7}),
    ("LRRangeTest", 14, {"lr_range_test_step_size": 3, "lr_range_test_step_rate": 5.0, "lr_range_test_staircase": True}),
    ("OneCycle", 6, CYCLE),
    ("OneCycle", 20, {**CYCLE, "cycle_first_step_size": 4, "cycle_second_step_size": 7, "decay_step_size": 2,
                      "decay_lr_rate": 0.5, "cycle_min_mom": 0.75, "cycle_max_mom": 0.95, "decay_mom_rate": 0.01}),
    ("OneCycle", 16, {**CYCLE, "cycle_first_step_size": 5, "decay_lr_rate": 0.5, "decay_mom_rate": 0.01}),
    ("OneCycle", 14, {**CYCLE, "cycle_first_step_size": 4, "cycle_second_step_size": 0, "decay_step_size": 3,
                      "decay_lr_rate": 1.0, "cycle_momentum": False}),
    ("OneCycle", 24, {**CYCLE, "cycle_first_step_size": 9, "cycle_first_stair_count": 3}),
    ("OneCycle", 24, {**CYCLE, "cycle_first_step_size": 6, "cycle_second_step_size": 10, "cycle_first_stair_count": 4,
                      "cycle_second_stair_count": 3, "decay_step_size": 4, "decay_lr_rate": 0.25}),
    ("OneCycle", 14, {**CYCLE, "cycle_first_step_size": 5, "cycle_first_stair_count": 0, "cycle_second_stair_count": 2}),
]


def write_all():
    records = []
    for kind, steps, params in CASES:
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in GROUP_RATES]
        optimizer = torch.optim.AdamW(groups)
        schedule = getattr(lr_schedules, kind)(optimizer, **params)
        lrs, betas = [], []
        for step in range(steps + 1):
            if step:
                optimizer.step()
                schedule.step()
            lrs.append([float(group["lr"]) for group in optimizer.param_groups])
            first, second = (group["betas"] for group in optimizer.param_groups)
            assert first == second
            betas.append(first)
        records.append({"type": kind, "params": params, "lr": GROUP_RATES, "lrs": lrs}
                       | ({"beta1": [b[0] for b in betas], "beta2": [b[1] for b in betas]}
                          if kind == "OneCycle" and params.get("cycle_momentum", True) else {}))
    write_lines("deepspeed_schedules.json", records)
    print(f"deepspeed: {len(records)} schedules")


if __name__ == "__main__":
    write_all()
