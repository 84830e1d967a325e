"""Faults of mixed precision that others met: F02, F19 to F23, F45 and F47 in 16 bits (see CONTRIBUTING.md)."""

from __future__ import annotations

import copy
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from by_hand import ByHand
from reference import check_clean, random_batches
from torch import Tensor, nn

import minizero
from minizero import NonFiniteGradientError, ShardedAccessError
from minizero.precision import LossScaleError, LossScaler, Precision, gradients_are_finite
from minizero.zero import Zero

pytestmark = pytest.mark.ch21
harness.preload("minizero.precision")
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Scale(nn.Module):
    """y = weight * x: the gradient of the weight is x."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def everything(zero: Zero, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """A copy of all this rank has: masters, shards, moments, step counts."""
    flats = [flat for unit in zero.units for flat in unit.flats]
    tensors = [t for flat in flats for t in (flat.master, flat.shard)]
    tensors += [value for piece in optimizer.state for value in optimizer.state[piece].values()]
    return [t.detach().clone() for t in tensors]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---- F19: clipping scaled gradients ---------------------------------------------------------------------------------


def clipped(stage: int) -> None:
    model = Scale(0.5, 0.5)
    zero = Zero(model, stage=stage, dtypes=Precision(FP16))
    optimizer, scaler = zero.optimizer(torch.optim.SGD, lr=1.0), LossScaler(initial=1024, window=None)
    scaler.scale_loss(model(torch.tensor([3.0, 4.0])).sum()).backward()
    assert scaler.unscale(zero)
    assert zero.clip_grad_norm(1.0) == pytest.approx(5.0, rel=1e-6)
    optimizer.step()
    state = zero.full_state()
    if dist.get_rank() == 0:
        torch.testing.assert_close(0.5 - state["weight"], torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)


@STAGES
def test_F19_clipping_sees_the_gradients_without_the_scale(stage: int) -> None:
    harness.run_ranks(2, clipped, stage)


# ---- F20: one rank overflows ----------------------------------------------------------------------------------------


def spoil(zero: Zero, value: float) -> None:
    """Put `value` into one gradient that rank 2 owns."""
    zero.reduce()
    if dist.get_rank() == 2:
        max((piece for _, piece in zero.named_slices()), key=len).grad[0] = value


def one_rank_overflows(stage: int) -> list[float]:
    model, hand = Chain(), ByHand(Chain(), Precision(FP16), minizero.AdamW, lr=0.1, fused=False)
    zero = Zero(model, stage=stage, dtypes=Precision(FP16))
    optimizer = zero.optimizer(minizero.AdamW, lr=0.1, fused=False)
    scaler = LossScaler(initial=64, window=100, hysteresis=2)
    scales = []
    batches = random_batches(6, 4, 5)
    for step, (batch, bad) in enumerate(zip(batches, (0, torch.inf, 0, -torch.inf, torch.nan, 0), strict=True)):
        scaler.scale_loss(mean_square(model, batch[dist.get_rank()])).backward()
        if step == 2:  # a batch on one rank alone, whose gradient does not fit into fp16
            optimizer.zero_grad()
            x = batch[dist.get_rank()] * (2000 if dist.get_rank() == 1 else 1)
            scaler.scale_loss(mean_square(model, x)).backward()
            bad = torch.inf
        elif bad:
            spoil(zero, bad)
        before = everything(zero, optimizer)
        finite = scaler.unscale(zero)
        assert finite is (not bad)
        if finite:
            optimizer.step()
            hand.backward(lambda m, x: scaler.scale_loss(mean_square(m, x)), batch)
            for parameter in hand.master.parameters():
                parameter.grad /= scaler.scale
            hand.step()
        else:
            assert same(before, everything(zero, optimizer))
        scaler.update(finite)
        optimizer.zero_grad()
        hand.check(zero)  # as if the skipped batches had never been
        check_clean(zero)
        scales.append(scaler.scale)
    return scales


@STAGES
def test_F20_all_ranks_skip_what_one_rank_cannot_hold_and_nothing_changes(stage: int) -> None:
    assert harness.run_ranks(3, one_rank_overflows, stage) == [[64, 64, 32, 16, 8, 8]] * 3


def overflows_for_ever(stage: int) -> None:
    model = Scale(1.0)
    zero = Zero(model, stage=stage, dtypes=Precision(FP16))
    optimizer, scaler = zero.optimizer(torch.optim.SGD, lr=1.0), LossScaler(initial=4, hysteresis=1, max_skips=3)
    steps = 0
    with pytest.raises(LossScaleError, match="3 steps in a row had infinite or NaN gradients at a loss scale of 1,"):
        while steps < 100:
            steps += 1
            scaler.scale_loss(model(torch.tensor([torch.inf if dist.get_rank() == 1 else 1.0])).sum()).backward()
            scaler.update(scaler.unscale(zero))
            optimizer.zero_grad()
    assert steps == 5  # 4 -> 2 -> 1, and three more in vain


@STAGES
def test_F20_skipping_for_ever_is_an_error_on_every_rank(stage: int) -> None:
    harness.run_ranks(3, overflows_for_ever, stage)


def nan_without_a_scale(stage: int) -> None:
    for precision in (Precision(BF16), None):
        model = Chain()
        zero = Zero(model, stage=stage, dtypes=precision)
        optimizer = zero.optimizer(minizero.AdamW, lr=0.1)
        for batch in random_batches(2, 4, 5):
            mean_square(model, batch[dist.get_rank()]).backward()
            optimizer.step()
            optimizer.zero_grad()
        before = everything(zero, optimizer)
        mean_square(model, torch.ones(4, 5)).backward()
        assert gradients_are_finite(zero)
        spoil(zero, torch.nan)
        assert not gradients_are_finite(zero)
        with pytest.raises(NonFiniteGradientError) as error:
            zero.clip_grad_norm(1.0)
        assert "scale" not in str(error.value)
        optimizer.zero_grad()
        assert same(before, everything(zero, optimizer))
        mean_square(model, torch.ones(4, 5)).backward()
        assert gradients_are_finite(zero)
        optimizer.step()


@STAGES
def test_F20_without_a_scale_a_nan_is_found_on_every_rank_and_no_scale_is_spoken_of(stage: int) -> None:
    harness.run_ranks(3, nan_without_a_scale, stage)


# ---- F21: sums over ranks -------------------------------------------------------------------------------------------


def summed(stage: int) -> None:
    rank = dist.get_rank()
    for wire in (FP16, FP32):
        for each, mean in (([40000.0] * 4, 40000.0), ([2.0**-24] * 4, 2.0**-24), ([2048.0, 1.0, 1.0, 0.0], 512.5)):
            model = Scale(*[0.0] * 8)
            zero = Zero(model, stage=stage, dtypes=Precision(FP16, wire))
            model(torch.full((8,), each[rank])).sum().backward()
            zero.reduce()
            for _, piece in zero.named_slices():
                assert piece.grad is not None
                assert (piece.grad == mean).all(), f"{piece.grad} is not {mean}, sent in {wire}"


@STAGES
def test_F21_gradients_neither_overflow_nor_vanish_in_the_sum(stage: int) -> None:
    harness.run_ranks(4, summed, stage)


# ---- F22: masters and sums in fp32 ----------------------------------------------------------------------------------


def steps_below_the_last_digit(stage: int) -> None:
    model = Scale(1.0, 1.0)
    zero = Zero(model, stage=stage, dtypes=Precision(BF16))
    optimizer = zero.optimizer(torch.optim.SGD, lr=1e-3)
    for _ in range(100):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = zero.full_state()
    with zero.gathered():
        assert model.weight.dtype == BF16
        assert model.weight.tolist() == [0.8984375, 0.8984375]
    if dist.get_rank() == 0:
        torch.testing.assert_close(state["weight"], torch.tensor([0.9, 0.9]), rtol=1e-5, atol=0)
    # the same without masters
    model = Scale(1.0, 1.0).bfloat16()
    zero = Zero(model, stage=stage)
    optimizer = zero.optimizer(torch.optim.SGD, lr=1e-3)
    for _ in range(100):
        model(torch.ones(2, dtype=BF16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        assert model.weight.tolist() == [1.0, 1.0]


def thousand_gradients(stage: int) -> None:
    model = Scale(1.0, 1.0)
    zero = Zero(model, stage=stage, dtypes=Precision(BF16))
    optimizer = zero.optimizer(minizero.AdamW)
    for _ in range(1000):
        model(torch.ones(2)).sum().backward()
    zero.reduce()
    for _, piece in zero.named_slices():
        assert piece.grad is not None
        assert piece.grad.tolist() == [1000.0] * piece.numel()
    optimizer.step()
    dtypes = {value.dtype for state in optimizer.state.values() for value in state.values()}
    assert dtypes == {FP32}


@STAGES
def test_F22_masters_move_where_16_bits_would_not(stage: int) -> None:
    harness.run_ranks(2, steps_below_the_last_digit, stage)


@STAGES
def test_F22_a_thousand_gradients_of_one_are_a_thousand(stage: int) -> None:
    harness.run_ranks(2, thousand_gradients, stage)


# ---- F02: ranks that own nothing ------------------------------------------------------------------------------------


def empty_ranks(stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(1, 2, bias=False)
    hand = ByHand(copy.deepcopy(model), Precision(FP16), torch.optim.SGD, lr=0.1)
    zero = Zero(model, stage=stage, dtypes=Precision(FP16))
    optimizer, scaler = zero.optimizer(torch.optim.SGD, lr=0.1), LossScaler(initial=8, window=2, hysteresis=1)
    assert [piece.numel() for _, piece in zero.named_slices()] == [int(dist.get_rank() < 2)]
    for step, batch in enumerate(random_batches(5, 3, 1)):
        x = batch[dist.get_rank()]
        if step == 2 and dist.get_rank() == 3:  # a rank that owns nothing sends what does not fit
            x = torch.full_like(x, 30000.0)
        scaler.scale_loss(mean_square(model, x)).backward()
        finite = scaler.unscale(zero)
        assert finite is (step != 2)
        if finite:
            norm = zero.clip_grad_norm(100.0)
            hand.backward(lambda m, x: scaler.scale_loss(mean_square(m, x)), batch)
            gradient = hand.master.weight.grad
            gradient /= scaler.scale
            assert norm == pytest.approx(gradient.norm().item(), rel=1e-6)
            optimizer.step()
            hand.step()
        scaler.update(finite)
        optimizer.zero_grad()
        hand.check(zero)
    assert scaler.scale == 16  # 8, 16, halved, and doubled again
    state = zero.full_state()
    zero.load_full_state(state)
    hand.check(zero)


@STAGES
def test_F02_ranks_that_own_nothing_vote_clip_and_load(stage: int) -> None:
    harness.run_ranks(4, empty_ranks, stage)


# ---- F23: loaded weights reach the masters --------------------------------------------------------------------------


def loaded(stage: int) -> None:
    for dtype in (BF16, FP16):
        model, other = Chain(), Chain()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.normal_()
        hand = ByHand(other, Precision(dtype), torch.optim.SGD, lr=0.0)
        zero = Zero(model, stage=stage, dtypes=Precision(dtype))
        optimizer = zero.optimizer(torch.optim.SGD, lr=0.0)
        rank, batch = dist.get_rank(), random_batches(1, 4, 5)[0]
        state = other.state_dict() if rank == 0 else {}
        for broken, complaint in (
            ({name: value for name, value in state.items() if name != "head.bias"}, "'head.bias' is missing"),
            ({**state, "head.bias": torch.zeros(3)}, r"'head.bias' has shape \(3,\)"),
        ):
            with pytest.raises(ValueError, match=complaint):
                zero.load_full_state(broken)
        zero.load_full_state(state)
        for _ in range(2):
            hand.check(zero)
            loss = mean_square(model, batch[rank])
            assert loss == mean_square(hand.low, batch[rank])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        hand.check(zero)


@STAGES
def test_F23_loaded_weights_are_the_masters_and_stay(stage: int) -> None:
    harness.run_ranks(2, loaded, stage)


# ---- F45: changes in place ------------------------------------------------------------------------------------------


def surgery(stage: int) -> None:
    for by in ({0, 1}, {0}, {1}):  # which ranks make the change; rank 0's values count
        model = Chain()
        hand = ByHand(Chain(), Precision(BF16), minizero.AdamW, lr=0.0, weight_decay=0.0)
        zero = Zero(model, stage=stage, dtypes=Precision(BF16))
        optimizer = zero.optimizer(minizero.AdamW, lr=0.0, weight_decay=0.0)
        with zero.gathered(), torch.no_grad():
            if dist.get_rank() in by:
                model.blocks[1].weight.fill_(2.0)
                nn.init.zeros_(model.head.bias)
        if 0 in by:
            with torch.no_grad():
                hand.master.blocks[1].weight.fill_(2.0)
                nn.init.zeros_(hand.master.head.bias)
            hand.publish()
        hand.check(zero)
        for batch in random_batches(2, 4, 5):
            loss = mean_square(model, batch[dist.get_rank()])
            assert loss == hand.backward(mean_square, batch)[dist.get_rank()]
            loss.backward()
            optimizer.step()  # with lr 0
            hand.step()
            optimizer.zero_grad()
            hand.check(zero)


def careless(stage: int) -> None:
    """Without gathered(): an error where the values are away, and the change itself where they are here."""
    model = Chain()
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    zero = Zero(model, stage=stage, dtypes=Precision(BF16))
    optimizer = zero.optimizer(torch.optim.SGD, lr=0.0)
    for change in (lambda p: p.data.fill_(2.0), lambda p: nn.init.constant_(p, 3.0)):
        if stage == 3:
            with pytest.raises(ShardedAccessError, match=r"blocks\.1\.weight"):
                change(model.blocks[1].weight)
            continue
        change(model.blocks[1].weight)
        value = model.blocks[1].weight[0, 0].item()
        mean_square(model, torch.ones(2, 5)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert (model.blocks[1].weight == value).all()
        exact["blocks.1.weight"].fill_(value)
    state = zero.full_state()
    assert dist.get_rank() > 0 or all(torch.equal(state[name], value) for name, value in exact.items())


def averaged(stage: int) -> None:
    model, hand = Chain(), ByHand(Chain(), Precision(BF16), torch.optim.SGD, lr=0.1)
    zero = Zero(model, stage=stage, dtypes=Precision(BF16))
    optimizer = zero.optimizer(torch.optim.SGD, lr=0.1)
    mine = {name: piece.detach().clone() for name, piece in zero.named_slices()}
    whole = {name: p.detach().clone() for name, p in hand.master.named_parameters()}
    for batch in random_batches(3, 4, 5):
        mean_square(model, batch[dist.get_rank()]).backward()
        hand.backward(mean_square, batch)
        optimizer.step()
        hand.step()
        optimizer.zero_grad()
        for name, piece in zero.named_slices():
            mine[name].lerp_(piece.detach(), 0.1)
        for name, p in hand.master.named_parameters():
            whole[name].lerp_(p.detach(), 0.1)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for name, value in whole.items():
        torch.testing.assert_close(torch.cat([part[name] for part in everyone]), value.flatten(), rtol=0, atol=0)


@STAGES
def test_F45_in_bf16_changes_in_gathered_reach_shard_and_master_from_rank_0(stage: int) -> None:
    harness.run_ranks(2, surgery, stage)


@STAGES
def test_F45_in_bf16_changes_outside_gathered_are_refused_or_made(stage: int) -> None:
    harness.run_ranks(2, careless, stage)


@STAGES
def test_F45_in_bf16_an_average_on_slices_is_that_of_the_masters(stage: int) -> None:
    harness.run_ranks(3, averaged, stage)


# ---- F47: buffers ---------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stem(x)).relu())


def buffers(stage: int) -> None:
    rank = dist.get_rank()
    model, expected = Normed(), nn.BatchNorm1d(4)
    zero = Zero(model, units=[model.stem], stage=stage, dtypes=Precision(BF16))
    optimizer = zero.optimizer(minizero.AdamW, lr=0.01)
    seen: list[Tensor] = []
    model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
    for batch in random_batches(5, 8, 3):
        y = model(batch[rank])
        assert y.dtype == BF16
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected(seen[-1])
    assert {x.dtype for x in seen} == {FP32}
    norm = model.norm
    assert (norm.running_mean.dtype, norm.running_var.dtype) == (FP32, FP32)
    assert torch.equal(norm.running_mean, expected.running_mean)  # each rank's own, from its own data
    assert torch.equal(norm.running_var, expected.running_var)
    assert norm.num_batches_tracked.dtype == torch.int64
    assert norm.num_batches_tracked == 5
    means = [torch.zeros(4) for _ in range(dist.get_world_size())]
    dist.all_gather(means, norm.running_mean)
    assert not torch.equal(means[0], means[1])
    state = zero.full_state()
    if rank == 0:
        assert torch.equal(state["norm.running_mean"], norm.running_mean)
        assert state["norm.weight"].dtype == FP32
    zero.load_full_state(state)
    assert torch.equal(norm.running_mean, means[0])  # what was saved is rank 0's


@STAGES
def test_F47_running_statistics_stay_fp32(stage: int) -> None:
    harness.run_ranks(2, buffers, stage)
