"""ZeRO stages 1 to 3 built from scratch. What a chapter of the book builds has a name here, a module or a package:

    00  ranks figures  many processes, one notebook
    01  memory meter   where 16, 18 or 20 bytes per parameter go, and the activations
    02  replicate      data parallelism: everything on every rank
    03  memory         three stages as three lines of arithmetic, measured
    04  collectives    what ranks say to each other, and how many bytes that takes
    10  one_page       all of ZeRO-3 in one class, and what it leaves out
    11  sharding       flatten, pad, cut; the placeholder a model holds meanwhile
    12  gather         parameters arrive before they are used, and leave after
    13  reduce         gradients leave as shards, in one order on every rank
    14  optimizer      an Adam that owns 1/N of the state, and a norm that is everybody's
    15  zero           put together: three stages are two switches
    21  precision      compute and send in 16 bits, add up and remember in 32
    22  accumulation   several backwards before one step, and one division
    23  overlap        communication behind computation, and a timeline that shows it
    24  offload        the optimizer's states in host memory, or in a file
    25  checkpoint     each rank writes its shard; any number of ranks goes on from there
    26  config engine  one `ds_config.json` for both, every key accounted for
    31  models data    a GPT on real text: run it, and check it against DeepSpeed

A package is a chapter in several files: its docstring says what is in which, and it hands on the names that others use,
as in `from minizero.sharding import Layout`. Each imports only from its own chapter and earlier ones.
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
