"""Let DeepSpeed compile what it needs on this machine: once, in one process, before any run with a time limit.

On a CPU that is an operator for shared memory: a minute of g++ or more, cached under ~/.cache/torch_extensions.
"""

import contextlib
import sys

import torch
from _launch import DEEPSPEED_SECONDS
from _rank import run_rank


def compile_operator(device: torch.device) -> None:
    """Joining DeepSpeed's process group is what starts the compiler."""
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed

        deepspeed.init_distributed()


if __name__ == "__main__":
    run_rank(compile_operator, DEEPSPEED_SECONDS)
