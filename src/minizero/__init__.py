"""ZeRO stages 1 to 3 built from scratch, one module per chapter of the book.

Names are looked up when they are first used: a notebook that only starts ranks does not wait for torch.
"""

from typing import TYPE_CHECKING

from minizero._face import face

if TYPE_CHECKING:
    from minizero.collectives import Ledger as Ledger
    from minizero.collectives import init_distributed as init_distributed
    from minizero.engine import initialize as initialize
    from minizero.models import GPT as GPT
    from minizero.models import GPTConfig as GPTConfig
    from minizero.optimizer import Adam as Adam
    from minizero.optimizer import AdamW as AdamW
    from minizero.optimizer import NonFiniteGradientError as NonFiniteGradientError
    from minizero.replicate import Replicated as Replicated
    from minizero.sharding import ShardedAccessError as ShardedAccessError
    from minizero.zero import Zero as Zero
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "models": "GPT GPTConfig",
            "optimizer": "Adam AdamW NonFiniteGradientError",
            "collectives": "Ledger init_distributed",
            "replicate": "Replicated",
            "sharding": "ShardedAccessError",
            "zero": "Zero",
            "engine": "initialize",
        },
    )
