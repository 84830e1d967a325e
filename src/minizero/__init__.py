"""ZeRO stages 1 to 3 built from scratch, one module per chapter of the book.

Names are looked up when they are first used: a notebook that only starts ranks does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minizero.build import initialize
    from minizero.launch import init_distributed
    from minizero.ledger import Ledger
    from minizero.models import GPT, GPTConfig
    from minizero.optimizer import Adam, AdamW, NonFiniteGradientError
    from minizero.placeholder import ShardedAccessError
    from minizero.replicate import Replicated
    from minizero.zero import Zero

_MODULES = {
    "GPT": "models",
    "GPTConfig": "models",
    "Adam": "optimizer",
    "AdamW": "optimizer",
    "Ledger": "ledger",
    "NonFiniteGradientError": "optimizer",
    "Replicated": "replicate",
    "ShardedAccessError": "placeholder",
    "Zero": "zero",
    "init_distributed": "launch",
    "initialize": "build",
}
__all__ = [
    "GPT",
    "Adam",
    "AdamW",
    "GPTConfig",
    "Ledger",
    "NonFiniteGradientError",
    "Replicated",
    "ShardedAccessError",
    "Zero",
    "init_distributed",
    "initialize",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'minizero' has no attribute {name!r}")
    return getattr(import_module(f"minizero.{_MODULES[name]}"), name)
