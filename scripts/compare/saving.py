"""Checkpoints of three libraries behind the same two verbs, and how long they take.

minizero's and torch's are on the disk (fsync) when `save` returns, DeepSpeed's in the system's memory. minizero takes a
checksum of all it writes, and looks at it before it reads; the others do not.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compare.methods import FSDP2, DeepSpeed, Method, MiniZero, remove_shared, shared_folder
from minizero import checkpoint
from minizero.collectives import over_ranks

SAVED = ("fsdp2", "deepspeed3", "minizero3")  # sharded parameters and states: what the others keep whole is no match


def save(method: Method, folder: Path, tag: str) -> None:
    """Write parameters and optimizer states, sharded, as the library's own manual says."""
    if isinstance(method, MiniZero):
        checkpoint.save(folder, tag, method.zero, method.optimizer, step=0)
    elif isinstance(method, DeepSpeed):
        with contextlib.redirect_stdout(sys.stderr):
            method.network.save_checkpoint(str(folder), tag=tag)
    else:
        import torch.distributed.checkpoint as dcp

        dcp.save(_state(method), checkpoint_id=folder / tag)  # type: ignore[attr-defined]  # torch hands it on unsaid


def load(method: Method, folder: Path, tag: str) -> None:
    """Read them again, into the same number of ranks."""
    if isinstance(method, MiniZero):
        checkpoint.load(folder, method.zero, method.optimizer, tag=tag)
    elif isinstance(method, DeepSpeed):
        with contextlib.redirect_stdout(sys.stderr):
            path, _ = method.network.load_checkpoint(str(folder), tag=tag)
        if path is None:
            raise RuntimeError(f"DeepSpeed did not load {folder / tag}")
    else:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = _state(method)
        dcp.load(state, checkpoint_id=folder / tag)  # type: ignore[attr-defined]
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(method.network, method.optimizer, **parts)


def _state(method: Method) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    assert isinstance(method, FSDP2)
    model, optimizer = get_state_dict(method.network, method.optimizer)
    return {"model": model, "optimizer": optimizer}


def stall(method: MiniZero, folder: Path, tag: str) -> float:
    """Seconds that a save in the background keeps this rank from training; waits for the end of it."""
    with checkpoint.AsyncSaver(folder) as saver:
        return timed(lambda: saver.save(tag, method.zero, method.optimizer, step=0))


def timed(action: Callable[[], None]) -> float:
    """Seconds from a moment when all ranks are here."""
    dist.barrier()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def time_saving(methods: dict[str, Method], rounds: int, device: torch.device) -> dict[str, Tensor]:
    """Seconds of the slowest rank, (rounds,) each, for "save NAME", "load NAME" and, of minizero, "stall NAME".

    The methods take turns, in an order that rotates, and each round's files are removed before the next: what is read
    is in the system's memory still, for all of them. Raises if a load does not bring back what was saved.
    """
    seconds: dict[str, list[float]] = {}
    for index in range(rounds + 1):  # the first one is not timed
        for turn in range(len(methods)):
            name = list(methods)[(index + turn) % len(methods)]
            method, folder = methods[name], shared_folder()
            before = {key: value.clone() for key, value in method.full_parameters().items()}
            took = {"save": timed(lambda m=method, f=folder: save(m, f, "one"))}  # type: ignore[misc]
            took["load"] = timed(lambda m=method, f=folder: load(m, f, "one"))  # type: ignore[misc]
            if isinstance(method, MiniZero):
                took["stall"] = stall(method, folder, "two")
            after = method.full_parameters()
            if not all(torch.equal(after[key], value) for key, value in before.items()):
                raise RuntimeError(f"{name} did not load what it had saved")
            for what, value in took.items():
                seconds.setdefault(f"{what} {name}", []).append(value)
            remove_shared(folder)
    return {name: torch.tensor(over_ranks("max", took, device))[1:] for name, took in seconds.items()}
