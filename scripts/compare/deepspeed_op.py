"""Let DeepSpeed compile what it needs on this machine: once, in one process, before any run with a time limit.

On a CPU that is an operator for shared memory: a minute of g++ or more, cached under ~/.cache/torch_extensions.
"""

import contextlib
import shlex
import sys
from pathlib import Path

import torch

from compare.launch import DEEPSPEED_SECONDS
from compare.rank import run_rank


def quote_library_path() -> None:
    """Make the linker find torch under a path with spaces: PyTorch quotes all other paths of the command, not this one.

    All ranks do it before they import DeepSpeed; a second call changes nothing.
    """
    from torch.utils import cpp_extension

    cpp_extension.TORCH_LIB_PATH = shlex.quote(str(Path(torch.__file__).parent / "lib"))


def compile_operator(device: torch.device) -> None:
    """Joining DeepSpeed's process group is what starts the compiler."""
    quote_library_path()
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed

        deepspeed.init_distributed()


if __name__ == "__main__":
    run_rank(compile_operator, DEEPSPEED_SECONDS)
