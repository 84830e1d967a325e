"""ZeRO stages 1 to 3 built from scratch, one module per chapter of the book."""

from minizero.collectives import init_distributed
from minizero.ledger import Ledger
from minizero.models import GPT, GPTConfig
from minizero.optimizer import Adam, AdamW, NonFiniteGradientError
from minizero.sharding import ShardedAccessError
from minizero.zero import Zero

__all__ = [
    "GPT",
    "Adam",
    "AdamW",
    "GPTConfig",
    "Ledger",
    "NonFiniteGradientError",
    "ShardedAccessError",
    "Zero",
    "init_distributed",
]
