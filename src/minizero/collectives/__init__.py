"""Chapter 04, communication: what N ranks must say to each other, and how many bytes that takes.

`launch` joins the ranks, `exchange` has the collectives, `ledger` counts their bytes; `roll_call` makes sure that all
ranks mean the same. `transport` is the seam at which other ways and other forms of sending come in, and `world` the
ranks as the chapters that follow know them.
"""

from typing import TYPE_CHECKING

from minizero._face import face

if TYPE_CHECKING:
    from minizero.collectives.exchange import ALL_GATHER_TAG as ALL_GATHER_TAG
    from minizero.collectives.exchange import ALL_TO_ALL_TAG as ALL_TO_ALL_TAG
    from minizero.collectives.exchange import ROLL_CALL_TAG as ROLL_CALL_TAG
    from minizero.collectives.exchange import Exchange as Exchange
    from minizero.collectives.exchange import ReduceScatter as ReduceScatter
    from minizero.collectives.exchange import launch_all_gather as launch_all_gather
    from minizero.collectives.exchange import launch_all_to_all as launch_all_to_all
    from minizero.collectives.exchange import on_all_ranks as on_all_ranks
    from minizero.collectives.exchange import over_ranks as over_ranks
    from minizero.collectives.exchange import ring_all_gather as ring_all_gather
    from minizero.collectives.exchange import ring_all_reduce as ring_all_reduce
    from minizero.collectives.exchange import ring_reduce_scatter as ring_reduce_scatter
    from minizero.collectives.exchange import timeout_of as timeout_of
    from minizero.collectives.launch import LaunchError as LaunchError
    from minizero.collectives.launch import Place as Place
    from minizero.collectives.launch import find_place as find_place
    from minizero.collectives.launch import init_distributed as init_distributed
    from minizero.collectives.ledger import Ledger as Ledger
    from minizero.collectives.ledger import ring_bytes as ring_bytes
    from minizero.collectives.ledger import ring_seconds as ring_seconds
    from minizero.collectives.roll_call import RollCall as RollCall
    from minizero.collectives.transport import Encoded as Encoded
    from minizero.collectives.transport import Format as Format
    from minizero.collectives.transport import TorchTransport as TorchTransport
    from minizero.collectives.transport import Transport as Transport
    from minizero.collectives.transport import companion as companion
    from minizero.collectives.world import World as World
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "exchange": (
                "ALL_GATHER_TAG ALL_TO_ALL_TAG Exchange ROLL_CALL_TAG ReduceScatter launch_all_gather "
                "launch_all_to_all on_all_ranks over_ranks ring_all_gather ring_all_reduce ring_reduce_scatter "
                "timeout_of"
            ),
            "launch": "LaunchError Place find_place init_distributed",
            "ledger": "Ledger ring_bytes ring_seconds",
            "roll_call": "RollCall",
            "transport": "Encoded Format TorchTransport Transport companion",
            "world": "World",
        },
    )
