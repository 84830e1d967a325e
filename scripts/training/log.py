"""What a run says while it trains. On rank 0; nothing on other ranks."""

from __future__ import annotations

import csv
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm


def say(text: str) -> None:
    """A line on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


class Log:
    """A progress bar, and a row for each step in `file`, written at once. Of a file that is there, `done` rows stay."""

    columns = ("step", "loss", "gradient_norm", "learning_rate", "tokens_per_second", "peak_memory_mib")

    def __init__(self, file: Path, steps: int, done: int) -> None:
        is_first = dist.get_rank() == 0
        self._bar = tqdm(total=steps, initial=done, unit="step", disable=not is_first)
        rows = file.read_text().splitlines()[1 : done + 1] if is_first and done and file.exists() else []
        self._file = file.open("w", newline="") if is_first else None
        if self._file:
            self._file.write("\r\n".join([",".join(self.columns), *rows, ""]))

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *failure: object) -> None:
        self._bar.close()
        if self._file:
            self._file.close()

    def add(self, step: int, loss: float, norm: float, lr: float, speed: float, memory: float) -> None:
        """A step, from 1: the mean loss over the ranks, the gradient's norm, tokens a second of all, MiB of rank 0."""
        self._bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s, peak {memory:,.0f} MiB", refresh=False)
        self._bar.update()
        if self._file:
            csv.writer(self._file).writerow([step, loss, norm, lr, round(speed), round(memory, 1)])
            self._file.flush()


def peak_mib(device: torch.device) -> float:
    """This rank's highest memory so far: what CUDA's allocator gave out, or all of the process on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit / 2**20
