"""Faults of the shard layout and of parameter kinds, as users of sharding libraries have reported them (F01 to F05)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import harness
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from harness import run_ranks
from reference import Pair, random_batches, train_like_one_process
from torch import Tensor, nn
from torch.nn import functional as F

import minizero
from minizero import checkpoint
from minizero.zero.state import SAFETENSORS_DTYPES

pytestmark = pytest.mark.ch11
harness.preload("minizero.checkpoint.save_load")
every_stage = pytest.mark.parametrize("stage", [1, 2, 3])


# ---- F01: element count not divisible by the number of ranks, dirty padding --------------------------------------


def two_linears() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))  # 15 + 3 + 6 + 2 = 26 values


def linears_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def soil_padding(zero: minizero.Zero) -> int:
    """Write NaN into every element of this rank's shards that is no parameter's; returns how many there were."""
    soiled = 0
    for unit in zero.units:
        for flat in unit.flats:
            end = min(max(flat.layout.numel - flat.rank * flat.layout.shard_numel, 0), flat.layout.shard_numel)
            flat.shard[end:] = torch.nan
            soiled += flat.layout.shard_numel - end
            if flat.aliased:
                flat.full[flat.layout.numel :] = torch.nan
    return soiled


def train_with_dirty_padding(stage: int) -> list[tuple[int, int, int]]:
    """Per way of cutting into units: this rank's shard elements, padding elements, and parameter elements."""
    seen = []
    for units in (None, linears_of):
        pair = Pair(two_linears, stage, units=units, clip=0.05)
        soiled = soil_padding(pair.zero)
        for batch in random_batches(3, 4, 5):
            pair.backward(batch)
            pair.check_gradients()
            assert pair.step() > 0.05, "this test is about clipping"
            pair.check()
        assert sum(p.numel() for p in pair.model.parameters()) == 26
        owned = sum(piece.numel() for _, piece in pair.zero.named_slices())
        seen.append((sum(f.layout.shard_numel for u in pair.zero.units for f in u.flats), soiled, owned))
        state = pair.zero.full_state()
        assert sum(value.numel() for value in state.values()) == (26 if dist.get_rank() == 0 else 0)
        assert all(bool(value.isfinite().all()) for value in state.values())
    return seen


@every_stage
@pytest.mark.parametrize("world", [2, 3, 4])
def test_F01_padding_is_transport_and_not_model(stage: int, world: int) -> None:
    per_rank = run_ranks(world, train_with_dirty_padding, stage)
    whole, by_layer = ([seen[i] for seen in per_rank] for i in range(2))
    assert (
        whole
        == {
            2: [(13, 0, 13)] * 2,
            3: [(9, 0, 9), (9, 0, 9), (9, 1, 8)],
            4: [(7, 0, 7), (7, 0, 7), (7, 0, 7), (7, 2, 5)],  # padded to 28
        }[world]
    )
    assert (
        by_layer
        == {
            2: [(9 + 4, 0, 13)] * 2,
            3: [(6 + 3, 0, 9), (6 + 3, 0, 9), (6 + 3, 1, 8)],
            4: [(5 + 2, 0, 7), (5 + 2, 0, 7), (5 + 2, 0, 7), (5 + 2, 2, 5)],  # padded to 20 and 8
        }[world]
    )


# ---- F02: ranks that own nothing ---------------------------------------------------------------------------------


def two_values(dtype: torch.dtype) -> nn.Module:
    return nn.Linear(1, 2, bias=False, dtype=dtype)


def train_with_empty_ranks(stage: int) -> list[dict[str, int]]:
    calls = []
    for dtype in (torch.float32, torch.bfloat16):
        pair = Pair(partial(two_values, dtype), stage, clip=0.01)
        assert sum(piece.numel() for _, piece in pair.zero.named_slices()) == (1 if dist.get_rank() < 2 else 0)
        batches = random_batches(3, 4, 1, dtype=dtype)
        with minizero.Ledger() as ledger:
            pair.backward(batches[0])
            pair.step()
            pair.check()
        # The last rank owns nothing, and only its loss overflows: all ranks must take the same decision.
        pair.model(batches[1][dist.get_rank()]).mean().mul(torch.inf if dist.get_rank() == 3 else 1.0).backward()
        with pytest.raises(minizero.NonFiniteGradientError):
            pair.zero.clip_grad_norm(1.0)
        pair.zero.zero_grad()
        pair.check()
        pair.backward(batches[2])
        for norm_type in (1.0, 2.0, torch.inf):
            wanted = torch.linalg.vector_norm(pair.reference.weight.grad.double(), norm_type).item()
            assert pair.zero.clip_grad_norm(torch.inf, norm_type) == pytest.approx(wanted, rel=1e-2)
        pair.step()
        pair.check()
        state = pair.zero.full_state()
        pair.zero.load_full_state({name: value + 1 for name, value in state.items()})
        with torch.no_grad():
            pair.reference.weight += 1
        pair.check()
        calls.append(dict(ledger.calls))
    return calls


@every_stage
def test_F02_ranks_that_own_nothing_take_part_in_everything(stage: int) -> None:
    per_rank = run_ranks(4, train_with_empty_ranks, stage)
    assert all(sum(calls.values()) > 0 for calls in per_rank[0])
    assert all(calls == per_rank[0] for calls in per_rank)


class Hollow(nn.Module):
    """A unit of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


class HoldsNothing(nn.Module):
    """A parameter of no elements, one that is None, and a unit that consists of no elements only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_parameter("absent", None)
        self.hollow = Hollow()

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return torch.cat([h, h @ self.nothing.t(), self.hollow(h)], dim=1)


def train_without_elements(stage: int) -> None:
    train_like_one_process(HoldsNothing, random_batches(2, 4, 3), stage, units=lambda m: [m.linear, m.hollow], clip=0.1)


@every_stage
def test_F02_parameters_of_no_elements_train_and_keep_their_shape(stage: int) -> None:
    run_ranks(2, train_without_elements, stage)


# ---- F03: scalar parameters --------------------------------------------------------------------------------------


class Tempered(nn.Module):
    """A learned temperature of shape []; it notes the shape it sees in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.tensor(1.5))
        self.linear = nn.Linear(3, 2)
        self.seen: list[torch.Size] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.t.shape)
        return self.linear(x) * self.t


def train_a_scalar(stage: int) -> None:
    for units in (None, linears_of):  # with others in one unit; alone in the root unit, smaller than the world
        pair = train_like_one_process(Tempered, random_batches(2, 4, 3), stage, units=units)
        assert pair.model.seen == [torch.Size([])] * 2
        assert pair.model.t.shape == torch.Size([])
        state = pair.zero.full_state()
        if dist.get_rank() == 0:
            assert state["t"].shape == torch.Size([])
            plain = Tempered()
            plain.load_state_dict(state, strict=True)
            assert plain.t.shape == torch.Size([])
            assert plain.t.item() == state["t"].item() != 1.5
        pair.zero.load_full_state(state)
        pair.check()


@every_stage
def test_F03_a_scalar_parameter_stays_a_scalar(stage: int) -> None:
    run_ranks(2, train_a_scalar, stage)


# ---- F04: mixed dtypes, non-contiguous and complex parameters ----------------------------------------------------


class TwoDtypes(nn.Module):
    """fp32, bf16 and fp32 again in one unit; small integers, with which bf16 is exact too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 5, dtype=torch.bfloat16)
        self.third = nn.Linear(5, 1)
        self.seen: set[torch.dtype] = set()
        for parameter in self.parameters():
            parameter.data.random_(-2, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {self.first.weight.dtype, self.second.weight.dtype, self.third.weight.dtype}
        return self.third(self.second(self.first(x).bfloat16()).float())


def sum_times_world(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).sum() * dist.get_world_size()  # averaging over ranks then leaves integers


def train_two_dtypes(stage: int) -> None:
    batch = [x.round() for x in random_batches(1, 2, 3)[0]]
    pair = train_like_one_process(
        TwoDtypes, [batch], stage, loss_of=sum_times_world, optimizer=torch.optim.SGD, options={"lr": 0.25}
    )
    assert pair.model.seen == {torch.float32, torch.bfloat16}
    wanted = {name: p.dtype for name, p in pair.reference.named_parameters()}
    assert {name: p.dtype for name, p in pair.model.named_parameters()} == wanted
    assert {name: piece.dtype for name, piece in pair.zero.named_slices()} == wanted
    state = pair.zero.full_state()
    assert {name: value.dtype for name, value in state.items()} == (wanted if dist.get_rank() == 0 else {})


@every_stage
@pytest.mark.parametrize("world", [2, 3])
def test_F04_each_parameter_keeps_its_dtype(stage: int, world: int) -> None:
    run_ranks(world, train_two_dtypes, stage)


class Transposed(nn.Module):
    """Its weight is (3, 2) and lies in memory column by column."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3).t())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def train_a_transposed_weight(stage: int) -> list[list[float]]:
    pair = Pair(Transposed, stage)
    state = pair.zero.full_state()
    with pair.zero.gathered():
        seen = [pair.model.weight.reshape(-1).tolist()]
    if dist.get_rank() == 0:
        seen.append(state["weight"].reshape(-1).tolist())
    for batch in random_batches(2, 4, 3):
        pair.backward(batch)
        pair.check_gradients()
        pair.step()
        pair.check()
    return seen


@every_stage
def test_F04_a_non_contiguous_parameter_keeps_its_logical_order(stage: int) -> None:
    logical = [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    assert run_ranks(2, train_a_transposed_weight, stage) == [[logical] * 2, [logical]]


class Phase(nn.Module):
    """A complex parameter next to a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.phase = nn.Parameter(torch.tensor([3 + 4j]))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.phase.abs()


def shard_a_complex_parameter(stage: int) -> None:
    model = Phase()
    parameters = dict(model.named_parameters())
    with pytest.raises(TypeError, match="'phase' is complex"):
        minizero.Zero(model, stage=stage)
    assert dict(model.named_parameters()) == parameters  # the same objects
    assert model(torch.ones(1, 2)).isfinite().all()
    model.phase = nn.Parameter(torch.tensor([5.0]))
    minizero.Zero(model, stage=stage)  # what was refused has left nothing behind


@every_stage
def test_F04_a_complex_parameter_is_refused_by_name(stage: int) -> None:
    run_ranks(2, shard_a_complex_parameter, stage)


class SharesMemory(nn.Module):
    """Two Parameter objects look at one tensor: tied by memory, which flattening would untie without a word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight.data = self.embedding.weight.data

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def shard_shared_memory(stage: int) -> None:
    with pytest.raises(ValueError, match=r"embedding\.weight.*head\.weight"):
        minizero.Zero(SharesMemory(), stage=stage)


@every_stage
def test_F05_two_parameters_in_the_same_memory_are_refused_by_name(stage: int) -> None:
    run_ranks(2, shard_shared_memory, stage)


# ---- F05: tied weights -------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Embedding and output layer share one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train_tied(stage: int) -> None:
    generator = torch.Generator().manual_seed(3)
    batches = [
        [torch.randint(0, 7, (2, 5), generator=generator) for _ in range(dist.get_world_size())] for _ in range(3)
    ]
    for units in (None, nn.Module.children):  # all in the root unit; each child its own unit
        pair = Pair(Tied, stage, units=units, loss_of=next_token_loss)
        model = pair.model
        assert model.head.weight is model.embedding.weight
        assert [name for name, _ in model.named_parameters()] == ["embedding.weight", "middle.weight", "middle.bias"]
        assert [name for name, _ in pair.zero.named_slices()].count("embedding.weight") == 1
        for batch in batches:
            pair.backward(batch)
            pair.check_gradients()  # the sum of both uses
            pair.step()
            pair.check()
            assert model.head.weight is model.embedding.weight
        state = pair.zero.full_state()
        if dist.get_rank() == 0:
            assert torch.equal(state["head.weight"], state["embedding.weight"])
        pair.zero.load_full_state(state)
        assert model.head.weight is model.embedding.weight
        pair.check()
        plain = pair.zero.unwrap()
        assert isinstance(plain, Tied)
        assert plain.head.weight is plain.embedding.weight


@every_stage
@pytest.mark.parametrize("world", [2, 3])
def test_F05_tied_weights_are_one_parameter(stage: int, world: int) -> None:
    run_ranks(world, train_tied, stage)


class Shared(nn.Module):
    """One layer under two names, an embedding in three blocks, and blocks of which two are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.Linear(3, 3)
        block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.blocks = nn.ModuleList([block, nn.Sequential(nn.Linear(3, 3)), block])
        for each in self.blocks:
            each.scale = self.a.bias

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(torch.tanh(self.a(x)))
        for block in self.blocks:
            x = block(x) * block.scale
        return x


def train_shared(stage: int) -> None:
    for units in (None, lambda model: [model.a, *model.blocks], lambda model: [model.blocks[1], model.blocks[0]]):
        pair = train_like_one_process(Shared, random_batches(3, 4, 3), stage, units=units, clip=1.0)
        assert sum(p.numel() for p in pair.model.parameters()) == 3 * 12


@every_stage
def test_F05_modules_and_parameters_under_several_names_count_once(stage: int) -> None:
    run_ranks(2, train_shared, stage)


# ---- F80: buffers that are not contiguous


class Strided(nn.Module):
    """Buffers in every kind of memory, all values from `start` on; with `dense`, the same values in row-major order."""

    def __init__(self, start: int, dense: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).t() + start)
        self.memory = torch.arange(8.0) + start  # no buffer itself
        counted = (torch.arange(6.0) + start).view(2, 3)
        complex_values = torch.complex(counted, -counted)
        buffers = {
            "steps": self.memory[::2],
            "columns": counted.t(),
            "repeated": torch.full((1, 2), 1.0 + start).expand(4, 2),
            "windows": (torch.arange(5.0) + start).unfold(0, 3, 1),
            "channels": torch.randn(2, 3, 4, 5).add(start).to(memory_format=torch.channels_last),
            "one": torch.tensor(2.0 + start),
            "none": torch.empty(0, 3).t(),
            "conjugate": complex_values.t().conj(),
            "negative": complex_values.conj().imag,
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer.clone(memory_format=torch.contiguous_format) if dense else buffer)
        self.register_buffer("tail", self.steps[1:])  # shares its memory
        self.register_buffer("passing", (torch.arange(6) + start)[1::2], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) @ self.turned


def plain_strided(start: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Strided(start)
    return {name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}


def same_tensors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def spread_strided(stage: int, dense_rank: int | None, folder: Path) -> None:
    rank, wanted = dist.get_rank(), plain_strided()
    torch.manual_seed(rank)
    model = Strided(100 * rank, dense=rank == dense_rank)
    strides = {name: buffer.stride() for name, buffer in model.named_buffers()}
    if stage == 0:
        minizero.Replicated(model)
        same_tensors(dict([*model.named_parameters(), *model.named_buffers()]), wanted)
        return
    torch.manual_seed(rank)
    zero = minizero.Zero(model, stage=stage)
    buffers = {name: value for name, value in wanted.items() if name in dict(model.named_buffers())}
    same_tensors(dict(model.named_buffers()), buffers)
    if rank != dense_rank:
        assert {name: buffer.stride() for name, buffer in model.named_buffers()} == strides
        neighbours = model.memory[1::2]
        assert torch.equal(neighbours, torch.arange(1.0, 8, 2) + 100 * rank)  # nobody wrote there
        model.steps[1] += 0.5
        assert model.tail[0] == model.steps[1]  # what shared memory does so still
        model.steps[1] -= 0.5
    del wanted["passing"]
    if rank == 0:
        same_tensors(zero.full_state(), wanted)
    else:
        assert zero.full_state() == {}
    checkpoint.save(folder, "first", zero, step=1)
    other = {name: value for name, value in plain_strided(50).items() if name in wanted}
    zero.load_full_state(other)
    same_tensors(dict(model.named_buffers()), {n: other.get(n, b) for n, b in buffers.items()})
    if rank == 0:
        same_tensors(zero.full_state(), other)
    else:
        zero.full_state()
    checkpoint.load(folder, zero)
    same_tensors(dict(model.named_buffers()), buffers)
    checkpoint.export(folder / "whole", zero)
    if rank == 0:
        same_tensors(safetensors.torch.load_file(folder / "whole"), wanted)
    model(torch.ones(2, 3)).sum().backward()
    assert rank == dense_rank or torch.equal(model.memory[1::2], neighbours)


@pytest.mark.ch15
@pytest.mark.parametrize(("stage", "dense_rank"), [(0, None), (0, 1), (1, 0), (2, 1), (3, None), (3, 1)])
def test_F80_a_buffer_has_rank_0s_values_whatever_its_strides_and_its_neighbours_keep_theirs(
    stage: int, dense_rank: int | None, tmp_path: Path
) -> None:
    run_ranks(2, spread_strided, stage, dense_rank, tmp_path)


class Follows(nn.Module):
    def __init__(self, interleaved: bool) -> None:
        super().__init__()
        memory = torch.arange(8.0)
        self.weight = nn.Parameter(memory[::2])
        self.register_buffer("view", memory[1::2] if interleaved else self.weight.detach()[1:])


def share_with_a_parameter(stage: int) -> None:
    minizero.Zero(Follows(interleaved=True), stage=stage)  # neighbours in memory, no element in common
    with pytest.raises(ValueError, match="buffer 'view' shares memory with parameter 'weight'"):
        minizero.Zero(Follows(interleaved=False), stage=stage)
    model = nn.BatchNorm1d(3 if dist.get_rank() else 4, affine=False)
    model.weight = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"rank 0 has buffer 'running_mean': \(4,\).*rank 1 has .*\(3,\)"):
        minizero.Zero(model, stage=stage)


@pytest.mark.ch15
def test_F80_a_buffer_that_is_a_view_of_a_parameter_is_refused_by_name() -> None:
    run_ranks(2, share_with_a_parameter, 2)
    run_ranks(2, share_with_a_parameter, 3)


# ---- F87: dtypes that the backend cannot send, or a checkpoint not hold

NOT_SENT_BY_GLOO = [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64]
FP8 = [dtype for dtype in SAFETENSORS_DTYPES if dtype.itemsize == 1 and dtype.is_floating_point]


def bytes_like(dtype: torch.dtype, seed: int, shape: tuple[int, ...] = (2, 3)) -> Tensor:
    count = torch.Size(shape).numel()
    values = torch.randint(2 if dtype == torch.bool else 100, (count * dtype.itemsize,), dtype=torch.uint8)
    return (values if seed == 0 else values * 0).view(dtype).view(shape)


class Numbers(nn.Module):
    """A frozen parameter and a buffer, turned, of each dtype."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        for dtype in (*NOT_SENT_BY_GLOO, *FP8):
            name = str(dtype).removeprefix("torch.")
            self.register_buffer(f"{name}_buffer", bytes_like(dtype, rank).t())
            if not dtype.is_complex:
                self.register_parameter(name, nn.Parameter(bytes_like(dtype, rank), requires_grad=False))
        for dtype in (torch.complex128, torch.complex32):
            self.register_buffer(f"passing_{dtype.itemsize}", bytes_like(dtype, rank), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.int16.abs().sum() + self.float8_e5m2.float().sum()


def raw(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, list[int]]:
    return {name: t.detach().contiguous().view(-1).view(torch.uint8).tolist() for name, t in tensors}


def send_numbers(stage: int, folder: Path) -> None:
    torch.manual_seed(0)
    plain = Numbers(0)
    torch.manual_seed(0)
    model = Numbers(dist.get_rank())
    if stage == 0:
        minizero.Replicated(model)
        assert raw(model.named_parameters()) == raw(plain.named_parameters())
        assert raw(model.named_buffers()) == raw(plain.named_buffers())
        return
    zero = minizero.Zero(model, stage=stage)
    assert raw(model.named_buffers()) == raw(plain.named_buffers())
    model(torch.ones(2, 3)).sum().backward()
    zero.zero_grad()
    with zero.gathered():
        assert raw(model.named_parameters()) == raw(plain.named_parameters())
    checkpoint.save(folder, "x", zero, step=1)
    state, wanted = zero.full_state(), plain.state_dict()
    if dist.get_rank() == 0:
        assert raw(state.items()) == raw(wanted.items())
    zero.load_full_state({name: torch.zeros_like(value) for name, value in wanted.items()})
    for name, values in raw(model.named_buffers()).items():
        assert name.startswith("passing") or not any(values)
    checkpoint.load(folder, zero)
    checkpoint.export(folder / "whole", zero)
    if dist.get_rank() == 0:
        assert raw(safetensors.torch.load_file(folder / "whole").items()) == {**raw(state.items())}
    assert raw(zero.unwrap().named_parameters()) == raw(plain.named_parameters())


@pytest.mark.ch25
@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_F87_every_dtype_is_sent_gathered_and_saved_bit_by_bit(stage: int, tmp_path: Path) -> None:
    run_ranks(2, send_numbers, stage, tmp_path)


def refused_tensors() -> dict[str, tuple[Tensor, str]]:
    values = torch.arange(4.0)
    return {
        "wide": (torch.ones(2, dtype=torch.complex128), "'wide' is torch.complex128, which a checkpoint cannot hold"),
        "sparse": (values.to_sparse(), r"'sparse' is no dense tensor \(torch.sparse_coo, torch.float32\)"),
        "quantized": (torch.quantize_per_tensor(values, 0.1, 0, torch.qint8), "'quantized' is no dense.*torch.qint8"),
        "nested": (torch.nested.nested_tensor([values, values]), "'nested' is no dense tensor"),
        "bits": (values.view(torch.bits8), "'bits' is torch.bits8, which a checkpoint cannot hold"),
    }


def refuse_numbers(stage: int) -> None:
    for name, (tensor, message) in refused_tensors().items():
        model = nn.Linear(2, 2)
        model.register_buffer(name, tensor)
        before = dict(model.named_parameters())
        with pytest.raises(TypeError, match=message):
            minizero.Zero(model, stage=stage)
        assert dict(model.named_parameters()) == before
        if not message.endswith("cannot hold"):
            with pytest.raises(TypeError, match=message):
                minizero.Replicated(model)
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(model.weight.detach().to(torch.float8_e4m3fn))
    with pytest.raises(TypeError, match=r"'weight' is torch.float8_e4m3fn, whose gradients cannot be added: freeze"):
        minizero.Zero(model, stage=stage)
    model = nn.Linear(2, 2)  # one rank's alone
    model.register_buffer("b", torch.ones(2, dtype=torch.complex128 if dist.get_rank() else torch.float32))
    with pytest.raises(ValueError, match=r"rank 1 has problem: 'b' is torch.complex128"):
        minizero.Zero(model, stage=stage)


@pytest.mark.ch25
@pytest.mark.filterwarnings("ignore")
def test_F87_what_cannot_be_sent_or_saved_is_refused_by_name_and_dtype_before_anything_changes() -> None:
    run_ranks(2, refuse_numbers, 3)
