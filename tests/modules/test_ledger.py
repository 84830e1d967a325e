"""collectives/ledger.py: what the ledger books against the textbook, and that it hears everybody."""

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from minizero.collectives import Ledger, ReduceScatter, launch_all_gather, ring_all_reduce, ring_bytes, ring_seconds

pytestmark = pytest.mark.ch04


def _book() -> dict[str, int]:
    world, rank = dist.get_world_size(), dist.get_rank()
    shard, full = torch.ones(6), torch.ones(6 * world)
    dist.all_reduce(full)  # not in a ledger
    with Ledger() as ledger:
        launch_all_gather(torch.empty(6 * world), shard).wait()
        dist.all_gather([torch.empty(6) for _ in range(world)], shard)
        ReduceScatter(full).land()
        dist.reduce_scatter(torch.empty(6), list(full.chunk(world)))
        dist.all_reduce(full)
        dist.broadcast(full, 0)
        dist.barrier()
        ring_all_reduce(full)
        if world > 1:
            dist.send(shard, (rank + 1) % world) if rank % 2 == 0 else dist.recv(shard, (rank - 1) % world)
    dist.all_reduce(full)
    assert ledger.total == sum(ledger.sent.values())
    return dict(ledger.sent)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ledger_books_each_collective(world: int) -> None:
    full = 6 * world * 4 * (world - 1) // world  # bytes of one round over 6 * world floats
    for rank, sent in enumerate(run_ranks(world, _book)):
        expected = {
            "all_gather": 2 * full,
            "reduce_scatter": 2 * full,  # gloo's own: an all-reduce and a slice
            "all_reduce": 2 * full,
            "broadcast": full,
        }
        if world > 1:
            expected["all_to_all"] = full  # minizero's reduce-scatter on gloo: messages, so none to oneself
            expected["send"] = 2 * full + (24 if rank % 2 == 0 else 0)
        assert sent == expected


def _others() -> tuple[int, int, int]:
    model = nn.Linear(8, 8, bias=False)
    replica = nn.parallel.DistributedDataParallel(model)
    with Ledger() as ledger:
        replica(torch.ones(2, 8)).sum().backward()
    with Ledger() as silent:
        model(torch.ones(2, 8)).sum()
    gathered = [None] * dist.get_world_size()
    with Ledger() as objects:
        dist.all_gather_object(gathered, "a" * 1000)
    return ledger.sent["all_reduce"], silent.total, objects.total


def test_ledger_hears_ddp_and_objects() -> None:
    for reduced, silent, objects in run_ranks(2, _others):
        assert reduced == 2 * 64 * 4 // 2
        assert silent == 0
        assert objects > 1000


def _unknown() -> None:
    with Ledger(), pytest.raises(NotImplementedError, match="gather_"):
        dist.gather(torch.ones(1), [torch.ones(1) for _ in range(2)] if dist.get_rank() == 0 else None)


def test_ledger_raises_for_what_it_does_not_know() -> None:
    run_ranks(2, _unknown)


@given(st.integers(1, 10**12), st.integers(1, 4096))
def test_ring_formulas(nbytes: int, world: int) -> None:
    once = nbytes * Fraction(world - 1, world)
    assert ring_bytes("all_gather", nbytes, world) == pytest.approx(float(once), rel=1e-12)
    assert ring_bytes("all_reduce", nbytes, world) == pytest.approx(float(2 * once), rel=1e-12)
    # alpha alone counts messages, beta alone counts bytes
    assert ring_seconds("all_reduce", nbytes, world, alpha=1.0, beta=0.0) == pytest.approx(2 * (world - 1))
    assert ring_seconds("all_gather", nbytes, world, alpha=0.0, beta=2.0) == pytest.approx(float(2 * once))


def test_ring_formulas_refuse_other_kinds() -> None:
    with pytest.raises(ValueError, match=r"kind must be one of .* got 'gossip'"):
        ring_bytes("gossip", 1, 2)
