"""FAULTS.md F15, F16, F19, F20, F25 and F26 as a user of `initialize` meets them, on stages 1 to 3."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import preload, run_ranks
from torch import Tensor, nn

import minizero

preload("minizero.build")


class Weight(nn.Module):
    """One weight w; forward is w · x."""

    def __init__(self, value: float = 0.0, size: int = 1) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((size,), value))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


def start(stage: int, model: nn.Module, client: Any = None, schedule: Any = None, **keys: Any) -> Any:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "gradient_clipping": 0.0}
    config |= keys
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return minizero.initialize(model=model, optimizer=client, lr_scheduler=schedule, config=config)[0]


def value(engine: Any) -> list[float]:
    """The weight, from its master slices on all ranks, exact."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [x for _, piece in engine.zero.named_slices() for x in piece.tolist()])
    return [x for part in everyone for x in part]


def on_all_stages(fn: Any, *args: Any) -> None:
    for stage in (1, 2, 3):
        try:
            fn(stage, *args)
        except BaseException as error:
            error.add_note(f"in stage {stage}")
            raise


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def feed(engine: Any, *xs: float, steps: bool = True) -> None:
    for x in xs:
        engine.backward(engine(torch.tensor(x)) + x)
        if steps:
            engine.step()


# ---- F15, F16


def mean_of_all_micro_batches(stage: int) -> None:
    mine = [(1.0, 3.0), (5.0, 7.0)][dist.get_rank()]
    model = Weight()
    engine = start(stage, model, sgd(model), gradient_accumulation_steps=2)
    feed(engine, *mine)
    assert value(engine) == [-4.0]
    assert engine.mean_loss() == 4.0
    assert engine.get_global_grad_norm() == 4.0

    model = Weight()
    engine = start(stage, model, sgd(model), gradient_accumulation_steps=2)
    with engine.no_sync():
        engine.backward(engine(torch.tensor(mine[0])))
    engine.step()
    feed(engine, mine[1])
    assert value(engine) == [-4.0]


def test_f15_the_gradient_of_a_window_is_the_mean_over_micro_batches_and_ranks() -> None:
    run_ranks(2, on_all_stages, mean_of_all_micro_batches)


def windows_by_hand(stage: int) -> None:
    model = Weight()
    engine = start(stage, model, sgd(model), gradient_accumulation_steps=1)
    engine.backward(engine(torch.tensor(1.0)))
    with pytest.raises(RuntimeError, match=r"engine\.backward\(\) twice without engine\.step\(\)"):
        engine.backward(engine(torch.tensor(3.0)))
    engine.step()
    assert value(engine) == [-1.0]

    model = Weight()
    engine = start(stage, model, sgd(model), gradient_accumulation_steps=2, managed_gradient_accumulation=False)
    feed(engine, 1.0, 3.0, steps=False)
    engine.step()
    assert value(engine) == [-2.0]
    feed(engine, 1.0, 1.0, 1.0, 1.0, steps=False)  # four halves
    engine.step()
    assert value(engine) == [-4.0]
    assert (engine.global_steps, engine.global_samples) == (2, 12)
    engine.backward(engine(torch.tensor(3.0)), scale_wrt_gas=False)
    engine.step()
    assert value(engine) == [-7.0]


def test_f16_a_second_backward_without_a_step_is_refused_or_added_where_the_file_says_so() -> None:
    run_ranks(2, on_all_stages, windows_by_hand)


# ---- F19, F20


def clipping_of_what_was_scaled(stage: int, scale: dict[str, Any]) -> None:
    model = Weight(size=2)
    engine = start(stage, model, sgd(model), gradient_clipping=1.0, fp16={"enabled": True, **scale})
    before = engine.loss_scale()
    engine.backward(engine(torch.tensor([3.0, 4.0])))
    engine.step()
    assert before in (256.0, 1024.0)
    assert engine.get_global_grad_norm() == pytest.approx(5.0)
    assert value(engine) == pytest.approx([-0.6, -0.8], rel=1e-6)


def test_f19_clipping_and_the_norm_that_is_told_know_nothing_of_the_loss_scale() -> None:
    for scale in ({"loss_scale": 1024}, {"initial_scale_power": 8}):
        run_ranks(2, on_all_stages, clipping_of_what_was_scaled, scale)


def overflows(stage: int) -> None:
    """Two elements on three ranks: the gradient that overflows is in a shard that one rank alone has."""
    model = Weight(1.0, size=3)
    scaling = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "min_loss_scale": 4}
    engine = start(stage, model, torch.optim.Adam(model.parameters(), lr=0.5), fp16=scaling)
    finite, infinite = torch.ones(3), torch.tensor([1.0, 1.0, 60000.0])
    engine.backward(engine(finite))
    engine.step()
    before = value(engine)
    for attempt, scale in enumerate([8.0, 4.0, 4.0]):
        engine.backward(engine(infinite * (1.0 if dist.get_rank() == 2 else 0.0)))
        engine.step()
        assert (engine.was_step_applied(), engine.get_global_grad_norm()) == (False, None)
        assert (engine.skipped_steps, engine.loss_scale()) == (attempt + 1, scale)
        assert value(engine) == before
    engine.backward(engine(finite))
    engine.step()
    assert engine.was_step_applied()
    assert (engine.global_steps, engine.skipped_steps) == (5, 3)
    states = [state["step"] for state in engine.optimizer.state.values() if state]
    assert {float(step) for step in states} == {2.0}

    for keys, is_skipped in (
        ({"bf16": {"enabled": True}}, True),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, False),
        ({}, False),
    ):
        model = Weight(1.0, size=3)
        engine = start(stage, model, sgd(model), **keys)
        engine.backward(engine(torch.full((3,), float("nan") if dist.get_rank() == 1 else 1.0)))
        if is_skipped:
            engine.step()
            assert engine.skipped_steps == 1
        else:
            with pytest.raises(minizero.NonFiniteGradientError, match="no step was taken"):
                engine.step()
            engine.zero_grad()
        assert value(engine) == [1.0, 1.0, 1.0]
        engine.backward(engine(torch.ones(3)))
        engine.step()
        assert value(engine) == [0.0, 0.0, 0.0]


def test_f20_what_one_rank_finds_infinite_all_ranks_skip_or_raise_by_rule() -> None:
    run_ranks(3, on_all_stages, overflows)


# ---- F25


def rates_that_are_applied(stage: int, folder: str, own: bool) -> None:
    """Three steps of gradient 1, a window that overflows between the first two, saved and resumed before the last."""

    def begin() -> Any:
        model = Weight()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule: Any = {"scheduler": {"type": "ExponentialLR", "params": {"gamma": 0.5}}}
        keys = {} if own else schedule
        halve = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.5**k) if own else None
        scaling = {"enabled": True, "initial_scale_power": 2}
        return start(stage, model, optimizer, halve, gradient_accumulation_steps=4, fp16=scaling, **keys)

    engine, applied = begin(), []
    assert isinstance(engine.optimizer, torch.optim.Optimizer)
    assert engine.lr_scheduler.optimizer is engine.optimizer
    for window in ([1.0] * 4, [1.0, float("inf"), 1.0, 1.0], [1.0] * 4):
        before = value(engine)[0]
        feed(engine, *window)
        applied.append(before - value(engine)[0])
    engine.save_checkpoint(f"{folder}/{stage}{own}")
    engine = begin()
    engine.load_checkpoint(f"{folder}/{stage}{own}")
    assert engine.get_lr() == [0.25]
    assert engine.skipped_steps == 1
    before = value(engine)[0]
    feed(engine, *[1.0] * 4)
    applied.append(before - value(engine)[0])
    assert applied == [1.0, 0.0, 0.5, 0.25], applied
    assert engine.get_lr() == [0.125]


def test_f25_the_rates_that_are_applied_are_the_schedule_s_and_a_skipped_step_uses_up_none(tmp_path: Any) -> None:
    for own in (True, False):
        run_ranks(2, on_all_stages, rates_that_are_applied, str(tmp_path), own)


# ---- F26


def decay(stage: int) -> None:
    params = {"lr": 0.1, "weight_decay": 0.1}
    decayed = {
        0.99: [("Adam", {}), ("AdamW", {}), ("AdamW", {"adam_w_mode": False}), ("adam", {"torch_adam": True})],
        0.9: [("Adam", {"adam_w_mode": False})],
    }
    for wanted, cases in decayed.items():
        for kind, more in cases:
            engine = start(stage, Weight(1.0), optimizer={"type": kind, "params": params | more})
            feed(engine, 0.0)
            assert value(engine) == pytest.approx([wanted], rel=1e-6), (kind, more)
    for cls, wanted in ((torch.optim.Adam, 0.9), (torch.optim.AdamW, 0.99)):
        model = Weight(1.0)
        engine = start(stage, model, cls(model.parameters(), **params))
        feed(engine, 0.0)
        assert value(engine) == pytest.approx([wanted], rel=1e-6), cls


class ByNorm(torch.optim.Optimizer):
    """Steps along the gradient divided by its norm: of a slice that is another one than of the whole."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad / p.grad.norm()


def by_norm(stage: int) -> None:
    model = Weight(size=2)
    optimizer = ByNorm(model.parameters())
    with pytest.raises(TypeError, match="ByNorm is not known to treat every element by itself"):
        start(stage, model, optimizer)
    start(stage, model, optimizer, zero_allow_untested_optimizer=True)


def test_f26_adam_decays_as_its_name_and_adam_w_mode_say_and_norms_are_refused() -> None:
    run_ranks(2, on_all_stages, decay)
    run_ranks(2, on_all_stages, by_norm)
