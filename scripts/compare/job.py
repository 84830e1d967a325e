"""What parity.py asks of the ranks of one run: a method, and sizes. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

# The ZeRO stage each method amounts to.
STAGES = {"ddp": 0, "fsdp2": 3, "deepspeed1": 1, "deepspeed2": 2, "deepspeed3": 3}
STAGES |= {f"minizero{stage}": stage for stage in (0, 1, 2, 3)}
SHARDED = [method for method, stage in STAGES.items() if stage > 0]
STAGES |= {f"{method}-{kind}": STAGES[method] for kind in ("bf16", "acc4") for method in SHARDED}
STAGES |= {"deepspeed3-offload": 3, "minizero3-offload": 3}
STAGES["minizero3-resume"] = 3  # after a first step in stage 1, from its checkpoint
METHODS = list(STAGES)


@dataclass
class Job:
    """What a run trains, and where rank 0 leaves the result. Methods "one…" write `reference`, the others read it."""

    method: str
    width: int
    layers: int
    context: int
    batch: int
    steps: int
    timeout: float
    count_loopback: bool
    reference: str
    result: str
    ranks: list[int]  # all numbers of ranks that are compared, for the one process
