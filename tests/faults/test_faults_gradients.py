"""Who reads gradients, forgets them and steps: faults F81 to F84, F100 and a part of F97 of public bug reports."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook

import minizero
from minizero.accumulation import Window, no_sync
from minizero.checkpoint import load, save
from minizero.offload import attach_offloaded, offload_optimizer
from minizero.optimizer import slice_groups
from minizero.sharding import ShardedAccessError

harness.preload("minizero.accumulation", "minizero.offload.step", "minizero.checkpoint.save_load")
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
SGD = torch.optim.SGD


class Parts(nn.Module):
    """The gradient of each part is the number it is called with; a part that is called with None is not used."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        for name, size in sizes.items():
            setattr(self, name, nn.Parameter(torch.zeros(size)))

    def forward(self, **numbers: float | None) -> Tensor:
        return torch.stack([getattr(self, n).sum() * x for n, x in numbers.items() if x is not None]).sum()


def values(side: Any) -> dict[str, float]:
    """The first element of each parameter, on every rank."""
    with side.gathered() if isinstance(side, minizero.Zero) else nullcontext():
        return {name: p[0].item() for name, p in side.model.named_parameters()}


def sharded(stage: int, model: nn.Module) -> Any:
    return minizero.Zero(model, stage=stage) if stage else minizero.Replicated(model)


def optimizer_of(side: Any, names: list[str], lr: float = 1.0) -> torch.optim.Optimizer:
    if isinstance(side, minizero.Zero):
        return side.optimizer(SGD, [{"params": names}], lr=lr)
    return SGD([side.model.get_parameter(name) for name in names], lr=lr)


# ---- F81: torch's GradScaler -------------------------------------------------------------------------------------


def scaled_by_torch(stage: int) -> list[Any]:
    """Each rank owns one of two parameters, and only the second one's gradient overflows."""
    model = Parts(p=4, q=4)
    side = sharded(stage, model)
    optimizer = optimizer_of(side, ["p", "q"])
    found: list[Any] = []
    for unscale, factor in ((False, 3e38), (True, 3e38), (False, 1.0), (True, 1.0)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        scaler.scale(model(p=1.0, q=factor)).backward()
        try:
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        except RuntimeError as error:
            assert "LossScaler" in str(error), error  # noqa: PT017
            found.append("refused")
        else:
            found.append(scaler.get_scale())
        found.append(values(side))
        optimizer.zero_grad()
    model(p=1.0, q=1.0).backward()
    optimizer.step(None)  # as accelerate calls it, behind a scaler that is switched off
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    return [*found, values(side)]


@pytest.mark.ch21
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_F81_no_rank_steps_where_another_skips(stage: int) -> None:
    first, second = harness.run_ranks(2, scaled_by_torch, stage)
    assert first == second
    if stage == 0:  # gradients are whole on every rank: all skip, then all step
        skipped = [2.0**15, {"p": 0.0, "q": 0.0}]
        taken = [2.0**16, {"p": -1.0, "q": -1.0}, 2.0**16, {"p": -2.0, "q": -2.0}]
        assert first == [*skipped, *skipped, *taken, {"p": -4.0, "q": -4.0}]
    else:
        assert first == ["refused", {"p": 0.0, "q": 0.0}] * 4 + [{"p": -2.0, "q": -2.0}]


# ---- F82: the gradient of a whole parameter ------------------------------------------------------------------------


def asked_for_gradients(stage: int) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].bias.requires_grad_(False)
    zero = minizero.Zero(model, stage=stage)
    optimizer = zero.optimizer(SGD, lr=0.0)
    x = torch.ones(2, 3)
    asks: list[Callable[[], Any]] = [
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: nn.utils.clip_grad_value_(list(model.parameters()), 1.0),
        lambda: nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]),
        lambda: [p.grad for p in model.parameters()],
        lambda: [setattr(p, "grad", None) for p in model.parameters()],
        lambda: setattr(model[0].weight, "grad", torch.zeros(3, 3)),
        lambda: model[1].zero_grad(),
    ]
    for hold in (False, True):
        if stage < 3:
            assert all(p.grad is None for p in model.parameters()), "there is none: that is no error"
        with no_sync(zero) if hold else nullcontext():
            model(x).sum().backward()
        for again in range(2):
            for ask in asks:
                with pytest.raises(ShardedAccessError, match=r"parameter '\d.*zero.clip_grad_norm\(\)"):
                    ask()
            assert model.to("cpu") is model
            optimizer.step()
            if stage < 3 and not again:
                out = torch.compile(model, backend="eager")(x)  # looks at all that a parameter has
                assert not out.requires_grad or out.grad_fn is not None
                torch._dynamo.reset()
        # What the message says does work. An element of the gradient is 2, or a sum of weights.
        nn.utils.clip_grad_value_([piece for _, piece in zero.named_slices()], 1e-3)
        count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert zero.clip_grad_norm(1.0) <= 1e-3 * count**0.5 * 1.01
        optimizer.zero_grad()
    if stage < 3:
        for copied in (copy.deepcopy(model[0].weight), pickle.loads(pickle.dumps(model[0].weight))):
            assert type(copied) is nn.Parameter
            assert copied.grad is None
    seen: list[Any] = []
    with zero.gathered():
        model[1].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    zero.unwrap()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    model(x).sum().backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0


@pytest.mark.ch13
@STAGES
def test_F82_the_gradient_of_a_whole_parameter_is_refused_not_none(stage: int) -> None:
    harness.run_ranks(2, asked_for_gradients, stage)


# ---- F83: two optimizers on one model ------------------------------------------------------------------------------


def two_optimizers(stage: int, offload: str, folder: str) -> list[Any]:  # noqa: PLR0915
    """Interleaved in the flat buffer, with a parameter that is in no optimizer."""
    model = Parts(body=3, head=2, rest=3, neck=1)
    side = sharded(stage, model)
    names = {"body": ["body", "neck"], "head": ["head"]}
    if offload:
        directory = folder if offload == "disk" else None
        options: dict[str, Any] = {"lr": 1.0, "momentum": 0.5, "directory": directory}
        body, head = (offload_optimizer(side, SGD, [{"params": n}], **options) for n in names.values())
        assert offload != "disk" or len(list(Path(folder).iterdir())) == 2 * dist.get_world_size()
    elif stage:
        body, head = (side.optimizer(SGD, [{"params": n}], lr=1.0, momentum=0.5) for n in names.values())
    else:
        body, head = (SGD([model.get_parameter(n) for n in some], lr=1.0, momentum=0.5) for some in names.values())

    def backward(number: float, held: bool = False, **but: float | None) -> None:
        with no_sync(side) if held else nullcontext():
            model(**({"body": number, "head": number, "rest": number, "neck": number} | but)).backward()

    found = []
    backward(1.0)
    head.zero_grad()
    body.step()  # body 1
    head.step()  # nothing: its gradient is forgotten, no zeros
    found.append(values(side))
    body.zero_grad()
    backward(2.0)
    body.step()  # body 2.5 further, head's gradient stays
    body.zero_grad()
    found.append(values(side))
    backward(4.0)
    head.step()  # head 2 + 4
    found.append(values(side))
    body.zero_grad()
    head.zero_grad()
    # Held back: forgotten is what waits, and only that.
    backward(1.0, held=True)
    body.zero_grad()
    backward(10.0, held=True, body=None if dist.get_rank() == 0 else 20.0)  # the mean is 10 on all ranks
    head.zero_grad(set_to_none=False)
    backward(100.0)
    body.step()
    head.step()
    found.append(values(side))
    body.zero_grad()
    head.zero_grad()
    window = Window(side, 2)
    for number in (1.0, 3.0):
        loss = torch.tensor(number)
        window.add(loss)
        backward(number)
    assert window.divide() == 2.0
    for optimizer in (head, body):
        optimizer.step()
        optimizer.zero_grad()
    found.append(values(side))
    backward(1.0)
    head.zero_grad()
    head.step()  # without a gradient: momentum does not carry it on
    body.step()
    return [*found, values(side)]


@pytest.mark.ch14
@pytest.mark.parametrize(("stage", "offload"), [*((s, "") for s in range(4)), (1, "memory"), (2, "disk"), (3, "disk")])
def test_F83_zero_grad_forgets_the_gradients_of_its_own_optimizer_only(
    stage: int, offload: str, tmp_path: Path
) -> None:
    alike = harness.run_ranks(2, two_optimizers, stage, offload, str(tmp_path))
    assert alike[0] == alike[1]
    wanted, body, head, speed_body, speed_head = [], 0.0, 0.0, 0.0, 0.0

    def step(of_body: float | None, of_head: float | None) -> dict[str, float]:
        nonlocal body, head, speed_body, speed_head
        if of_body is not None:
            speed_body = speed_body / 2 + of_body
            body -= speed_body
        if of_head is not None:
            speed_head = speed_head / 2 + of_head
            head -= speed_head
        return {"body": body, "head": head, "rest": 0.0, "neck": body}

    for gradients in ((1.0, None), (2.0, None), (None, 6.0), (110.0, 100.0), (2.0, 2.0), (1.0, None)):
        wanted.append(step(*gradients))
    assert alike[0] == wanted


def spoiled_for_one(stage: int) -> None:
    """After a backward that raised nobody steps, and no other backward runs, until both optimizers have forgotten."""
    model = Parts(body=3, head=2)
    zero = minizero.Zero(model, stage=stage)
    body, head = optimizer_of(zero, ["body"]), optimizer_of(zero, ["head"])

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError("in backward")

    loss = model(body=1.0, head=1.0)
    x = loss.clone()
    loss.register_hook(fail)
    with pytest.raises(ArithmeticError):
        x.backward()
    model(body=1.0, head=1.0)
    head.zero_grad()
    for bad in (body.step, head.step, lambda: zero.clip_grad_norm(1.0)):
        with pytest.raises(RuntimeError, match="incomplete: call zero_grad"):
            bad()
    body.zero_grad()
    model(body=1.0, head=1.0).backward()
    body.step()
    assert values(zero) == {"body": -1.0, "head": 0.0}


@pytest.mark.ch14
@STAGES
def test_F83_incomplete_gradients_stay_so_until_their_own_optimizer_forgets_them(stage: int) -> None:
    harness.run_ranks(2, spoiled_for_one, stage)


# ---- F84: param groups that come later -----------------------------------------------------------------------------


def groups_added(stage: int, offload: str, folder: str) -> None:  # noqa: PLR0915
    directory = folder + "/offload" if offload == "disk" else None

    def build() -> tuple[Any, torch.optim.Optimizer, nn.Module]:
        model = Parts(a=3, b=2, c=1, d=4, frozen=2)
        model.frozen.requires_grad_(False)
        zero = minizero.Zero(model, stage=stage)
        if offload:
            optimizer = offload_optimizer(zero, minizero.AdamW, [{"params": ["a"]}], lr=0.5, directory=directory)
        else:
            optimizer = zero.optimizer(minizero.AdamW, [{"params": ["a"]}], lr=0.5)
        return zero, optimizer, model

    def add(zero: Any, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        optimizer.add_param_group({"params": "b", "lr": 0.25})
        optimizer.add_param_group({"params": [model.c], "lr": 0.1})
        optimizer.add_param_group({"params": iter([dict(zero.named_slices())["d"]])})

    zero, optimizer, model = build()
    model(a=1.0, b=1.0, c=1.0, d=1.0, frozen=1.0).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = values(zero)
    assert [name for name, value in before.items() if value] == ["a"]
    wrong: list[tuple[Any, type[Exception], str]] = [
        ("frozen", KeyError, "'frozen' is not a trained"),
        ([model.frozen], KeyError, "'frozen' is not a trained"),
        (["b", "bb"], KeyError, "'bb' is not a trained"),
        ([nn.Parameter(torch.zeros(7))], KeyError, r"of shape \(7,\) is not a trained"),
        (["b", "a"], ValueError, "'a' would be in two param groups"),
        ([model.b, "b"], ValueError, "'b' would be in two param groups, or twice"),
    ]
    for params, error, message in wrong:
        with pytest.raises(error, match=message):
            optimizer.add_param_group({"params": params})
        assert len(optimizer.param_groups) == 1
    add(zero, optimizer, model)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25, 0.1, 0.5]
    files = 4 if offload == "disk" else 0
    assert not files or len(list(Path(directory or "").iterdir())) == files * dist.get_world_size()
    for _ in range(2):
        model(a=1.0, b=1.0, c=1.0, d=1.0).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = values(zero)
    moved = {name: round(before[name] - after[name], 1) for name in after}
    assert moved == {"a": 1.0, "b": 0.5, "c": 0.2, "d": 1.0, "frozen": 0.0}
    if offload == "disk":
        offloaded = optimizer.offload
        assert all(
            optimizer.state[piece][name].data_ptr() == place.data_ptr()
            for piece, places in offloaded._places.items()
            for name, place in places.items()
        )
        assert len(offloaded._places) == 4
        offloaded.close()
    save(folder, "one", zero, optimizer, step=3)
    zero, optimizer, model = build()
    add(zero, optimizer, model)
    load(folder, zero, optimizer)
    assert values(zero) == after
    assert [int(state["step"]) for state in optimizer.state.values()] == [3, 2, 2, 2]
    if offload == "disk":
        optimizer.offload.close()


@pytest.mark.ch14
@pytest.mark.parametrize(("stage", "offload"), [(1, ""), (2, ""), (3, ""), (2, "memory"), (3, "disk")])
def test_F84_a_group_of_model_parameters_becomes_one_of_slices(stage: int, offload: str, tmp_path: Path) -> None:
    harness.run_ranks(2, groups_added, stage, offload, str(tmp_path))


# ---- F100: optimizers that know nothing of sharding ----------------------------------------------------------------


class Mixing(SGD):
    """Might do anything."""


def other_optimizers(stage: int) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[1].bias.requires_grad_(False)
    early = torch.optim.AdamW(model.parameters(), lr=1.0)
    zero = minizero.Zero(model, stage=stage)
    late, fused = torch.optim.AdamW(model.parameters(), lr=1.0), SGD([*model[0].parameters()], lr=1.0, fused=True)
    pieces = SGD([piece for _, piece in zero.named_slices()], lr=1.0)
    plain = nn.Linear(2, 2)
    unrelated = SGD([*plain.parameters(), *([model[1].bias] if stage < 3 else [])], lr=1.0)
    before = zero.full_state()
    for backward in (False, True):
        if backward:
            model(torch.ones(1, 3)).sum().backward()
        for optimizer in (early, late, fused):
            with pytest.raises(RuntimeError, match=r"step\(\): parameter '0.weight' is sharded.*zero.optimizer"):
                optimizer.step()
        with pytest.raises(RuntimeError, match=r"the slice of parameter '0.weight' and is not attached.*zero.attach"):
            pieces.step()
        plain(torch.ones(1, 2)).sum().backward()
        unrelated.step()
    after = zero.full_state()
    assert all(torch.equal(before[name], after[name]) for name in before)
    # What is attached has to hold slices, and to be element-wise.
    for wrong in (early, late):
        with pytest.raises(TypeError, match=r"AdamW holds parameter '\d\.\w+', which is no slice"):
            zero.attach(wrong)
    with pytest.raises(TypeError, match="SGD holds parameter of shape"):
        zero.attach(unrelated)
    mixing = [cls(slice_groups(zero.flats), lr=0.1) for cls in (Mixing, torch.optim.LBFGS, torch.optim.Adafactor)]
    for optimizer in mixing:
        for attach in (zero.attach, lambda it: attach_offloaded(zero, it)):
            with pytest.raises(TypeError, match=f"{type(optimizer).__name__} is not known to treat every element"):
                attach(optimizer)
    assert zero.attach(mixing[0], elementwise=True) is mixing[0]
    assert zero.attach(pieces) is pieces
    zero.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    pieces.step()
    after = zero.full_state()
    assert not after or not torch.equal(before["0.weight"], after["0.weight"])
    # Whole again, the model is anybody's, but not theirs that hold slices.
    zero.unwrap()
    model(torch.ones(1, 3)).sum().backward()
    early.step()
    with pytest.raises(RuntimeError, match=r"step\(\) after unwrap\(\)"):
        pieces.step()


@pytest.mark.ch14
@STAGES
def test_F100_an_optimizer_that_knows_nothing_of_sharding_is_named_at_its_first_step(stage: int) -> None:
    harness.run_ranks(2, other_optimizers, stage)


# ---- F97: left behind ----------------------------------------------------------------------------------------------


def leave_nothing_behind() -> None:
    """Neither a Replicated that has held gradients nor a Zero leaves a hook in torch's table of the process."""
    gc.collect()
    before, p = len(hooks), nn.Parameter(torch.ones(2))
    other = SGD([p], lr=1.0)

    def make() -> None:
        for stage in range(4):
            side = sharded(stage, Parts(p=3))
            with no_sync(side):
                side.model(p=1.0).backward()

    for _ in range(2):
        make()
    assert len(hooks) > before
    gc.collect()
    assert len(hooks) == before
    # Garbage may be found while a step goes through the table, which must not change then.
    handle = register_optimizer_step_pre_hook(lambda *_: print(gc.collect()))
    make()
    other.step()
    handle.remove()
    gc.collect()
    assert len(hooks) == before
    zero = minizero.Zero(Parts(p=3))
    zero.unwrap()
    assert len(hooks) == before


@pytest.mark.ch22
def test_F97_no_hook_outlives_what_it_watches_for() -> None:
    harness.run_ranks(1, leave_nothing_behind)


def engine_at_its_beginning() -> None:
    model = Parts(p=3, q=2)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": 2}}
    engine, _, _, _ = minizero.initialize(model=model, optimizer=SGD(model.parameters(), lr=1.0), config=config)
    with pytest.raises(RuntimeError, match="before the first window is done"):
        engine.mean_loss()
    engine.backward(engine(p=1.0, q=1.0))
    with pytest.raises(ShardedAccessError, match=r"parameter 'p' is sharded.*gradient_clipping"):  # F82
        nn.utils.clip_grad_norm_(engine.parameters(), 1.0)
    engine.step()
    assert engine.mean_loss() == 0.0
    engine.optimizer.param_groups.clear()
    engine.optimizer.add_param_group({"params": [model.q]})  # F84
    engine.backward(engine(p=1.0, q=1.0))
    engine.step()
    assert values(engine.zero) == {"p": -1.0, "q": -2.0}
    assert all(piece.grad is None for _, piece in engine.zero.named_slices()), "what is in no group would add up"


@pytest.mark.ch26
def test_F97_there_is_no_mean_loss_before_the_first_window() -> None:
    harness.run_ranks(2, engine_at_its_beginning)
