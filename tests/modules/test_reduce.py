"""reduce/: buckets that are zero where nothing was collected, one order on every rank, buffers used again."""

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn

import minizero
from minizero.collectives import Ledger, World
from minizero.reduce import Bucket, Spares
from minizero.sharding import FlatParameters, holders_of

pytestmark = pytest.mark.ch13


def _bucket() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    layer = nn.Linear(2, 2)  # 4 + 2 elements; on 4 ranks 8 with padding
    flat = FlatParameters(holders_of(layer), rank, world, aliased=False)
    spares = Spares()
    spares.give([torch.full((8,), torch.nan)])  # what an earlier unit left
    bucket = Bucket(flat, World(), spares)
    layer.weight.grad = torch.full((2, 2), float(rank))
    bucket.collect(0)
    bucket.collect(1)  # the bias has no gradient: nothing happens
    assert layer.weight.grad is None
    assert bucket.missing == {1}
    layer.weight.grad = torch.ones(2, 2)
    bucket.collect(0)  # a second gradient in the same pass adds up
    bucket.launch()
    assert not bucket.collected
    assert bucket.missing == {0, 1}
    bucket.land()
    mean = torch.tensor([2.5] * 4 + [0.0] * 2)
    for i, piece in enumerate(flat.slices):
        part = flat.layout.slice_of(i, rank)
        start = rank * flat.layout.shard_numel + part.start
        assert torch.equal(piece.grad, mean[start : start + part.stop - part.start])
    assert {len(buffers) for buffers in spares._buffers.values()} == {2}  # the bucket and what was received


def test_a_bucket_collects_adds_and_fills_with_zeros() -> None:
    run_ranks(4, _bucket)


def test_spares_hand_out_what_fits() -> None:
    spares, like = Spares(), torch.empty(4)
    first = spares.take(like)
    assert (first.shape, first.dtype) == (like.shape, like.dtype)
    spares.give([first])
    assert spares.take(torch.empty(4, dtype=torch.float64)) is not first
    assert spares.take(torch.empty(5)) is not first
    assert spares.take(like) is first
    spares.give([first])
    spares.clear()
    assert spares.take(like) is not first


class Zigzag(nn.Module):
    """Ranks run the same units (so gathers agree) but their graphs differ in order and in what they leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = (layer(x) for layer in self.layers)
        if dist.get_rank() == 0:
            return a.sum() + 2 * b.tanh().sum() + c.sum()
        return c.sum() * 3 + a.sum()  # rank 1 leaves b out


def _graphs_that_differ(stage: int) -> None:
    torch.manual_seed(0)
    model = Zigzag().double()
    x = torch.arange(3.0).double()
    references = []
    for rank in range(2):
        weights = [layer.weight.detach().clone().requires_grad_() for layer in model.layers]
        a, b, c = (x @ w.t() for w in weights)
        loss = a.sum() + 2 * b.tanh().sum() + c.sum() if rank == 0 else c.sum() * 3 + a.sum()
        references.append(torch.autograd.grad(loss, weights, allow_unused=True))
    zero = minizero.Zero(model, stage=stage)
    for _ in range(2):
        model(x).backward()
        if stage == 1:
            zero.clip_grad_norm(float("inf"))
        for (_, piece), flat, g0, g1 in zip(
            zero.named_slices(), [u.flats[0] for u in zero.units if u.flats], *references, strict=True
        ):
            mean = (g0 if g1 is None else g0 + g1).reshape(-1) / 2
            padded = torch.cat([mean, mean.new_zeros(1)]).view(2, -1)[dist.get_rank()]
            expected = padded[flat.layout.slice_of(0, dist.get_rank())]
            torch.testing.assert_close(piece.grad, expected, rtol=0, atol=1e-14)
        zero.zero_grad()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_with_different_graphs_reduce_in_one_order(stage: int) -> None:
    run_ranks(2, _graphs_that_differ, stage, timeout=30)


def _bytes(stage: int) -> dict[str, int]:
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)])
    zero = minizero.Zero(model, list(model), stage=stage)
    optimizer = zero.optimizer(minizero.AdamW)
    with Ledger() as ledger:
        for _ in range(2):  # two micro-batches: stage 1 waits for the step, 2 and 3 send both
            model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    return dict(ledger.sent)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_send_what_theory_says(stage: int) -> None:
    once = 3 * 64 * 4 * 3 // 4  # 4 bytes of 3 * 64 elements, (N - 1) / N of them
    reductions = 1 if stage == 1 else 2
    gathers = 4 if stage == 3 else 1
    # the roll call: 4 units, with the root, in 2 forwards and 2 backwards, 8 bytes to each of 3 ranks
    roll_calls = 4 * 4 * 8 * 3 if stage == 3 else 0
    for sent in run_ranks(4, _bytes, stage):
        assert sent["all_to_all"] == reductions * once
        assert sent["all_gather"] == gathers * once + roll_calls
        assert set(sent) == {"all_to_all", "all_gather"}
