"""What a rank of parity.py or bench.py does around its work: a clean start, a clean end."""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist

from minizero import GPT, GPTConfig, init_distributed


def run_rank(work: Callable[[torch.device], None], timeout: float) -> None:
    """Join the group, do `work(device)`, and leave: exit code 0, or a traceback and 1. Does not return.

    A rank still here after `timeout` seconds prints where it stands; one collective may wait a third of that. The exit
    is a hard one because gloo's and DeepSpeed's threads can abort an interpreter that shuts down in the usual way.
    """
    faulthandler.dump_traceback_later(timeout, exit=True)
    code = 1
    try:
        device = init_distributed(timeout / 3)
        os.environ.setdefault("DS_ACCELERATOR", device.type)  # before anyone imports deepspeed
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
        work(device)
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def build_model(config: GPTConfig, dtype: torch.dtype, device: torch.device) -> GPT:
    """The same weights on every rank and in every run: drawn from seed 0 in fp32 on the CPU, then cast and moved."""
    torch.manual_seed(0)
    return GPT(config).to(dtype).to(device)
