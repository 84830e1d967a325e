"""Chapter 24, offload: what it takes, on paper: bytes in each kind of memory, over the bus and on the disk."""

from __future__ import annotations

from dataclasses import dataclass

from minizero.memory import shard_elements


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


def disk_bytes(params: int, ranks: int) -> int:
    """Bytes that one rank reads from its file in one step, and writes to it: master weights and Adam's states."""
    return (4 + 8) * shard_elements(params, ranks)
