"""Chapter 24, offload: what stays on the device and what does not, and the way between, while the GPU computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import Variable

from minizero.gather import in_backward
from minizero.memory import shard_elements
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


def bus_bytes(params: int, ranks: int, weight: int = 2, gradient: int = 4, micro_batches: int = 1) -> int:
    """Bytes between one rank's GPU and the host's memory in one step.

    Down goes a gradient for each micro-batch, up the new weights, once. With gradients of 2 bytes these are the 4M of
    ZeRO-Offload (Ren et al. 2021, section 3.3), whose proof is that no other cut of the step moves less.

    Args:
        params: Ψ in elements, with padding.
        ranks: N.
        weight: bytes of a weight in forward and backward.
        gradient: bytes of an element of the reduced gradient, in which it travels; here 4.
        micro_batches: backwards in one step.
    """
    return (micro_batches * gradient + weight) * shard_elements(params, ranks)


@dataclass(frozen=True)
class Held:
    """Bytes of model states that one rank keeps, by where they are."""

    device: int
    host: int
    disk: int


def offloaded_states(params: int, ranks: int, stage: int, weight: int = 2, on_disk: bool = False) -> Held:
    """Bytes that `params` parameters keep between backward and step, on each of `ranks` ranks.

    The device keeps the weights it computes with and gathers, all of them in stages 1 and 2. Gradients have gone down
    to the host, this rank's share in 4 bytes each; stage 1, which reduces at the step, has them all on the device yet.
    Master weights of 4 bytes and Adam's states of 8 are in the host's memory or, `on_disk`, in the file.

    Args:
        params: Ψ in elements, with padding.
        ranks: N.
        stage: 1 to 3.
        weight: bytes of a weight in forward and backward.
        on_disk: whether a directory is given.
    """
    share = shard_elements(params, ranks)
    device = weight * (share if stage == 3 else params) + weight * (params if stage == 1 else 0)
    gradients, waiting = 4 * share if stage > 1 else 0, (4 + 8) * share
    return Held(device, gradients, waiting) if on_disk else Held(device, gradients + waiting, 0)
