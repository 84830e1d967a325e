"""Groups, surgery, compilation, buffers, randomness, sparse gradients: faults F44 to F49 of public bug reports."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import harness
import numpy as np
import pytest
import reference
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import minizero

pytestmark = pytest.mark.ch15
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


class Chain(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 5, dtype=dtype)
        self.blocks = nn.ModuleList(nn.Linear(5, 5, dtype=dtype) for _ in range(3))
        self.head = nn.Linear(5, 1, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)


def first_then(*builds: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A `build` for reference.Pair, which builds the reference first and then the model to shard."""
    following = iter(builds)
    return lambda: next(following)()


# ---- F44: groups of one rank, and grids of shards and replicas ---------------------------------------------------


def alone(stage: int) -> None:
    batches = reference.random_batches(3, 4, 3, dtype=torch.float64)
    for clip in (None, 0.01):
        pair = reference.train_like_one_process(Chain, batches, stage, clip=clip)
    state = pair.zero.full_state()
    Chain().load_state_dict(state, strict=True)
    pair.zero.load_full_state(state)
    pair.check()
    assert sum(piece.numel() for _, piece in pair.zero.named_slices()) == sum(p.numel() for p in Chain().parameters())


def my_groups(*lists: list[int]) -> ProcessGroup:
    """The group of the list this rank is in; all ranks make all groups."""
    groups = [dist.new_group(ranks) for ranks in lists]
    return next(group for group, ranks in zip(groups, lists, strict=True) if dist.get_rank() in ranks)


def grid(stage: int, shards: list[list[int]], copies: list[list[int]]) -> None:
    """Every rank has data of its own; the gradient is the mean over all of them, and so is what is clipped."""
    group, replicas = my_groups(*shards), my_groups(*copies)
    torch.manual_seed(dist.get_rank())  # models differ until rank 0's is taken
    other = Chain()
    zero = minizero.Zero(other, stage=stage, group=group, replicas=replicas)
    torch.manual_seed(0)
    first = Chain()
    is_first = dist.get_rank(group) == 0
    state = zero.full_state()
    assert (state == {}) != is_first
    if is_first:
        for name, value in first.state_dict().items():
            assert torch.equal(state[name], value), name

    pair = reference.Pair(Chain, stage, group=group, replicas=replicas)
    for batches in reference.random_batches(3, 4, 3, dtype=torch.float64):
        pair.backward(batches)
        trained = list(pair.reference.parameters())
        norm = nn.utils.clip_grad_norm_(trained, 0.05)
        assert pair.zero.clip_grad_norm(0.05) == pytest.approx(norm.item(), rel=1e-12)
        pair.check_gradients()
        pair.step()
        state = pair.zero.full_state()
        assert (state == {}) != is_first
        reference.check_values(state, pair.reference)
        reference.check_clean(pair.zero)
    # Changes come from global rank 0 and reach every copy.
    with pair.zero.gathered(), torch.no_grad():
        pair.model.head.weight.fill_(float(dist.get_rank()) + 7)
    with pair.zero.gathered():
        assert (pair.model.head.weight == 7).all()
    pair.zero.load_full_state({n: v + dist.get_rank() for n, v in first.state_dict().items()})
    reference.check_values(pair.zero.full_state(), first)
    plain = pair.zero.unwrap()
    reference.check_values(dict(plain.named_parameters()), first)


def bad_groups(stage: int) -> None:
    """Copies that do not match, and a rank outside its own group, are refused by all before anything is sharded."""
    group, replicas = my_groups([0], [1]), my_groups([0, 1])
    model = nn.Linear(3, 3 + dist.get_rank())
    with pytest.raises(ValueError, match="different models"):
        minizero.Zero(model, stage=stage, group=group, replicas=replicas)
    first_only = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="group"):
            minizero.Zero(nn.Linear(2, 2), stage=stage, group=first_only)
    else:
        minizero.Zero(nn.Linear(2, 2), stage=stage, group=first_only)


@STAGES
def test_F44_one_rank_equals_plain_torch(stage: int) -> None:
    harness.run_ranks(1, alone, stage)


@STAGES
def test_F44_shard_groups_of_one_rank_equal_data_parallel(stage: int) -> None:
    harness.run_ranks(2, grid, stage, [[0], [1]], [[0, 1]])


@STAGES
def test_F44_a_grid_of_shards_and_replicas_equals_one_process(stage: int) -> None:
    harness.run_ranks(4, grid, stage, [[0, 1], [2, 3]], [[0, 2], [1, 3]])
    harness.run_ranks(4, grid, stage, [[0, 2], [1, 3]], [[0, 1], [2, 3]])


def test_F44_groups_that_do_not_fit_are_refused_on_every_rank() -> None:
    harness.run_ranks(2, bad_groups, 3, group_timeout=5.0)


# ---- F45: changes in place after sharding ------------------------------------------------------------------------


def surgery(stage: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for by in ({0, 1}, {0}, {1}):  # which ranks make the change; rank 0's values count
            pair = reference.Pair(lambda dtype=dtype: Chain(dtype), stage, options={"lr": 0.0, "weight_decay": 0.0})
            batch = torch.ones(2, 3, dtype=dtype)
            with pair.zero.gathered(), torch.no_grad():
                if dist.get_rank() in by:
                    pair.model.blocks[1].weight.fill_(2.0)
                    nn.init.zeros_(pair.model.head.bias)
            if 0 in by:
                with torch.no_grad():
                    pair.reference.blocks[1].weight.fill_(2.0)
                    nn.init.zeros_(pair.reference.head.bias)
            pair.check()
            for _ in range(2):
                torch.testing.assert_close(pair.model(batch), pair.reference(batch), rtol=0, atol=0)
                pair.backward([batch, batch])
                pair.step()  # with lr 0
                pair.check()
    # Training goes on from the change.
    pair = reference.Pair(Chain, stage)
    for batches in reference.random_batches(3, 4, 3, dtype=torch.float64):
        with pair.zero.gathered(), torch.no_grad():
            for p in pair.model.parameters():
                p.clamp_(-0.2, 0.2)
        with torch.no_grad():
            for p in pair.reference.parameters():
                p.clamp_(-0.2, 0.2)
        pair.backward(batches)
        pair.step()
        pair.check()


def careless_surgery(stage: int) -> None:
    """Without gathered(): an error by name where the values are away, the change itself where they are here."""
    pair = reference.Pair(Chain, stage)
    weight = pair.model.blocks[1].weight
    changes: list[Callable[[nn.Module], Any]] = [
        lambda model: nn.init.zeros_(model.blocks[1].weight),
        lambda model: model.blocks[1].weight.fill_(2.0),
        lambda model: model.blocks[1].weight.data.fill_(2.0),
        lambda model: model.blocks[1].weight.copy_(torch.ones(5, 5)),
        lambda model: model.blocks[1].weight[0].zero_(),
        lambda model: model.blocks[1].reset_parameters(),
        lambda model: model.blocks[1].load_state_dict(nn.Linear(5, 5).state_dict()),
        lambda model: torch.nn.utils.vector_to_parameters(torch.ones(30), model.blocks[1].parameters()),
        lambda model: model.blocks[1].apply(lambda module: nn.init.ones_(module.weight)),
        lambda model: F.linear(torch.ones(1, 5), model.blocks[1].weight, out=model.blocks[1].weight),
    ]
    for i, change in enumerate(changes if stage == 3 else changes[:2]):
        if stage == 3:
            with pytest.raises((minizero.ShardedAccessError, RuntimeError), match=r"blocks\.1\.|sharded|weight"):
                torch.no_grad()(change)(pair.model)
        else:
            torch.no_grad()(change)(pair.model)
            torch.no_grad()(change)(pair.reference)
        pair.check()
        assert pair.model.blocks[1].weight is weight, f"change {i} replaced the parameter"
    for batches in reference.random_batches(2, 4, 3, dtype=torch.float64):
        pair.backward(batches)
        pair.step()
        pair.check()


def averaged(stage: int) -> None:
    """An average of the weights, kept on the slices: 1/N of the memory, the same numbers."""
    pair = reference.Pair(Chain, stage)
    mine = {name: piece.detach().clone() for name, piece in pair.zero.named_slices()}
    whole = {name: p.detach().clone() for name, p in pair.reference.named_parameters()}
    for batches in reference.random_batches(3, 4, 3, dtype=torch.float64):
        pair.backward(batches)
        pair.step()
        for name, piece in pair.zero.named_slices():
            mine[name].lerp_(piece.detach(), 0.1)
        for name, p in pair.reference.named_parameters():
            whole[name].lerp_(p.detach(), 0.1)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    assert mine.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(torch.cat([part[name] for part in everyone]).view_as(value), value)


class Renormalised(nn.Module):
    """Its forward changes a weight in place: `max_norm` shortens the rows it looks up."""

    def __init__(self, max_norm: float | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, max_norm=max_norm, dtype=torch.float64)
        self.head = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def changed_by_forward(stage: int) -> None:
    """Stage 3 would lose the change and stages 1 and 2 would let copies drift apart, so it must not go unnoticed."""
    model = Renormalised(max_norm=0.5)
    minizero.Zero(model, [model.embedding], stage=stage)
    with pytest.raises(RuntimeError, match=r"embedding\.weight"):
        model(torch.tensor([dist.get_rank(), 3]))
        model(torch.tensor([dist.get_rank(), 3]))


@STAGES
def test_F45_changes_in_gathered_reach_every_shard_from_rank_0(stage: int) -> None:
    harness.run_ranks(2, surgery, stage)


@STAGES
def test_F45_changes_outside_gathered_are_refused_or_made(stage: int) -> None:
    harness.run_ranks(2, careless_surgery, stage)


@STAGES
def test_F45_an_average_on_slices_is_the_average_of_the_whole(stage: int) -> None:
    harness.run_ranks(3, averaged, stage)


@STAGES
def test_F45_a_forward_that_changes_its_parameters_is_noticed(stage: int) -> None:
    harness.run_ranks(2, changed_by_forward, stage)


# ---- F46: torch.compile ------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh() * 2


class Stack(nn.Module):
    """The hooks of a unit are where a graph ends, so what is compiled are the parts between: here, each block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 5, dtype=torch.float64)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(5, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.cos())


def compiled(stage: int, backend: str, variants: str) -> None:
    ways: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any] | None]] = {
        "before": (lambda: torch.compile(Stack(), backend=backend), None),
        "after": (Stack, lambda model: torch.compile(model, backend=backend)),
        "in place": (Stack, lambda model: model.compile(backend=backend) or model),
        "blocks before": (lambda: with_compiled_blocks(backend), None),
        "blocks after": (Stack, lambda model: [b.compile(backend=backend) for b in model.blocks] and model),
    }
    for name in variants.split(", "):
        build, use = ways[name]
        torch._dynamo.reset()
        pair = reference.Pair(first_then(Stack, build), stage)
        model = use(pair.model) if use else pair.model
        pair.loss_of = lambda m, x, pair=pair, model=model: (m if m is pair.reference else model)(x).square().mean()
        graphs = []
        for batches in reference.random_batches(3, 4, 3, dtype=torch.float64):
            pair.backward(batches)
            if stage > 1:
                pair.check_gradients()
            pair.step()
            pair.check()  # names without the wrapper's prefix, too
            model.eval()
            with torch.no_grad():
                torch.testing.assert_close(model(batches[0]), pair.reference(batches[0]), rtol=1e-9, atol=1e-12)
            model.train()
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert graphs[0] > 0, f"{name}: nothing was compiled"
        assert graphs[1] == graphs[2], f"{name}: compiled again at each step: {graphs}"
        state = pair.zero.full_state()
        if dist.get_rank() == 0:
            Stack().load_state_dict(state, strict=True)
        pair.zero.load_full_state(pair.reference.state_dict())
        optimizer = pair.zero.optimizer(torch.optim.SGD, [{"params": ["blocks.1.linear.weight", "head.bias"]}], lr=0.1)
        assert len(optimizer.param_groups[0]["params"]) == 2
        pair.zero.unwrap()
        torch.testing.assert_close(model(batches[0]), pair.reference(batches[0]), rtol=1e-9, atol=1e-12)


def with_compiled_blocks(backend: str) -> nn.Module:
    model = Stack()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=backend)
    return model


@pytest.mark.parametrize(
    ("stage", "backend", "variants"),
    [
        (1, "eager", "before, blocks after"),
        (2, "aot_eager", "after, blocks before"),
        (3, "eager", "before, after, in place, blocks before, blocks after"),
        (3, "aot_eager", "before, blocks after"),
    ],
)
def test_F46_compiled_models_train_like_plain_ones(stage: int, backend: str, variants: str) -> None:
    harness.run_ranks(2, compiled, stage, backend, variants, timeout=120.0)


# ---- F47: buffers ------------------------------------------------------------------------------------------------


class Normalised(nn.Module):
    """The statistics depend on the data alone, so that a plain BatchNorm can say what they must be."""

    def __init__(self, norm_dtype: torch.dtype, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, dtype=norm_dtype)
        self.layers = nn.ModuleList([nn.Linear(4, 3, dtype=dtype)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.norm(x.to(self.norm.weight.dtype)).to(self.layers[0].weight.dtype))


def batch_norm(stage: int) -> None:
    """Documented: buffers start as rank 0's, stay whole, and then each rank has its own; full_state() is rank 0's."""
    rank = dist.get_rank()
    for norm_dtype, dtype in (
        (torch.float64, torch.float64),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
    ):
        pair = reference.Pair(lambda a=norm_dtype, b=dtype: Normalised(a, b), stage)
        plains = [nn.BatchNorm1d(4, dtype=norm_dtype) for _ in range(2)]
        mean = pair.model.norm.running_mean
        for batches in reference.random_batches(5, 6, 4):
            pair.backward(batches)
            pair.step()
            if dtype == torch.float64:
                pair.check()
            for plain, batch in zip(plains, batches, strict=True):
                plain(batch.to(norm_dtype))
        for name, buffer in pair.model.norm.named_buffers():
            assert torch.equal(buffer, plains[rank].get_buffer(name)), name
            assert buffer.dtype == plains[rank].get_buffer(name).dtype
        assert pair.model.norm.num_batches_tracked.dtype == torch.int64
        assert pair.model.norm.num_batches_tracked.item() == 5
        assert pair.model.norm.running_mean is mean, "a buffer was replaced"
        assert not torch.equal(plains[0].running_mean, plains[1].running_mean)
        assert not any("running" in name for name, _ in pair.zero.named_slices())
        state = pair.zero.full_state()
        pair.zero.load_full_state(state)
        for name, buffer in pair.model.norm.named_buffers():
            assert torch.equal(buffer, plains[0].get_buffer(name)), f"{name} after loading"
        if rank == 0:
            Normalised(norm_dtype, dtype).load_state_dict(state, strict=True)
            assert state["norm.running_var"].dtype == norm_dtype
        plains[0].eval()
        pair.model.eval()
        before = pair.model.norm.running_var.clone()
        pair.model(torch.ones(2, 4))
        assert torch.equal(pair.model.norm.running_var, before)


def buffers_start_as_rank_0s() -> None:
    for stage in (1, 2, 3):
        model = Normalised(torch.float32, torch.float32)
        with torch.no_grad():
            for buffer in model.buffers():
                buffer.fill_(1 + dist.get_rank())
        minizero.Zero(model, stage=stage)
        assert all((buffer == 1).all() for buffer in model.buffers())


@STAGES
def test_F47_batch_norm_statistics_are_each_ranks_own_and_the_state_has_rank_0s(stage: int) -> None:
    harness.run_ranks(2, batch_norm, stage)


def test_F47_buffers_start_as_rank_0s() -> None:
    harness.run_ranks(2, buffers_start_as_rank_0s)


# ---- F48: randomness ---------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    recomputes: bool | None = None  # None, or `use_reentrant`

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8, dtype=torch.float64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8, dtype=torch.float64), nn.Dropout(0.5), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) if self.recomputes is None else checkpoint(block, x, use_reentrant=self.recomputes)
        return x


def seeded_loss(model: nn.Module, batch: tuple[int, Tensor]) -> Tensor:
    torch.manual_seed(batch[0])
    return model(batch[1]).square().mean()


def dropout(stage: int) -> None:
    inputs = reference.random_batches(2, 6, 4, dtype=torch.float64)
    batches = [[(10 * step + rank, x) for rank, x in enumerate(row)] for step, row in enumerate(inputs)]
    found = []
    for recomputes in (None, False, True):
        pair = reference.Pair(Dropping, stage, loss_of=seeded_loss)
        pair.model.recomputes = recomputes
        for row in batches:
            pair.backward(row)
            pair.zero.clip_grad_norm(1e9)
            pair.check_gradients()
            found.append(reference.full_gradients(pair.zero))
            pair.step()
            pair.check()
    for other in (found[2:4], found[4:6]):
        for mine, same in zip(found[:2], other, strict=True):
            assert all(torch.equal(mine[name], same[name]) for name in mine), "recomputed with another mask"


def masks(stage: int) -> None:
    """Same data and weights on both ranks: outputs agree if and only if the user seeds alike."""
    model = Dropping()
    minizero.Zero(model, stage=stage)
    x = torch.ones(6, 4, dtype=torch.float64)
    for seeds, alike in (([3, 3], True), ([3, 4], False)):
        torch.manual_seed(seeds[dist.get_rank()])
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, model(x).detach())
        assert torch.equal(*everyone) == alike


def random_states() -> Iterator[Any]:
    yield torch.get_rng_state().tolist()
    yield random.getstate()
    yield [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()]


def untouched_generators(stage: int) -> None:
    torch.manual_seed(7 + dist.get_rank())
    random.seed(7)
    np.random.seed(7)
    model = Chain()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = list(random_states())
    zero = minizero.Zero(model, stage=stage)
    for cls in (minizero.AdamW, torch.optim.SGD):
        optimizer = zero.optimizer(cls, lr=0.1)
        model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        zero.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
    zero.full_state()
    zero.load_full_state(state)
    with zero.gathered():
        pass
    zero.unwrap()
    assert list(random_states()) == before


@pytest.mark.ch12
@STAGES
def test_F48_recomputation_draws_the_same_masks(stage: int) -> None:
    harness.run_ranks(2, dropout, stage)


@STAGES
def test_F48_masks_differ_by_rank_unless_seeded_alike(stage: int) -> None:
    harness.run_ranks(2, masks, stage)


@STAGES
def test_F48_nothing_is_drawn_from_the_users_generators(stage: int) -> None:
    harness.run_ranks(2, untouched_generators, stage)


# ---- F49: sparse gradients ---------------------------------------------------------------------------------------


class Lookup(nn.Module):
    def __init__(self, sparse: bool, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 4, sparse=sparse, dtype=torch.float64)
        self.bag = nn.EmbeddingBag(10, 4, mode="sum", sparse=sparse, dtype=torch.float64)
        self.tied = tied

    def forward(self, ids: Tensor, direction: Tensor) -> Tensor:
        x = self.embedding(ids)
        loss = (x * direction).sum() + self.bag(ids % 10, torch.tensor([0])).square().sum()
        if self.tied:  # the same weight has a dense gradient as well
            loss = loss + F.linear(x, self.embedding.weight).square().mean()
        return loss


def sparse_gradients(stage: int) -> None:
    direction = torch.tensor([[1.0, -1.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0], [5.0, 0.0, 0.0, 5.0], [1.0, 1.0, 1.0, 1.0]])
    # Row 7 is looked up by both ranks, 999 and 0 by one each; a rank looks up row 7 or 500 twice.
    ids = [torch.tensor([999, 7, 7, 1]), torch.tensor([0, 500, 500, 7])]

    def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
        return model(rows, direction.double())

    for tied in (False, True):
        for cls, options in ((torch.optim.SGD, {"lr": 1.0}), (minizero.AdamW, {"lr": 0.1})):
            pair = reference.Pair(
                first_then(lambda tied=tied: Lookup(False, tied), lambda tied=tied: Lookup(True, tied)),
                stage,
                loss_of=loss_of,
                optimizer=cls,
                options=options,
            )
            before = pair.reference.embedding.weight.detach().clone()
            for accumulate in (1, 2):
                for _ in range(accumulate):
                    pair.backward(ids)
                pair.zero.clip_grad_norm(1e9)
                pair.check_gradients()
                if accumulate == 1 and not tied:
                    row = reference.full_gradients(pair.zero)["embedding.weight"].view(1000, 4)[999]
                    assert row.tolist() == [0.5, -0.5, 0.0, 0.0], "half of [1, -1, 0, 0], whose sum is zero"
                pair.step()
                pair.check()
            if cls is torch.optim.SGD and not tied:
                moved = (pair.reference.embedding.weight.detach() - before).abs().sum(1).nonzero().view(-1)
                assert moved.tolist() == [0, 1, 7, 500, 999]


@pytest.mark.ch13
@STAGES
def test_F49_sparse_gradients_are_reduced_like_dense_ones(stage: int) -> None:
    harness.run_ranks(2, sparse_gradients, stage)
