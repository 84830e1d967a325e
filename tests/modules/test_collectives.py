"""collectives/exchange.py: the rings against torch's own collectives, and the true reduce-scatter."""

import os

import pytest
import torch
import torch.distributed as dist
from harness import RankFailure, run_ranks

from minizero.collectives import (
    ReduceScatter,
    init_distributed,
    launch_all_gather,
    over_ranks,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    timeout_of,
)

pytestmark = pytest.mark.ch04


def _rings() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    for numel in (0, 1, 3, 8):
        shard = torch.randn(numel, generator=generator, dtype=torch.float64)
        full, expected = torch.empty(numel * world).double(), torch.empty(numel * world).double()
        ring_all_gather(full, shard)
        dist.all_gather(list(expected.chunk(world)) if numel else [shard] * world, shard)
        assert torch.equal(full, expected)

        gradient = torch.randn(numel * world, generator=generator, dtype=torch.float64)
        kept, total = gradient.clone(), gradient.clone()
        dist.all_reduce(total)
        part = torch.empty(numel).double()
        ring_reduce_scatter(part, gradient)
        torch.testing.assert_close(part, total[rank * numel : (rank + 1) * numel], rtol=0, atol=1e-14)
        assert torch.equal(gradient, kept)
        torch.testing.assert_close(ReduceScatter(gradient).land(), part, rtol=0, atol=1e-14)

    for shape in ((), (1,), (2, 3), (7,)):  # lengths that the ranks do not divide, and fewer elements than ranks
        tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
        total = tensor.clone()
        dist.all_reduce(total)
        ring_all_reduce(tensor)
        torch.testing.assert_close(tensor, total, rtol=0, atol=1e-14)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_rings_equal_the_backend(world: int) -> None:
    run_ranks(world, _rings)


def _all_gathers() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool):
        for numel in (0, 1, 5, 100_000):
            expected = (torch.arange(numel * world) % 7).to(dtype)
            mine = expected[rank * numel : (rank + 1) * numel]
            full, places = torch.zeros(numel * world, dtype=dtype), torch.zeros(numel * world, dtype=dtype)
            inside = places[rank * numel : (rank + 1) * numel].copy_(mine)
            first = launch_all_gather(full, mine)  # two at once: messages keep their order
            second = launch_all_gather(places, inside)
            second.wait()
            first.wait()
            first.wait()
            assert torch.equal(full, expected)
            assert torch.equal(places, expected)
    precise = torch.arange(3 * world) / 3  # rounded on its way
    rounded = torch.zeros(3 * world, dtype=torch.bfloat16)
    launch_all_gather(rounded, precise[3 * rank : 3 * rank + 3]).wait()
    assert torch.equal(rounded, precise.bfloat16())
    with pytest.raises(ValueError, match="full must be 1-D"):
        launch_all_gather(torch.empty(world + 1), torch.empty(1))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_all_gather_puts_every_shard_in_its_place(world: int) -> None:
    run_ranks(world, _all_gathers)


def _ring_shapes() -> None:
    with pytest.raises(ValueError, match=r"full \(5,\), shard \(2,\), 2 ranks"):
        ring_all_gather(torch.empty(5), torch.empty(2))
    with pytest.raises(ValueError, match="full must be 1-D"):
        ring_reduce_scatter(torch.empty(2), torch.empty(2, 2))


def test_rings_refuse_shapes_that_do_not_fit() -> None:
    run_ranks(2, _ring_shapes)


def _low_precision() -> list[float]:
    # 1 + 3 * 2**-8: each addend alone is lost in bf16, whose steps above 1 are 2**-7
    values = {0: 1.0, 1: 2.0**-8, 2: 2.0**-8, 3: 2.0**-8}
    full = torch.full((4,), values[dist.get_rank()], dtype=torch.bfloat16)
    total = ReduceScatter(full).land()
    assert total.dtype == torch.float32
    return total.tolist()


def test_reduce_scatter_sums_bfloat16_in_fp32() -> None:
    assert run_ranks(4, _low_precision) == [[1.0 + 3 * 2.0**-8]] * 4


def _timeout() -> float:
    return timeout_of(None).total_seconds()


def test_roll_call_waits_as_long_as_the_group() -> None:
    assert run_ranks(2, _timeout, group_timeout=17.0) == [17.0, 17.0]


def _means_and_maxima() -> list[list[float]]:
    cpu, rank = torch.device("cpu"), float(dist.get_rank())
    return [over_ranks("mean", [rank, 5.0], cpu), over_ranks("max", [rank, -rank], cpu), over_ranks("mean", [], cpu)]


def test_values_over_ranks_are_the_same_list_on_all() -> None:
    assert run_ranks(4, _means_and_maxima) == [[[1.5, 5.0], [3.0, 0.0], []]] * 4


def _alone() -> tuple[str, int, str]:
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    device = init_distributed(timeout=5)
    assert init_distributed() == device  # a second call keeps the group
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds, got 0"):
        init_distributed(timeout=0)
    return str(device), dist.get_world_size(), timeout_of(None).total_seconds()


def test_init_distributed_without_a_launcher_is_a_group_of_one() -> None:
    device, world, timeout = run_ranks(1, _alone)[0]
    assert (world, timeout) == (1, 5.0)
    assert device == ("cuda:0" if torch.cuda.is_available() else "cpu")


def _raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the root cause")
    dist.barrier()


def test_harness_shows_the_first_failure() -> None:
    with pytest.raises(RankFailure, match="the root cause") as failure:
        run_ranks(2, _raise_on_rank_1, timeout=30)
    assert failure.value.ranks[0] == 1
