"""sharding/: layouts for any sizes and rank counts, placeholders that describe and refuse."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from minizero.sharding import FlatParameters, Layout, ShardedAccessError, ShardedParameter, holders_of

pytestmark = pytest.mark.ch11
shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(torch.Size), min_size=1, max_size=6).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


@given(shapes, st.integers(1, 9))
def test_layout_gives_every_element_to_one_rank(shapes: tuple[torch.Size, ...], world: int) -> None:
    layout = Layout(shapes, world)
    assert layout.numel == sum(s.numel() for s in shapes)
    assert layout.padded_numel == world * layout.shard_numel
    assert 0 <= layout.padded_numel - layout.numel < world
    owners = torch.zeros(layout.padded_numel, dtype=torch.int64)
    for rank in range(world):
        end = 0
        for index in range(len(shapes)):
            part = layout.slice_of(index, rank)
            assert 0 <= part.start <= part.stop <= layout.shard_numel
            if part.stop > part.start:
                assert part.start == end  # slices follow each other without a gap
                end = part.stop
            start = rank * layout.shard_numel
            owners[start + part.start : start + part.stop] += 1
    assert owners[: layout.numel].eq(1).all()
    assert owners[layout.numel :].eq(0).all()


@given(shapes, st.integers(1, 9))
def test_slices_of_all_ranks_make_the_parameter(shapes: tuple[torch.Size, ...], world: int) -> None:
    layout = Layout(shapes, world)
    flat = torch.arange(layout.padded_numel)
    shards = flat.view(world, -1)
    for index, view in enumerate(layout.unflatten(flat)):
        assert view.shape == shapes[index]
        pieces = [shards[rank][layout.slice_of(index, rank)] for rank in range(world)]
        assert torch.equal(torch.cat(pieces), view.reshape(-1))


def test_layout_of_the_catalogue() -> None:
    layout = Layout(tuple(map(torch.Size, [(3, 5), (3,), (2, 3), (2,)])), 4)
    assert (layout.numel, layout.padded_numel, layout.shard_numel) == (26, 28, 7)
    assert sum(layout.slice_of(i, 3).stop - layout.slice_of(i, 3).start for i in range(4)) == 5


def test_layout_needs_a_rank() -> None:
    with pytest.raises(ValueError, match="world must be at least 1, got 0"):
        Layout((torch.Size([1]),), 0)


def _flat(model: nn.Module, rank: int, world: int, aliased: bool) -> FlatParameters:
    return FlatParameters(holders_of(model), rank, world, aliased)


@given(shapes, dtypes, st.integers(1, 5), st.booleans(), st.data())
def test_flat_parameters_keep_values_shapes_and_dtype(
    shapes: tuple[torch.Size, ...], dtype: torch.dtype, world: int, aliased: bool, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world - 1))
    model = nn.ParameterList([nn.Parameter(torch.randn(s).to(dtype)) for s in shapes])
    values = [p.detach().clone() for p in model]
    flat = _flat(model, rank, world, aliased)
    for i, value in enumerate(values):
        assert torch.equal(flat.leaves[i], value)
        part = flat.layout.slice_of(i, rank)
        start = rank * flat.layout.shard_numel + part.start - flat.layout.offsets[i]
        piece = (
            value.reshape(-1)[start : start + part.stop - part.start] if part.stop > part.start else value.new_empty(0)
        )
        assert torch.equal(flat.slices[i].detach(), piece)
        assert flat.slices[i].dtype == dtype
    assert flat.full[flat.layout.numel :].eq(0).all()
    flat.shard.fill_(2)
    assert flat.full.view(world, -1)[rank].eq(2).all() == (aliased or flat.shard.numel() == 0)


def test_freeing_and_allocating_keeps_every_view_valid() -> None:
    layer = nn.Linear(4, 3)
    flat = _flat(layer, 0, 2, aliased=False)
    values, transposed = flat.full.clone(), layer.weight.t()
    flat.free()
    assert flat.full.untyped_storage().nbytes() == 0
    flat.allocate()
    flat.full.copy_(values)
    assert torch.equal(transposed, values[:12].view(3, 4).t())


def test_gradients_add_up_in_the_slices() -> None:
    flat = _flat(nn.Linear(2, 2), rank=1, world=2, aliased=False)  # 6 elements: rank 1 has weight[3], bias[0:2]
    flat.add_gradient(torch.tensor([1.0, 2.0, 3.0]))
    flat.add_gradient(torch.tensor([10.0, 20.0, 30.0]))
    assert [s.grad.tolist() for s in flat.slices] == [[11.0], [22.0, 33.0]]


@pytest.fixture
def placeholder() -> ShardedParameter:
    return ShardedParameter.stand_for(nn.Parameter(torch.ones(2, 3)), "block.weight")


def test_placeholder_describes_the_parameter(placeholder: ShardedParameter) -> None:
    p = placeholder
    assert isinstance(p, nn.Parameter)
    assert (p.shape, p.numel(), p.dim(), p.dtype) == (torch.Size([2, 3]), 6, 2, torch.float32)
    assert p.device == torch.device("cpu")
    assert p.requires_grad
    assert not p.is_cuda
    assert not p.is_meta
    assert len({p, p}) == 1
    assert repr(p) == "ShardedParameter('block.weight', shape=(2, 3), dtype=torch.float32)"


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p + 1,
        lambda p: torch.nn.functional.linear(torch.ones(1, 3), p),
        lambda p: torch.ones(2, 3) * p,
        lambda p: torch.stack([p, p]),
        lambda p: p.sum(),
        lambda p: p.data,
        lambda p: p.grad,
        lambda p: setattr(p, "grad", None),
        lambda p: setattr(p, "data", torch.zeros(2, 3)),
        lambda p: p.detach(),
        lambda p: p.item(),
        lambda p: p.tolist(),
        lambda p: p.numpy(),
        lambda p: p.zero_(),
        lambda p: p.copy_(torch.ones(2, 3)),
        lambda p: nn.init.zeros_(p),
        lambda p: p.half(),
        lambda p: p.to(torch.bfloat16),
        lambda p: p.to("meta"),
        lambda p: p.to("cpu", copy=True),
        lambda p: p.requires_grad_(False),
        lambda p: setattr(p, "requires_grad", False),
        lambda p: p[0],
        lambda p: list(p),
        lambda p: p == p,
        copy.copy,
        copy.deepcopy,
        pickle.dumps,
        lambda p: torch.save(p, io.BytesIO()),
    ],
)
def test_placeholder_refuses_its_values_by_name(placeholder: ShardedParameter, use) -> None:
    with pytest.raises(ShardedAccessError, match=r"parameter 'block\.weight' is sharded"), torch.no_grad():
        use(placeholder)


def test_placeholder_allows_what_changes_nothing(placeholder: ShardedParameter) -> None:
    p = placeholder
    assert p.to("cpu") is p
    assert p.to(torch.float32) is p
    assert p.cpu() is p
    assert p.float() is p
    assert p.requires_grad_(True) is p
    layer = nn.Linear(3, 2)
    layer._parameters["weight"] = p
    assert layer.to("cpu").float()._parameters["weight"] is p


def test_holders_lists_tied_weights_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    model["c"] = model["a"]
    [(parameter, holders)] = holders_of(model)
    assert parameter is model["a"].weight
    assert [h.full_name for h in holders] == ["a.weight", "b.weight", "c.weight"]
