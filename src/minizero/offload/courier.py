"""Chapter 24, offload: what stays on the device and what does not, and the way between, while the GPU computes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Variable

from minizero.gather import in_backward
from minizero.sharding import FlatParameters


class Courier:
    """Copies between a GPU and the host's memory on a stream of its own, while the GPU computes.

    Host memory that is copied is pinned, so that the CPU need not wait for the copy. PyTorch hands pinned memory out
    again when the copies that use it are done.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def bring_down(self, flat: FlatParameters, gradient: Tensor) -> None:
        """`flat.add_gradient` for slices in host memory. At the end of backward the gradients are there."""
        gradient = gradient.to(flat.master.dtype)
        arriving = pinned_like(gradient)
        self.copy(arriving, gradient)
        if any(piece.grad is not None for piece in flat.slices):
            self.wait()  # the CPU adds, so both have to be there
        FlatParameters.add_gradient(flat, arriving)
        if in_backward():
            Variable._execution_engine.queue_callback(self.wait)
        else:
            self.wait()

    def send_up(self, flat: FlatParameters) -> None:
        """`flat.refresh` for a master in host memory: round it to the weights' dtype, and send that."""
        leaving = pinned_like(flat.shard)
        leaving.copy_(flat.master)
        self.copy(flat.shard, leaving)
        self.join()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Begin when what the GPU has been given before is done: it makes the gradients, and reads the old weights."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        if source.is_cuda:
            source.record_stream(self._stream)  # whoever frees it, its memory is not given out before

    def wait(self) -> None:
        """Until everything has arrived."""
        self._stream.synchronize()

    def join(self) -> None:
        """What the GPU is given from here on sees what was sent up; the CPU goes on."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def pinned_like(tensor: Tensor) -> Tensor:
    """A tensor like `tensor` in host memory, pinned where there is a GPU, which then copies without the CPU."""
    return torch.empty_like(tensor, device="cpu", pin_memory=torch.cuda.is_available())
