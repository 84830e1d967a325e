"""Chapter 12, gather: what backward still needs of a unit."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Use:
    """What a unit is still needed for; a new one for each unit when a backward is over, or will not go on."""

    calls: int = 0  # in forwards that have a graph
    calls_in_backward: set[object] = field(default_factory=set)  # of these, whose inputs' gradients are still to come
    awaits_gradients: bool = False  # backward has reached the unit and not yet left it with all its gradients
    has_all_gradients: bool = False  # it has left with them, at least once
    is_recomputed: bool = False  # a call had no graph of its own: reentrant checkpointing
    is_in_parts: bool = False  # parts of it are recomputed so: each brings gradients, all parameters stay to the end

    @property
    def in_backward(self) -> bool:
        """Whether backward has reached the unit and can still need its parameters."""
        return self.awaits_gradients or bool(self.calls_in_backward)


def in_backward() -> bool:
    """Whether autograd's backward is running in this thread."""
    return torch._C._current_graph_task_id() != -1
