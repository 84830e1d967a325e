"""Micro-batches: faults F15, F16, F17 and, without offload, F27 of public bug reports."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import preload, run_ranks
from torch import Tensor, nn

import minizero
from minizero.accumulation import Window, no_sync, token_mean

pytestmark = pytest.mark.ch22
preload("minizero.accumulation")
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Weights(nn.Module):
    """The loss is `w` times the input, summed: the input is the gradient."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def parallel(stage: int, model: nn.Module, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """`model` in the given stage, and SGD with learning rate 1."""
    if stage == 0:
        return minizero.Replicated(model, **options), torch.optim.SGD(model.parameters(), lr=1.0)
    zero = minizero.Zero(model, stage=stage, **options)
    return zero, zero.optimizer(torch.optim.SGD, lr=1.0)


def value(side: Any) -> list[float]:
    """The weight, whole, on every rank."""
    with side.gathered() if isinstance(side, minizero.Zero) else nullcontext():
        return side.model.weight.tolist()


# ---- F15: mean or sum --------------------------------------------------------------------------------------------


def mean_of_four(stage: int, holds: bool) -> tuple[list[float], float]:
    inputs = [[1.0, 3.0], [5.0, 7.0]][dist.get_rank()]
    side, optimizer = parallel(stage, Weights())
    window = Window(side, micro_batches=2)
    for x in inputs:
        loss = side.model(torch.tensor([x])) + x  # the constant moves the logged loss alone
        window.add(loss)
        with no_sync(side) if holds and not window.is_full else nullcontext():
            loss.backward()
    mean = window.divide()
    optimizer.step()
    return value(side), mean


@STAGES
@pytest.mark.parametrize("holds", [False, True])
def test_F15_the_step_is_the_mean_of_all_micro_batches_and_every_rank_logs_it(stage: int, holds: bool) -> None:
    assert run_ranks(2, mean_of_four, stage, holds) == [([-4.0], 4.0)] * 2


def divided_by_hand(stage: int) -> list[float]:
    inputs = [[1.0, 3.0], [5.0, 7.0]][dist.get_rank()]
    side, optimizer = parallel(stage, Weights())
    for x in inputs:
        (side.model(torch.tensor([x])) / 2).backward()
    optimizer.step()
    return value(side)


@STAGES
def test_F15_without_a_window_the_loss_is_divided_by_the_number_of_backwards(stage: int) -> None:
    assert run_ranks(2, divided_by_hand, stage) == [[-4.0]] * 2


# ---- F16: patterns -----------------------------------------------------------------------------------------------


def pattern_of(stage: int, pattern: str) -> list[float]:
    """Three windows of four micro-batches; all numbers are small integers, and the division is by 8: no rounding."""
    rank = dist.get_rank()
    side, optimizer = parallel(stage, Weights(5))
    seen = []
    for step in range(3):
        window = Window(side, micro_batches=4)
        for i, letter in enumerate(pattern):
            loss = side.model(torch.arange(5.0) * (i + 1) + 8 * rank + step)
            window.add(loss)
            with no_sync(side) if letter == "N" else nullcontext():
                loss.backward()
        window.divide()
        optimizer.step()
        optimizer.zero_grad()
        seen += value(side)
    return seen


@STAGES
@pytest.mark.parametrize("pattern", ["SSSS", "NNNS", "SNNS", "NSNS", "SSSN", "NNNN"])
def test_F16_every_pattern_gives_the_same_gradient(stage: int, pattern: str) -> None:
    wanted: list[float] = []
    for steps in (1, 2, 3):  # the mean over i of i + 1 is 2.5, of 8 * rank 4, of step 0, 1, 2
        wanted += [-steps * (2.5 * j + 4) - sum(range(steps)) for j in range(5)]
    assert run_ranks(2, pattern_of, stage, pattern) == [wanted] * 2


def two_by_hand(stage: int) -> list[float]:
    side, optimizer = parallel(stage, Weights())
    for x in (1.0, 3.0):
        side.model(torch.tensor([x])).backward()
    optimizer.step()
    return value(side)


@STAGES
def test_F16_two_backwards_by_hand_give_the_sum_of_both(stage: int) -> None:
    assert run_ranks(2, two_by_hand, stage) == [[-4.0]] * 2


# ---- F17: tokens -------------------------------------------------------------------------------------------------

TOKENS = [[4.0], [0.0, 0.0, 0.0], []]  # the losses of each rank's valid tokens


def token_step(stage: int, way: str) -> tuple[list[float], float]:
    """One step; the gradient of a token's loss, `weight * l`, is `l`."""
    losses = torch.tensor(TOKENS[dist.get_rank()])
    side, optimizer = parallel(stage, Weights())
    loss_sum = side.model(losses)  # also of no token at all: zero, with a graph
    if way == "window":
        window = Window(side, 1)
        window.add(loss_sum + losses.sum(), len(losses))
        loss_sum.backward()
        logged = window.divide()
    else:
        mean = token_mean(loss_sum, len(losses))
        mean.backward()
        logged = (mean + token_mean(losses.sum(), len(losses))).item()
    optimizer.step()
    return value(side), logged


@STAGES
@pytest.mark.parametrize("way", ["window", "token_mean"])
@pytest.mark.parametrize("world", [2, 3])
def test_F17_a_token_counts_once_wherever_it_is(stage: int, way: str, world: int) -> None:
    """1, not 2; also when the third rank has no token. With token_mean the mean over ranks is the loss."""
    found = run_ranks(world, token_step, stage, way)
    assert [w for w, _ in found] == [[-1.0]] * world
    logged = [loss for _, loss in found]
    assert logged == [1.0] * world if way == "window" else sum(logged) / world == pytest.approx(1.0)


def token_micro_batches(stage: int, way: str) -> list[float]:
    """Six valid tokens in three micro-batches on two ranks, one of which has none in a micro-batch, then in none."""
    side, optimizer = parallel(stage, Weights())
    data = [[[6.0, 6.0], [], [12.0]], [[], [0.0], [3.0, 3.0]]][dist.get_rank()]
    window, tokens = Window(side, 3), sum(map(len, data))
    for i, losses in enumerate(data):
        loss = side.model(torch.tensor(losses))
        with no_sync(side) if i < 2 else nullcontext():
            if way == "window":
                window.add(loss, len(losses))
                loss.backward()
            else:
                token_mean(loss, tokens).backward()
    if way == "window":
        window.divide()
    optimizer.step()
    optimizer.zero_grad()
    for _ in range(3):  # no valid token on any rank
        loss = side.model(torch.empty(0))
        window.add(loss, 0)
        loss.backward()
    assert window.divide() == 0.0
    optimizer.step()
    return value(side)


@STAGES
@pytest.mark.parametrize("way", ["window", "token_mean"])
def test_F17_tokens_of_micro_batches_count_once_too_and_none_at_all_is_no_nan(stage: int, way: str) -> None:
    assert run_ranks(2, token_micro_batches, stage, way) == [[-30.0 / 6]] * 2


# ---- F27: asynchronous work read too early -----------------------------------------------------------------------


class Layers(nn.Module):
    """Layer k's gradient is k + 1 everywhere, times the input; a rank can be made to come late to a layer."""

    def __init__(self, layers: int = 4, size: int = 7) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Weights(size) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        return sum((k + 1) * layer(x) for k, layer in enumerate(self.layers))  # type: ignore[return-value]


def delayed(stage: int, micro_batches: int, holds: bool, slow: int, options: dict[str, Any]) -> list[Tensor]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    side, optimizer = parallel(stage, Layers(), **options)
    if rank == slow:  # before its gradient is collected: others have finished theirs
        for layer in side.model.layers[1:3]:
            layer.register_full_backward_pre_hook(lambda module, gradients: time.sleep(0.003))
    results = []
    for step in range(2):
        window = Window(side, micro_batches)
        for i in range(micro_batches):
            generator = torch.Generator().manual_seed(100 * step + 10 * i + rank)
            loss = side.model(torch.randn(7, generator=generator))
            window.add(loss)
            with no_sync(side) if holds and not window.is_full else nullcontext():
                loss.backward()
        window.divide()
        optimizer.step()
        optimizer.zero_grad()
        state = side.full_state() if stage else side.model.state_dict()
        results += [value.clone() for value in state.values()]
    return results


def all_delays(stage: int) -> None:
    """Bitwise the same whatever is gathered ahead, however large the buckets, whoever is late."""
    # In stage 0 a bucket of 1 byte holds one parameter, of 70 two (28 bytes each), of 10**6 all.
    ways: list[dict[str, Any]] = (
        [{"bucket_bytes": size, "overlap": overlap} for size in (1, 70, 10**6) for overlap in (False, True)]
        if stage == 0
        else [{"prefetch": prefetch} for prefetch in (0, 1, 2)]
    )
    for micro_batches in (1, 3):
        for holds in (False, True)[:micro_batches]:
            reference = None
            for options in ways:
                for slow in (-1, 0, 1):
                    found = delayed(stage, micro_batches, holds, slow, options)
                    reference = reference or found
                    for a, b in zip(found, reference, strict=True):
                        assert torch.equal(a, b), (micro_batches, holds, options, slow)
            if reference:
                check_by_hand(reference, micro_batches)


def check_by_hand(found: list[Tensor], micro_batches: int) -> None:
    weights = torch.zeros(4, 7, dtype=torch.float64)
    for step, state in enumerate((found[:4], found[4:])):
        draws = [
            torch.randn(7, generator=torch.Generator().manual_seed(100 * step + 10 * i + rank)).double()
            for i in range(micro_batches)
            for rank in range(dist.get_world_size())
        ]
        weights -= torch.arange(1.0, 5.0)[:, None] * torch.stack(draws).mean(0)
        torch.testing.assert_close(torch.stack(state).double(), weights, rtol=1e-6, atol=1e-6)


@STAGES
def test_F27_late_ranks_and_gathering_ahead_change_no_bit(stage: int) -> None:
    run_ranks(2, all_delays, stage, timeout=120)
