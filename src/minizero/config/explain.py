"""Chapter 26, config: a configuration explained key by key, and the bytes it leads to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from minizero.config.keys import DEEPSPEED, KEYS, Key
from minizero.config.read import is_comment, shown
from minizero.memory import model_states
from minizero.offload import Held, offloaded_states


def leaves(block: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any, Key | None]]:
    """(path, value, row of the table) of every key that is not a block; None for a key that nobody knows.

    A key inside of a block that is ignored has the block's row.
    """
    for name, value in block.items():
        around = KEYS.get(path.removesuffix("."))
        key = KEYS.get(f"{path}{name}") or (around if around is not None and around.fate == "ignored" else None)
        if key is not None and key.kind == "block" and isinstance(value, Mapping) and key.path == f"{path}{name}":
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value, key


def stage_of(content: Mapping[str, Any]) -> int:
    """The stage that a file asks for; 0 as well if what stands there is no stage."""
    zero = content.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    return int(stage) if isinstance(stage, int | float) and stage in range(4) else 0


def key_by_key(source: str, content: Mapping[str, Any]) -> str:
    """A line for each key of a configuration: what minizero and what DeepSpeed does with it in its stage."""
    stage = stage_of(content)
    rows = [("key", "value", "minizero", f"DeepSpeed {DEEPSPEED}, stage {stage}", "")]
    for path, value, key in leaves(content):
        whole = isinstance(value, float) and value.is_integer()
        text = shown(int(value) if whole else value, 24)
        if is_comment(path.rpartition(".")[2]):
            rows.append((path, text, "comment", "-", "no key"))
        elif key is None:
            rows.append((path, text, "refused", "-", "unknown key"))
        else:
            # what has a value that leaves it off asks for nothing
            fate = "off" if key.fate == "refused" and key.is_off(value) else key.fate
            fate = "refused" if key.path == "zero_optimization.stage" and stage == 0 else fate
            rows.append((path, text, fate, "reads it" if stage in key.stages else "ignores it", key.why))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"{source}", "", *lines])


def held_bytes(params: int, ranks: int, stage: int, dtype: torch.dtype, device: str) -> Held:
    """Bytes of model states that a rank keeps between backward and step, with Adam: on the device, in memory, in files.

    In 16 bits, stage 3 keeps the fp32 master alone, which is rounded when it is sent; stage 2 has the whole weights in
    16 bits beside it, and stage 1 the whole gradient as well.

    Args:
        params: Ψ in elements, with padding.
        ranks: N.
        stage: 1 to 3.
        dtype: of weights in forward and backward.
        device: "none", "cpu" or "nvme".
    """
    if device != "none":
        return offloaded_states(params, ranks, stage, dtype.itemsize, on_disk=device == "nvme")
    mixed = {1: "mixed", 2: "mixed-fp32-gradients", 3: "fp32"}
    precision = "fp32" if dtype == torch.float32 else mixed[stage]
    return Held(model_states(params, ranks, stage, precision).total, 0, 0)


def bytes_of(params: int, ranks: int, stage: int, dtype: torch.dtype, device: str) -> str:
    """`held_bytes` in words."""
    held = held_bytes(params, ranks, stage, dtype, device)
    places = {"on its device": held.device, "in host memory": held.host, "in files": held.disk}
    kept = ", ".join(f"{nbytes / 1e9:,.3f} GB {place}" for place, nbytes in places.items() if nbytes)
    return f"{params:,} parameters and Adam's states: each rank keeps {kept}"
