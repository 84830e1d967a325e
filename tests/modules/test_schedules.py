"""config/schedules.py: the rate of every optimizer step is the one DeepSpeed's schedule of that name gives it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from minizero.config import Named, scheduler_class

pytestmark = pytest.mark.ch26
STEPS = 14
THEIRS = """
import json
import sys

import torch
from deepspeed.runtime import lr_schedules

cases, rates = json.load(open(sys.argv[1])), []
for name, options in cases:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.5, 0.25)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    schedule = getattr(lr_schedules, name)(optimizer, **options)
    rates.append([])
    for _ in range(int(sys.argv[3])):
        rates[-1].append([group["lr"] for group in optimizer.param_groups])  # what this step is taken with
        optimizer.step()
        schedule.step()
json.dump(rates, open(sys.argv[2], "w"))
"""


def cases() -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = [("WarmupLR", {}), ("WarmupLR", {"warmup_max_lr": 0.1})]
    for kind, steps in itertools.product(("log", "linear"), (1, 2, 5)):
        warmup = {"warmup_type": kind, "warmup_num_steps": steps}
        rates = {"warmup_min_lr": 0.01, "warmup_max_lr": 0.3}
        found += [("WarmupLR", warmup | rates), ("WarmupLR", warmup | {"warmup_min_lr": [0.01, 0.02]})]
        for total in (3, 8, 12):
            found.append(("WarmupDecayLR", warmup | rates | {"total_num_steps": total}))
            found.append(("WarmupCosineLR", warmup | {"warmup_min_ratio": 0.1, "total_num_steps": total}))
            found.append(("WarmupCosineLR", warmup | {"cos_min_ratio": 0.2, "total_num_steps": total}))
    return found


def test_every_step_has_the_rate_that_deepspeed_gives_it(tmp_path: Path) -> None:
    given, answers = tmp_path / "cases.json", tmp_path / "rates.json"
    given.write_text(json.dumps(cases()))
    environment = {"DS_ACCELERATOR": "cpu", "DEEPSPEED_LOG_LEVEL": "error", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", THEIRS, str(given), str(answers), str(STEPS)]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    for (name, options), theirs in zip(cases(), json.loads(answers.read_text()), strict=True):
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.5, 0.25)]
        optimizer = torch.optim.SGD(groups, lr=1.0)
        schedule = scheduler_class(Named(type=name))(optimizer, **options)
        ours = []
        for _ in range(STEPS):
            ours.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            schedule.step()
        torch.testing.assert_close(
            torch.tensor(ours), torch.tensor(theirs), rtol=1e-12, atol=1e-15, msg=f"{name} {options}"
        )


def test_a_schedule_saved_and_loaded_goes_on_where_it_was() -> None:
    def build() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        return optimizer, scheduler_class(Named(type="WarmupLR"))(optimizer, warmup_num_steps=4)

    def run(optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return rates

    whole = run(*build(), steps=6)
    first, again = build(), build()
    begun = run(*first, steps=2)
    again[0].load_state_dict(first[0].state_dict())
    again[1].load_state_dict(first[1].state_dict())
    assert begun + run(*again, steps=4) == whole


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"warmup_num_steps": 0}, "warmup_num_steps must be a positive integer, got 0"),
        ({"warmup_type": "cubic"}, "warmup_type must be 'log' or 'linear'"),
        ({"warmup_min_lr": [0.1, 0.1]}, "warmup_min_lr must be a number or 1 numbers"),
        ({"last_batch_iteration": 3}, "last_batch_iteration: load a checkpoint"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], complaint: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match=complaint):
        scheduler_class(Named(type="WarmupLR"))(optimizer, **options)
