"""Chapter 13, reduce: buffers that are used again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Spares:
    """Buffers that one unit's reduction has left and the next one's can use, instead of asking for new memory.

    A reduction needs two. When more come back, as from units that all waited for the step, those are freed at once.
    `clear()` at the end returns the rest: between steps nothing is kept.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def take(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor like `like`, of its own dtype or another; its values are whatever was in it."""
        buffers = self._buffers.get((like.shape, dtype or like.dtype))
        return buffers.pop() if buffers else torch.empty_like(like, dtype=dtype)

    def give(self, buffers: Sequence[Tensor]) -> None:
        """Keep `buffers` for the next `take`; nobody reads them any more."""
        for buffer in buffers:
            kept = self._buffers.setdefault((buffer.shape, buffer.dtype), [])
            if len(kept) < 2:
                kept.append(buffer)

    def clear(self) -> None:
        """Free all of them."""
        self._buffers.clear()
