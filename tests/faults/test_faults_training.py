"""Clipping, loading, param groups, optimizers on slices: faults F18, F23, F24 and F26 of public bug reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import harness
import pytest
import reference
import torch
import torch.distributed as dist
from torch import Tensor, nn

import minizero
from minizero.optimizer import ELEMENTWISE, clip_grad_norm

pytestmark = pytest.mark.ch14
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


class Dot(nn.Module):
    """The loss is the inner product of the weight and the input: the input is the gradient."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def slices(zero: minizero.Zero) -> list[Tensor]:
    return [piece for _, piece in zero.named_slices()]


def full(zero: minizero.Zero, name: str) -> Tensor:
    """The whole parameter, on every rank."""
    with zero.gathered():
        return zero.model.get_parameter(name).detach().clone()


# ---- F18: clipping by a local norm, non-finite norms -------------------------------------------------------------


def clip_shards(stage: int) -> None:
    model = Dot(2)
    zero = minizero.Zero(model, stage=stage)
    optimizer = zero.optimizer(torch.optim.SGD, lr=1.0)
    rank = dist.get_rank()
    for norm_type, norm in ((2.0, 5.0), (1.0, 7.0), (math.inf, 4.0), (3.0, 91.0 ** (1 / 3))):
        optimizer.zero_grad()
        model(torch.tensor([3.0, 4.0])).backward()
        assert zero.clip_grad_norm(1.0, norm_type) == pytest.approx(norm, rel=1e-12)
        (piece,) = slices(zero)
        assert piece.grad.tolist() == pytest.approx([(3.0, 4.0)[rank] / norm], rel=1e-5)
    # Per rank different: the mean over ranks is what counts, not the norm of any rank's own gradient.
    optimizer.zero_grad()
    model(torch.tensor([6.0, 0.0]) if rank == 0 else torch.tensor([0.0, 8.0])).backward()
    assert zero.clip_grad_norm(1.0) == 5.0
    optimizer.step()
    assert full(zero, "weight").tolist() == pytest.approx([1 - 0.6, 1 - 0.8], rel=1e-5)
    # Below the limit nothing changes, to the bit; clipping twice gives the clipped norm.
    optimizer.zero_grad()
    model(torch.tensor([3.0, 4.0])).backward()
    assert zero.clip_grad_norm(5.1) == 5.0
    assert slices(zero)[0].grad.tolist() == [(3.0, 4.0)[rank]]
    zero.clip_grad_norm(2.0)
    assert zero.clip_grad_norm(2.0) == pytest.approx(2.0, rel=1e-5)
    # Two backwards before one clip: the norm of the sum.
    optimizer.zero_grad()
    for _ in range(2):
        model(torch.tensor([3.0, 4.0])).backward()
    assert zero.clip_grad_norm(100.0) == 10.0
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm"):
            zero.clip_grad_norm(bad)
        with pytest.raises(ValueError, match="norm_type"):
            zero.clip_grad_norm(1.0, bad)


def clip_nonfinite(stage: int) -> None:
    """Three ranks; only the last one's shard, and for the second case only its own data, is not finite."""
    model = Dot(3)
    zero = minizero.Zero(model, stage=stage)
    optimizer = zero.optimizer(minizero.AdamW, lr=0.1, weight_decay=0.1)
    weights = torch.ones(3)
    for bad in (math.inf, -math.inf, math.nan):
        for on_last_rank_only in (False, True):
            for norm_type in (2.0, 1.0, math.inf):
                poisoned = not on_last_rank_only or dist.get_rank() == 2
                model(torch.tensor([3.0, 4.0, bad if poisoned else 1.0])).backward()
                with pytest.raises(minizero.NonFiniteGradientError, match=r"norm is (inf|nan)"):
                    zero.clip_grad_norm(1.0, norm_type)
                wanted = torch.tensor([[3.0, 4.0, bad][dist.get_rank()]])
                torch.testing.assert_close(slices(zero)[0].grad, wanted, rtol=0, atol=0, equal_nan=True)
                torch.testing.assert_close(full(zero, "weight"), weights, rtol=0, atol=0)
                assert not optimizer.state
                optimizer.zero_grad()
    # Training goes on as if the step had not been tried.
    twin = Dot(3)
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(3):
        gradient = torch.tensor([3.0, 4.0, 12.0 + step])
        model(gradient).backward()
        twin(gradient).backward()
        assert zero.clip_grad_norm(1.0) == pytest.approx(nn.utils.clip_grad_norm_(twin.parameters(), 1.0).item())
        for either in (optimizer, twin_optimizer):
            either.step()
            either.zero_grad()
    torch.testing.assert_close(full(zero, "weight"), twin.weight.detach(), rtol=1e-6, atol=0)


def clip_range() -> None:
    """Large and small gradients in low precision: the norm is taken in fp64, where no square overflows."""
    for dtype, value in ((torch.float32, 1e30), (torch.float32, 1e-30), (torch.float16, 6e4), (torch.bfloat16, 1e38)):
        model = Dot(4, dtype)
        zero = minizero.Zero(model, stage=2)
        model(torch.full((4,), value, dtype=dtype)).backward()
        exact = torch.tensor(value, dtype=dtype).double().item()
        assert zero.clip_grad_norm(1e-3) == pytest.approx(2 * exact, rel=1e-12)
    # 1000 elements of 0.01 in bf16: a sum of squares in bf16 would stop growing at 256 of them.
    piece = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    piece.grad = torch.full_like(piece, 0.01)
    exact = piece.grad.double().norm().item() * dist.get_world_size() ** 0.5
    assert clip_grad_norm([piece], 1.0) == pytest.approx(exact, rel=1e-12)


@STAGES
def test_F18_every_rank_clips_by_the_norm_of_all(stage: int) -> None:
    harness.run_ranks(2, clip_shards, stage)


@STAGES
def test_F18_a_nonfinite_norm_raises_on_every_rank_and_changes_nothing(stage: int) -> None:
    harness.run_ranks(3, clip_nonfinite, stage)


def test_F18_norm_neither_overflows_nor_stagnates() -> None:
    harness.run_ranks(2, clip_range)


# ---- F23: loading into a sharded model ---------------------------------------------------------------------------


class Tied(nn.Module):
    """Odd sizes, a tied head, a buffer, a frozen layer and two dtypes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3, dtype=dtype)
        self.blocks = nn.ModuleList(nn.Linear(3, 3, dtype=dtype) for _ in range(2))
        self.norm = nn.LayerNorm(3, dtype=torch.float32)
        self.head = nn.Linear(3, 7, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight
        self.blocks[0].bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x).tanh()
        return self.head((self.norm(x.float()) * self.scale).to(x.dtype))


def load_whole_state(stage: int) -> None:
    rank, tokens = dist.get_rank(), torch.tensor([[0, 3, 6], [5, 5, 1]])
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        torch.manual_seed(1)
        other = Tied(dtype)
        with torch.no_grad():
            other.scale.fill_(2.0)
        wanted = other(tokens).detach()
        model = Tied(dtype)
        zero = minizero.Zero(model, stage=stage)
        optimizer = zero.optimizer(torch.optim.AdamW, lr=0.0, weight_decay=0.0)
        assert not torch.equal(model(tokens), wanted)
        zero.load_full_state(other.state_dict() if rank == 0 else {})
        assert torch.equal(model(tokens), wanted)
        model(tokens).float().square().mean().backward()
        optimizer.step()
        assert torch.equal(model(tokens), wanted), "lr 0 must change nothing"
        state = zero.full_state()
        assert rank == 0 or state == {}
        if rank == 0:
            assert set(state) == set(other.state_dict())
            for name, value in other.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=0, atol=0)
            Tied(dtype).load_state_dict(state, strict=True)
        assert model.head.weight is model.embedding.weight


def load_bad_state(stage: int) -> None:
    torch.manual_seed(0)
    model = Tied(torch.float32)
    good = {name: value.clone() + 1 for name, value in model.state_dict().items()}
    zero = minizero.Zero(model, stage=stage)
    before = zero.full_state()
    bad: list[tuple[Any, str]] = [
        ({k: v for k, v in good.items() if k != "blocks.1.weight"}, "'blocks.1.weight' is missing"),
        ({k: v for k, v in good.items() if k != "head.weight"}, "'head.weight' is missing"),
        ({k: v for k, v in good.items() if k != "scale"}, "'scale' is missing"),
        (good | {"blocks.1.bias": torch.zeros(4)}, r"'blocks.1.bias' has shape \(4,\), the model has \(3,\)"),
        (good | {"norm.bias": torch.zeros(())}, r"'norm.bias' has shape \(\)"),
        (good | {"blocks.0.weight": torch.zeros(9)}, "'blocks.0.weight' has shape"),
        (good | {"extra": torch.zeros(1)}, "'extra' is not in the model"),
        (good | {"scratch": torch.zeros(1)}, "'scratch' is not in the model"),
        (good | {"blocks.1.bias": [0.0, 0.0, 0.0]}, "'blocks.1.bias'"),
        (good | {"blocks.1.bias": torch.zeros(3, device="meta")}, "'blocks.1.bias'"),
        (good | {3: torch.zeros(1), "extra": torch.zeros(1)}, "not in the model"),
        (None, "state"),
    ]
    for state, message in bad:
        # The other ranks bring a good one, which nobody reads.
        with pytest.raises(ValueError, match=message):
            zero.load_full_state(state if dist.get_rank() == 0 else good)
        after = zero.full_state()
        assert all(torch.equal(before[name], after[name]) for name in before), f"changed by a bad state: {message}"
    with zero.gathered(), pytest.raises(RuntimeError, match="gathered"):
        zero.load_full_state(good)
    zero.load_full_state(good if dist.get_rank() == 0 else None)
    after = zero.full_state()
    assert all(torch.equal(good[name], after[name]) for name in before)


@pytest.mark.ch15
@STAGES
def test_F23_loaded_weights_survive_the_first_step(stage: int) -> None:
    harness.run_ranks(2, load_whole_state, stage)


@pytest.mark.ch15
@STAGES
def test_F23_a_bad_state_raises_on_all_ranks_names_the_key_and_changes_nothing(stage: int) -> None:
    harness.run_ranks(2, load_bad_state, stage, group_timeout=10.0)


# ---- F24: several param groups -----------------------------------------------------------------------------------


def three_linears() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2))


def groups_of(model: nn.Module, by: Callable[[str], Any]) -> list[dict[str, Any]]:
    """Interleaved in the flat buffer: weight, bias, weight, bias, last weight and bias."""
    return [
        {"params": [by("0.weight"), by("2.weight")], "weight_decay": 0.1},
        {"params": [by("0.bias"), by("2.bias")], "weight_decay": 0.0},
        {"params": [by("4.bias"), by("4.weight")], "lr": 1e-3, "weight_decay": 0.05},
    ]


def param_groups(stage: int) -> None:
    options = {"lr": 1e-2, "betas": (0.8, 0.9)}
    for cls in (torch.optim.AdamW, minizero.AdamW):
        for by_name in (True, False):
            torch.manual_seed(0)
            plain = three_linears()
            torch.manual_seed(0)
            model = three_linears()
            zero = minizero.Zero(model, [model[2]] if by_name else None, stage=stage)
            optimizer = zero.optimizer(cls, groups_of(model, str if by_name else model.get_parameter), **options)
            expected = torch.optim.AdamW(groups_of(plain, plain.get_parameter), **options)
            assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
                (1e-2, 0.1),
                (1e-2, 0.0),
                (1e-3, 0.05),
            ]
            assert [len(g["params"]) for g in optimizer.param_groups] == [2, 2, 2]
            for batches in reference.random_batches(5, 4, 5):
                model(batches[dist.get_rank()]).square().mean().backward()
                torch.stack([plain(batch).square().mean() for batch in batches]).mean().backward()
                for either in (optimizer, expected):
                    either.step()
                    either.zero_grad()
                optimizer.param_groups[1]["lr"] = expected.param_groups[1]["lr"] = 0.05  # read at each step
            state = zero.full_state()
            for name, value in plain.state_dict().items() if dist.get_rank() == 0 else ():
                reference.assert_close(state[name], value, name)


def bad_param_groups(stage: int) -> None:
    model = three_linears()
    model[0].bias.requires_grad_(False)
    zero = minizero.Zero(model, stage=stage)
    for wrong in ("0.wieght", "0.bias", nn.Parameter(torch.zeros(2, 2)), model[0].bias):
        with pytest.raises(KeyError, match="not a trained parameter"):
            zero.optimizer(torch.optim.SGD, [{"params": ["0.weight", wrong]}], lr=1.0)
    with pytest.raises(ValueError, match="more than one parameter group"):
        zero.optimizer(torch.optim.SGD, [{"params": ["0.weight"]}, {"params": [model[0].weight]}], lr=1.0)
    # What is in no group stays, and a tied parameter answers to each of its names.
    tied = Tied(torch.float32)
    zero = minizero.Zero(tied, stage=stage)
    before = {name: full(zero, name) for name in ("embedding.weight", "norm.weight")}
    optimizer = zero.optimizer(torch.optim.SGD, [{"params": ["head.weight"]}], lr=1.0)
    tied(torch.tensor([[0, 3, 6]])).square().mean().backward()
    optimizer.step()
    assert not torch.equal(full(zero, "embedding.weight"), before["embedding.weight"])
    assert torch.equal(full(zero, "norm.weight"), before["norm.weight"])


@STAGES
@pytest.mark.parametrize("world", [2, 3])
def test_F24_param_groups_keep_their_options_by_name(stage: int, world: int) -> None:
    harness.run_ranks(world, param_groups, stage)


def test_F24_wrong_groups_are_refused_by_name() -> None:
    harness.run_ranks(2, bad_param_groups, 3)
    harness.run_ranks(1, bad_param_groups, 1)


# ---- F26: which Adam, and optimizers that are not element-wise ----------------------------------------------------


def random_parameters(dtype: torch.dtype, sizes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(size, generator=generator, dtype=dtype)) for size in sizes]


def run_steps(optimizer: torch.optim.Optimizer, steps: int = 50) -> list[Tensor]:
    """Values after `steps` steps of changing gradients, some of them zero or tiny, one parameter skipped in step 3."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    generator = torch.Generator().manual_seed(4)
    for step in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
            p.grad *= 10.0 ** -(step % 9)
            p.grad[: step % 3] = 0
        if step == 3:
            parameters[0].grad = None
        if step == 20:
            optimizer.param_groups[0]["lr"] /= 2
        optimizer.step()
    return [p.detach().clone() for p in parameters]


SIZES = (17, 1, 0, 64, 33)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_F26_adam_is_bitwise_the_adam_of_torch(name: str, weight_decay: float, dtype: torch.dtype) -> None:
    options = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    theirs = getattr(torch.optim, name)(random_parameters(dtype, SIZES), **options, foreach=False)
    ours = getattr(minizero, name)(random_parameters(dtype, SIZES), **options, fused=False)
    wanted, start = run_steps(theirs), random_parameters(dtype, SIZES)
    for found, value in zip(run_steps(ours), wanted, strict=True):
        assert torch.equal(found, value)
    assert not torch.equal(wanted[0], start[0])
    for mine, other in zip(ours.state.values(), theirs.state.values(), strict=True):
        assert set(mine) == set(other)
        assert all(torch.equal(mine[key], other[key]) for key in mine)
    # One kernel for all of it rounds differently, and no more than that.
    fused = run_steps(getattr(minizero, name)(random_parameters(dtype, SIZES), **options))
    theirs_fused = run_steps(getattr(torch.optim, name)(random_parameters(dtype, SIZES), **options, fused=True))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 3e-2)
    for found, same, value in zip(fused, theirs_fused, wanted, strict=True):
        assert torch.equal(found, same)
        torch.testing.assert_close(found, value, rtol=tolerance, atol=tolerance)


def test_F26_weight_decay_is_coupled_in_adam_and_decoupled_in_adamw() -> None:
    for fused in (True, False):
        for cls, wanted in ((minizero.Adam, 0.9), (minizero.AdamW, 0.99)):
            p = nn.Parameter(torch.tensor([1.0]))
            optimizer = cls([p], lr=0.1, weight_decay=0.1, fused=fused)
            p.grad = torch.zeros(1)
            optimizer.step()
            assert p.item() == pytest.approx(wanted, abs=1e-6)
    assert minizero.AdamW([p]).defaults["weight_decay"] == 0.01  # torch's default
    assert minizero.Adam([p]).defaults["weight_decay"] == 0.0


@pytest.mark.parametrize("cls", [minizero.Adam, minizero.AdamW])
def test_F26_adam_state_can_move_to_torch_and_back(cls: type[minizero.Adam]) -> None:
    """Same state dict as torch.optim's, so a run can change over; the fused and the plain loop share it, too."""
    options = {"lr": 1e-2, "weight_decay": 0.1}
    theirs_cls = getattr(torch.optim, cls.__name__)
    wanted = run_steps(theirs_cls(random_parameters(torch.float64, SIZES), **options, foreach=False), 10)
    first = cls(random_parameters(torch.float64, SIZES), **options, fused=False)
    run_steps(first, 5)
    second = theirs_cls(first.param_groups[0]["params"], **options, foreach=False)
    second.load_state_dict({"state": first.state_dict()["state"], "param_groups": second.state_dict()["param_groups"]})
    third = cls(second.param_groups[0]["params"], **options, fused=False)
    third.load_state_dict({"state": second.state_dict()["state"], "param_groups": third.state_dict()["param_groups"]})
    run_steps(third, 5)
    again = theirs_cls(random_parameters(torch.float64, SIZES), **options, foreach=False)
    run_steps(again, 5)
    for found, value in zip(run_steps(third, 0), run_steps(again, 5), strict=True):
        assert torch.equal(found, value)
    assert len(wanted) == len(SIZES)


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}, {"eps": -1.0}])
def test_F26_adam_names_the_option_that_is_out_of_range(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        minizero.AdamW([nn.Parameter(torch.zeros(1))], **bad)


class PerTensorNorm(torch.optim.Optimizer):
    """Scales each tensor's step by its own norm, as LAMB and LARS do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad / (p.grad.norm() + 1e-8), alpha=-group["lr"])


class MyAdamW(torch.optim.AdamW):
    """Might override anything."""


def optimizers_on_slices(stage: int) -> None:
    """Every element-wise optimizer trains slices, some of them empty, exactly like whole parameters."""
    options: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}}
    classes = sorted(ELEMENTWISE, key=lambda cls: (cls.__name__, cls.__module__))
    assert len(classes) == 13
    for cls in classes:
        extra = [{"fused": False}] if cls in (minizero.Adam, minizero.AdamW) else [{}, {"foreach": True}]
        for more in extra:
            arguments = options.get(cls.__name__, {"lr": 0.01, "weight_decay": 0.1})
            if cls is torch.optim.Rprop:
                arguments = {"lr": 0.01}
            compare_on_slices(cls, stage, **arguments, **more)
    compare_on_slices(torch.optim.Adam, stage, lr=0.01, amsgrad=True)
    compare_on_slices(torch.optim.RMSprop, stage, lr=0.01, centered=True, momentum=0.5)


def compare_on_slices(cls: type[torch.optim.Optimizer], stage: int, **arguments: Any) -> None:
    def build() -> nn.Module:  # the bias of one element and the 0-element weight leave slices empty on most ranks
        return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).double()

    pair = reference.Pair(build, stage, optimizer=cls, options=arguments)
    assert any(piece.numel() == 0 for piece in slices(pair.zero))
    for batches in reference.random_batches(5, 4, 3, dtype=torch.float64):
        pair.backward(batches)
        # The same gradient to the bit, from the reference, so that the updates can be compared to the bit.
        with torch.no_grad():
            pair.zero.clip_grad_norm(1e9)
        whole = torch.cat([p.grad.view(-1) for p in pair.reference.parameters()])
        (flat,) = pair.zero.units[0].flats
        whole = torch.cat([whole, whole.new_zeros(flat.layout.padded_numel - whole.numel())])
        mine = whole.view(dist.get_world_size(), -1)[dist.get_rank()]
        for i, piece in enumerate(flat.slices):
            part = mine[flat.layout.slice_of(i, dist.get_rank())]
            torch.testing.assert_close(piece.grad, part, rtol=1e-12, atol=1e-15)
            piece.grad.copy_(part)
        pair.step()
        state = pair.zero.full_state()
        for name, value in pair.reference.state_dict().items() if dist.get_rank() == 0 else ():
            assert torch.equal(state[name], value), f"{cls.__name__} {arguments} {name}"


def refused_optimizers(stage: int) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    zero = minizero.Zero(model, stage=stage)
    unsafe = [torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.SparseAdam, PerTensorNorm, MyAdamW]
    unsafe += [cls for cls in (getattr(torch.optim, "Muon", None),) if cls]
    for cls in unsafe:
        with pytest.raises(TypeError, match=f"{cls.__name__} is not known to treat every element by itself"):
            zero.optimizer(cls, lr=0.1)
    # The user may know better, and is told how to say so.
    optimizer = zero.optimizer(MyAdamW, elementwise=True, lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(TypeError, match="closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(TypeError, match="closure"):
        optimizer.step(closure=lambda: 0.0)


@STAGES
def test_F26_elementwise_optimizers_on_slices_equal_the_full_run_exactly(stage: int) -> None:
    harness.run_ranks(4, optimizers_on_slices, stage)


@STAGES
def test_F26_optimizers_that_mix_elements_are_refused_by_name(stage: int) -> None:
    harness.run_ranks(2, refused_optimizers, stage)
