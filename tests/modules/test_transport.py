"""The seam between ZeRO and the wire: other forms and other ways, from outside of the package."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import Tensor, nn

import minizero
from minizero.collectives import Encoded, Ledger, TorchTransport, World, ring_all_gather, ring_reduce_scatter

pytestmark = pytest.mark.ch04
BLOCK = 32
WIDTH = 64


class Int8:
    """A form of our own: 8 bits for each number, and a scale in fp32 for each block."""

    def encode(self, values: Tensor) -> Tensor:
        blocks = nn.functional.pad(values.float(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
        scales = (blocks.abs().amax(1, keepdim=True) / 127).clamp(min=1e-30)
        return torch.cat([(blocks / scales).round().to(torch.int8), scales.view(torch.int8)], dim=1).flatten()

    def decode(self, sent: Tensor, values: Tensor) -> None:
        blocks = sent.view(-1, BLOCK + 4)
        scales = blocks[:, BLOCK:].contiguous().view(torch.float32)
        values.copy_((blocks[:, :BLOCK] * scales).flatten()[: values.numel()])


class Done:
    """A collective that has ended."""

    def __init__(self, total: Tensor | None = None) -> None:
        self.total, self.buffers = total, []

    def wait(self) -> None: ...

    def land(self) -> Tensor:
        assert self.total is not None
        return self.total


class Rings(TorchTransport):
    """A way of our own: neighbours in a ring, one message after another."""

    def all_gather(self, full: Tensor, shard: Tensor) -> Done:
        with torch.no_grad():
            ring_all_gather(full, shard.to(full.dtype), self.group)
        return Done()

    def reduce_scatter(self, full: Tensor, allocate: Callable[[Tensor], Tensor] = torch.empty_like) -> Done:
        total = full.new_empty(full.numel() // self.size)
        ring_reduce_scatter(total, full, self.group)
        return Done(total)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def train(transport: TorchTransport | Encoded | None) -> tuple[dict[str, Tensor], int, minizero.Zero]:
    """The weights after six steps, the bytes that the last one sent, what was trained."""
    torch.manual_seed(0)
    model = Chain().double()
    zero = minizero.Zero(model, transport=transport)
    optimizer = zero.optimizer(torch.optim.SGD, lr=0.05)
    for step in range(6):
        with Ledger() as ledger:
            loss = (model(batch(step, dist.get_rank())) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return zero.full_state(), ledger.total, zero


def alone(steps: int = 6) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Chain().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        loss = torch.stack([(model(batch(step, rank)) - 1).square().mean() for rank in range(dist.get_world_size())])
        loss.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(float((found[name] - value).abs().max()) for name, value in wanted.items())


def _another_way() -> None:
    found, sent, _ = train(Rings())
    wanted, usual, _ = train(None)
    assert sent == usual
    if dist.get_rank() == 0:
        assert distance(found, wanted) < 1e-12
        assert distance(found, alone()) < 1e-12


def test_a_transport_of_rings_trains_like_one_process() -> None:
    run_ranks(3, _another_way)


def in_8_bits(values: int) -> int:
    return -(-values // BLOCK) * (BLOCK + 4)


def as_they_are(values: int) -> int:
    return 8 * values


class Forgets(Int8):
    """A fault: what came from other ranks counts as nothing."""

    def decode(self, sent: Tensor, values: Tensor) -> None:
        values.zero_()


class Halves(Int8):
    """A fault: a factor in the scale."""

    def decode(self, sent: Tensor, values: Tensor) -> None:
        super().decode(sent, values)
        values /= 2


def _another_form() -> None:
    reference, others = alone(), dist.get_world_size() - 1
    moved = distance(alone(0), reference)
    for forms in ({"weights": Int8()}, {"gradients": Int8()}, {"weights": Int8(), "gradients": Int8()}):
        found, sent, zero = train(Encoded(TorchTransport(), **forms))
        weight, gradient = (in_8_bits if kind in forms else as_they_are for kind in ("weights", "gradients"))
        shards = [flat.layout.shard_numel for flat in zero.flats]
        calls = 2 * 8 * len(zero.units)  # each unit is called out in forward and in backward
        assert sent == others * (sum(2 * weight(n) + gradient(n) for n in shards) + calls)
        if dist.get_rank() == 0:
            # 8 bits are half a percent of the largest value of a block; we measured one percent of the way
            assert 0 < distance(found, reference) < moved / 20
    for forms in ({"weights": Halves()}, {"gradients": Halves()}, {"gradients": Forgets()}):
        found, _, _ = train(Encoded(TorchTransport(), **forms))
        if dist.get_rank() == 0:
            assert distance(found, reference) > moved / 5


def test_8_bits_on_the_wire_need_one_class() -> None:
    run_ranks(2, _another_form)


def _shards_stay_exact() -> None:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    zero = minizero.Zero(model, transport=Encoded(TorchTransport(), weights=Int8()))
    with torch.no_grad():
        rounded = model(torch.eye(WIDTH))
    assert not torch.equal(rounded, nn.functional.linear(torch.eye(WIDTH), plain["weight"], plain["bias"]))
    assert torch.equal(torch.cat(zero.world.everyone(rounded)), rounded.repeat(2, 1))  # alike on all ranks
    with zero.gathered():
        assert torch.equal(model.weight, plain["weight"])
    state = zero.full_state()
    if dist.get_rank() == 0:
        assert all(torch.equal(state[name], value) for name, value in plain.items())
    whole = zero.unwrap()
    assert all(torch.equal(value, plain[name]) for name, value in whole.state_dict().items())


def test_what_is_saved_was_never_rounded() -> None:
    run_ranks(2, _shards_stay_exact)


def _refusals() -> None:
    model = nn.Linear(4, 4)
    for stage in (1, 2):
        with pytest.raises(ValueError, match="transport rounds weights"):
            minizero.Zero(model, stage=stage, transport=Encoded(TorchTransport(), weights=Int8()))
    minizero.Zero(model, stage=1, transport=Encoded(TorchTransport(), gradients=Int8())).unwrap()
    groups = [dist.new_group([rank]) for rank in range(2)]
    mine, not_mine = groups[dist.get_rank()], groups[1 - dist.get_rank()]
    with pytest.raises(ValueError, match=r"transport: this is rank 0 of 1 there, and [01] of 2 here"):
        minizero.Zero(model, transport=TorchTransport(mine))
    with pytest.raises(ValueError, match=r"rank [01] is not in the process group"):
        World(not_mine)


def test_a_transport_that_does_not_fit_is_refused() -> None:
    run_ranks(2, _refusals)


def _as_one() -> None:
    rank = dist.get_rank()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    twins = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    world = World(pairs[rank // 2], twins[rank % 2])
    assert (world.rank, world.size, world.copy, world.copies) == (rank % 2, 2, rank // 2, 2)
    assert (world.number, world.count) == (rank, 4)
    assert world.everyone(rank) == world.beside("test").everyone(rank) == [0, 1, 2, 3]
    values = torch.full((3,), float(rank))
    world.broadcast(values)
    assert values.tolist() == [0, 0, 0]
    theirs = world.from_first({"half": torch.full((2,), rank + 1, dtype=torch.bfloat16), "name": f"rank {rank}"})
    assert theirs["name"] == "rank 0"
    assert theirs["half"].dtype == torch.bfloat16
    assert theirs["half"].tolist() == [1, 1]
    world.agree(["the same"])
    with pytest.raises(ValueError, match="ranks bring different things: rank 0 has 0, rank 1 has 1"):
        world.agree([str(rank // 2)], "things")


def test_a_world_is_all_ranks_of_all_copies() -> None:
    run_ranks(4, _as_one)
