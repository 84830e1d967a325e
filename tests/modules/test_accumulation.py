"""accumulation.py: what waiting costs and saves, what is counted and divided, and what a window refuses."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankFailure, preload, run_ranks
from reference import check_clean, full_gradients, in_double, mean_square
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import minizero
from minizero.accumulation import Window, gradient_bytes, no_sync, step_traffic, token_mean

pytestmark = pytest.mark.ch22
preload("minizero.accumulation")
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
SHARDED = pytest.mark.parametrize("stage", [1, 2, 3])
Parallel = minizero.Zero | minizero.Replicated


class Chain(nn.Module):
    """Three units of 64 elements; `skips` leaves one of them out, on the ranks that say so."""

    def __init__(self, recomputes: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.recomputes = recomputes

    def forward(self, x: Tensor, skips: int | None = None) -> Tensor:
        for i, layer in enumerate(self.layers):
            if self.recomputes is not None:
                x = checkpoint(layer, x.requires_grad_(), use_reentrant=self.recomputes)
            elif i == skips:
                x = x + 0 * layer(x).detach()  # ranks gather the same units, and their graphs differ
            else:
                x = layer(x).tanh()
        return x


def parallel(stage: int, model: nn.Module, lr: float = 1.0, **options: Any) -> tuple[Parallel, torch.optim.Optimizer]:
    """`model` in the given stage, with SGD."""
    if stage == 0:
        return minizero.Replicated(model, **options), torch.optim.SGD(model.parameters(), lr=lr)
    zero = minizero.Zero(model, stage=stage, **options)
    return zero, zero.optimizer(torch.optim.SGD, lr=lr)


def gradients(side: Parallel) -> dict[str, Tensor]:
    """The whole gradients, flat, on every rank."""
    if isinstance(side, minizero.Zero):
        side.reduce()
        return {name: gradient for name, gradient in full_gradients(side).items() if gradient is not None}
    return {name: p.grad.flatten() for name, p in side.model.named_parameters() if p.grad is not None}


def inputs(count: int, rows: int = 2) -> list[list[Tensor]]:
    """`inputs[micro-batch][rank]`, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    world = dist.get_world_size()
    return [[torch.randn(rows, 8, generator=generator).double() for _ in range(world)] for _ in range(count)]


def plain_gradients(model: nn.Module, losses: list[Tensor]) -> dict[str, Tensor]:
    """What one process gets for the sum of `losses`."""
    model.zero_grad()
    torch.stack(losses).sum().backward()
    return {
        n: (torch.zeros_like(p) if p.grad is None else p.grad).flatten().clone() for n, p in model.named_parameters()
    }


def chain(**options: Any) -> Chain:
    torch.manual_seed(0)
    return Chain(**options).double()


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


# ---- bytes -------------------------------------------------------------------------------------------------------


def _bytes(stage: int, held: bool) -> None:
    params, world = 3 * 64, dist.get_world_size()
    for count in (1, 3):
        side, optimizer = parallel(stage, Chain())
        with minizero.Ledger() as ledger:
            for i in range(count):
                with no_sync(side) if held and i < count - 1 else nullcontext():
                    mean_square(side.model, torch.ones(2, 8)).backward()
                if i == 0 and count > 1:
                    waiting = side._reducer.waiting() if isinstance(side, minizero.Zero) else []
                    owners = side.model.parameters() if stage == 0 else [p for _, p in side.named_slices()]
                    kept = [*waiting, *(p.grad for p in owners if p.grad is not None)]
                    assert sum(t.nbytes for t in kept) == gradient_bytes(params, world, stage, held)
            optimizer.step()
        # the roll call: four units, with the root, in forward and backward, 8 bytes to each other rank
        roll_calls = 4 * 2 * count * 8 * (world - 1) if stage == 3 else 0
        assert ledger.total == step_traffic(params, world, stage, count, 4, held) + roll_calls


@STAGES
@pytest.mark.parametrize("held", [False, True])
def test_each_stage_sends_and_keeps_what_the_functions_say(stage: int, held: bool) -> None:
    run_ranks(4, _bytes, stage, held)


def test_bytes_in_numbers() -> None:
    once = 1000 * 3 // 4 * 4
    assert [step_traffic(1000, 4, stage, 5, 4) // once for stage in range(4)] == [10, 2, 6, 15]
    assert [step_traffic(1000, 4, stage, 5, 4, held=True) // once for stage in range(4)] == [2, 2, 2, 11]
    assert [gradient_bytes(1001, 4, stage) for stage in range(4)] == [4004, 4004, 1004, 1004]
    assert [gradient_bytes(1001, 4, stage, held=True) for stage in range(4)] == [4004] * 4


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((10, 2, 4, 1, 4), "stage"), ((10, 2, 1, 0, 4), "micro_batches"), ((0, 2, 1, 1, 4), "params")],
)
def test_bytes_of_what_there_is_not(arguments: tuple[int, ...], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        step_traffic(*arguments)


# ---- no_sync -----------------------------------------------------------------------------------------------------


def _graphs_differ(stage: int, pattern: str) -> None:
    """Each micro-batch leaves out another unit, and another one on each rank: units are never complete alike."""
    rank, world = dist.get_rank(), dist.get_world_size()
    side, _ = parallel(stage, chain())
    data = inputs(len(pattern))
    for i, (letter, batch) in enumerate(zip(pattern, data, strict=True)):
        with no_sync(side) if letter == "N" else nullcontext():
            mean_square(lambda x, i=i: side.model(x, skips=(i + rank) % 4), batch[rank]).backward()
        if isinstance(side, minizero.Zero) and letter == "N":
            check_clean(side)
    model = chain()
    losses = [
        model(x, skips=(i + r) % 4).square().mean() / world for i, batch in enumerate(data) for r, x in enumerate(batch)
    ]
    assert_same(gradients(side), plain_gradients(model, losses))


@STAGES
@pytest.mark.parametrize("pattern", ["SSSS", "NNNS", "NSNS"])
def test_held_gradients_add_up_whatever_each_graph_leaves_out(stage: int, pattern: str) -> None:
    run_ranks(2, in_double, _graphs_differ, stage, pattern)


class Half(nn.Module):
    """Two layers, the second of which is left out unless `both`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = nn.Linear(8, 8), nn.Linear(8, 8), True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.second(x) if self.both else x


def _unit_in_halves(stage: int) -> None:
    """In the first backward each unit has the gradients of one half; in the next those of the other come first."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(Half(), Half()).double()
    plain = copy.deepcopy(model)
    side, _ = parallel(stage, model) if stage == 0 else parallel(stage, model, units=list(model))
    losses = []
    for i, batch in enumerate(inputs(3)):
        for half in (*model, *plain):
            half.both = i > 0
        with no_sync(side) if i < 2 else nullcontext():
            mean_square(side.model, batch[rank]).backward()
        losses += [mean_square(plain, x) / world for x in batch]
    assert_same(gradients(side), plain_gradients(plain, losses))


@STAGES
def test_a_unit_held_in_halves_stays_until_backward_has_left_it(stage: int) -> None:
    run_ranks(2, in_double, _unit_in_halves, stage)


def _recomputed(stage: int, reentrant: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    side, _ = parallel(stage, chain(recomputes=reentrant))
    data = inputs(3)
    for i, batch in enumerate(data):
        with no_sync(side) if i < 2 else nullcontext():
            mean_square(side.model, batch[rank]).backward()
    model = chain(recomputes=reentrant)
    losses = [mean_square(model, x) / world for batch in data for x in batch]
    assert_same(gradients(side), plain_gradients(model, losses))


@STAGES
@pytest.mark.parametrize("reentrant", [False, True])
def test_no_sync_with_activation_checkpointing(stage: int, reentrant: bool) -> None:
    run_ranks(2, in_double, _recomputed, stage, reentrant)


def _without_a_synced_backward(stage: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    data = inputs(2)
    model = chain()
    wanted = plain_gradients(model, [mean_square(model, x) / world for batch in data for x in batch])
    norm = torch.linalg.vector_norm(torch.cat(list(wanted.values()))).item()
    weights = {name: p.detach().clone().flatten() for name, p in model.named_parameters()}
    for clips, inside in ((False, False), (False, True), (True, False), (True, True)):
        zero, optimizer = parallel(stage, chain())
        with no_sync(zero):
            for batch in data:
                mean_square(zero.model, batch[rank]).backward()
            if inside:
                assert not clips or zero.clip_grad_norm(norm / 2) == pytest.approx(norm, rel=1e-12)
                optimizer.step()
        if not inside:
            assert not clips or zero.clip_grad_norm(norm / 2) == pytest.approx(norm, rel=1e-12)
            optimizer.step()
        state = zero.full_state()
        if rank == 0:
            for name, value in state.items():
                step = weights[name] - value.flatten()
                scale = norm / 2 / (norm + 1e-6) if clips else 1.0
                torch.testing.assert_close(step, wanted[name] * scale, rtol=0, atol=1e-12)
        check_clean(zero)


@SHARDED
def test_a_step_or_a_clip_takes_held_gradients_along(stage: int) -> None:
    run_ranks(2, in_double, _without_a_synced_backward, stage)


def _replicated_step_while_held() -> None:
    rank = dist.get_rank()
    side, optimizer = parallel(0, chain())
    other = nn.Linear(1, 1)
    other_optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    other(torch.ones(1, 1)).sum().backward()
    before = [p.detach().clone() for p in side.model.parameters()]
    data = inputs(3)
    with no_sync(side):
        mean_square(side.model, data[0][rank] * rank).backward()  # rank 0's gradient is zero
    other_optimizer.step()  # its parameters are not ours
    with pytest.raises(RuntimeError, match=r"step\(\) with gradients that were held back"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(side.model.parameters(), before, strict=True))
    side.model.zero_grad()
    optimizer.step()  # nothing there
    for batch in data[1:]:
        mean_square(side.model, batch[rank]).backward()
    optimizer.step()
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, [p.detach() for p in side.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*everyone, strict=True))


def test_a_step_of_a_replicated_model_with_held_gradients_is_refused() -> None:
    run_ranks(2, in_double, _replicated_step_while_held)


def _zero_grad_inside(stage: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    data = inputs(3)
    for zeroing in ("model", "optimizer"):
        side, optimizer = parallel(stage, chain())
        with no_sync(side):
            mean_square(side.model, data[0][rank]).backward()
            (side.model if zeroing == "model" else optimizer).zero_grad()
            mean_square(side.model, data[1][rank]).backward()
        mean_square(side.model, data[2][rank]).backward()
        model = chain()
        assert_same(
            gradients(side),
            plain_gradients(model, [mean_square(model, x) / world for batch in data[1:] for x in batch]),
        )


@STAGES
def test_zero_grad_inside_no_sync_forgets_what_waits(stage: int) -> None:
    run_ranks(2, in_double, _zero_grad_inside, stage)


class Stop(Exception):
    """Raised by a user's hook in backward."""


def _stop(gradient: Tensor) -> None:
    raise Stop


def failing(model: nn.Module, x: Tensor) -> Tensor:
    """A loss whose backward raises in the middle."""
    handle = model.layers[1].register_forward_hook(lambda m, a, output: output.register_hook(_stop) and None)
    loss = mean_square(model, x)
    handle.remove()
    return loss


def _raises_inside(stage: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    data = inputs(4)
    side, optimizer = parallel(stage, chain())
    with pytest.raises(Stop), no_sync(side):
        mean_square(side.model, data[0][rank]).backward()
        failing(side.model, data[1][rank]).backward()
    if isinstance(side, minizero.Zero):
        assert side._reducer.holds == (stage == 1)
        with pytest.raises(RuntimeError, match=r"incomplete: call zero_grad\(\) first"):
            optimizer.step()
    with pytest.raises(RuntimeError, match=r"incomplete: call zero_grad\(\) first"):
        mean_square(side.model, data[2][rank]).backward()
    optimizer.zero_grad()
    with no_sync(side):
        mean_square(side.model, data[2][rank]).backward()
    mean_square(side.model, data[3][rank]).backward()
    model = chain()
    losses = [mean_square(model, x) / world for batch in data[2:] for x in batch]
    assert_same(gradients(side), plain_gradients(model, losses))


@STAGES
def test_after_a_backward_that_raised_inside_nothing_goes_on_until_zero_grad(stage: int) -> None:
    run_ranks(2, in_double, _raises_inside, stage)


def _raises_on_one_rank(stage: int) -> None:
    rank = dist.get_rank()
    data = inputs(3)
    side, _ = parallel(stage, chain())
    with no_sync(side):
        mean_square(side.model, data[0][rank]).backward()
        loss = failing(side.model, data[1][rank]) if rank == 1 else mean_square(side.model, data[1][rank])
        try:
            loss.backward()
        except Stop:
            side.model.layers[0].register_forward_hook(lambda *_: None)  # caught, and on with the next batch
    mean_square(side.model, data[2][rank]).backward()


@pytest.mark.parametrize("stage", [0, 2])
def test_a_backward_that_raised_on_one_rank_stops_all(stage: int) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, in_double, _raises_on_one_rank, stage, group_timeout=3)
    assert sorted(failure.value.ranks) == [0, 1]
    assert "incomplete: call zero_grad() first" in str(failure.value)


def _leaves_by_an_exception(stage: int) -> None:
    side, _ = parallel(stage, chain())
    holder = side._reducer if isinstance(side, minizero.Zero) else side
    before = holder.holds
    with pytest.raises(ZeroDivisionError), no_sync(side):
        raise ZeroDivisionError
    assert holder.holds == before
    with no_sync(side):
        with no_sync(side):
            pass
        assert holder.holds
    assert holder.holds == before
    loss = mean_square(side.model, inputs(1)[0][dist.get_rank()])
    with pytest.raises(TypeError, match=r"no_sync\(\) takes a minizero.Zero or a minizero.Replicated, got a Chain"):
        no_sync(side.model).__enter__()
    loss.register_hook(lambda gradient: no_sync(side).__enter__() and None)
    with pytest.raises(RuntimeError, match="inside a backward"):
        loss.backward()


@STAGES
def test_no_sync_ends_as_it_began(stage: int) -> None:
    run_ranks(2, in_double, _leaves_by_an_exception, stage)


# ---- windows -----------------------------------------------------------------------------------------------------


def _uneven(stage: int, replicas: bool) -> None:
    """Micro-batches of different sizes, on ranks and in time; then a last window that is not full."""
    rank, world = dist.get_rank(), dist.get_world_size()
    options: dict[str, Any] = {}
    if replicas:  # {0, 1} and {2, 3} share the model each, {0, 2} and {1, 3} are replicas
        pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
        options = {"group": pairs[rank // 2], "replicas": pairs[2 + rank % 2]}
    side, optimizer = parallel(stage, chain(), **options)
    window, model = Window(side, 3), chain()
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    generator = torch.Generator().manual_seed(5)
    for count in (3, 3, 2):
        rows = torch.randint(1, 5, (count, world), generator=generator).tolist()
        data = [[torch.randn(n, 8, generator=generator).double() for n in row] for row in rows]
        for batch in data:
            loss = side.model(batch[rank]).square().sum()
            window.add(loss, 8 * len(batch[rank]))
            with nullcontext() if window.is_full else no_sync(side):
                loss.backward()
        loss = window.divide()
        every = torch.cat([x for batch in data for x in batch])
        expected = mean_square(model, every)
        plain.zero_grad()
        expected.backward()
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        assert_same(gradients(side), {name: p.grad.flatten() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
    assert (window.position, window.filled) == (8, 0)


@STAGES
def test_a_window_divides_by_all_there_was(stage: int) -> None:
    run_ranks(2, in_double, _uneven, stage, False)


@pytest.mark.parametrize("stage", [2])
def test_a_window_divides_over_replicas_too(stage: int) -> None:
    run_ranks(4, in_double, _uneven, stage, True)


def _refusals(stage: int) -> None:
    rank = dist.get_rank()
    side, optimizer = parallel(stage, chain())
    window = Window(side, 2)
    data = inputs(3)
    with pytest.raises(RuntimeError, match=r"each rank must have as many micro-batches, at least one, not \[0, 0\]"):
        window.divide()
    for loss, weight in ((torch.ones(2), 1.0), (torch.ones(()), -1.0), (torch.ones(()), math.nan)):
        with pytest.raises(ValueError, match="a micro-batch has one loss and a weight of 0 or more"):
            window.add(loss, weight)
    for batch in data[:2]:
        loss = mean_square(side.model, batch[rank])
        window.add(loss)
        loss.backward()
    with pytest.raises(RuntimeError, match="the window has its 2 micro-batches"):
        window.add(torch.ones(()))
    window.divide()
    with pytest.raises(RuntimeError, match=r"not \[0, 0\]"):
        window.divide()  # a second time
    optimizer.zero_grad()
    if rank == 0:
        window.add(torch.ones(()))
    with pytest.raises(RuntimeError, match=r"not \[1, 0\]"):
        window.divide()


@STAGES
def test_a_window_refuses_what_it_cannot_count(stage: int) -> None:
    run_ranks(2, in_double, _refusals, stage)


@pytest.mark.parametrize("micro_batches", [0, -1, 2.0])
def test_a_window_has_a_whole_number_of_micro_batches(micro_batches: Any) -> None:
    with pytest.raises(ValueError, match="micro_batches must be a positive integer"):
        Window(None, micro_batches)  # type: ignore[arg-type]


def _half_full(stage: int) -> None:
    """Saved in a half-full window and resumed: its micro-batches come again, and the weights are those of no break."""
    rank, data = dist.get_rank(), inputs(6)

    def run(window: Window, optimizer: torch.optim.Optimizer, last: int) -> None:
        while window.position + window.filled < last:
            loss = mean_square(window._parallel.model, data[window.position + window.filled][rank])
            window.add(loss)
            with nullcontext() if window.is_full else no_sync(window._parallel):
                loss.backward()
            if window.is_full:
                window.divide()
                optimizer.step()
                optimizer.zero_grad()

    unbroken, optimizer = parallel(stage, chain())
    run(Window(unbroken, 3), optimizer, 6)

    side, optimizer = parallel(stage, chain())
    window = Window(side, 3)
    run(window, optimizer, 5)
    state = window.state_dict()
    assert state == {"position": 3, "repeat": 2}
    resumed = Window(side, 3)
    resumed.load_state_dict(state)  # the weights are still those of the last step
    run(resumed, optimizer, 6)
    assert resumed.state_dict() == {"position": 6, "repeat": 0}
    for a, b in zip(weights(unbroken), weights(side), strict=True):
        assert torch.equal(a, b)


def weights(side: Parallel) -> list[Tensor]:
    return [
        p.detach()
        for p in ([p for _, p in side.named_slices()] if isinstance(side, minizero.Zero) else side.model.parameters())
    ]


@STAGES
def test_a_half_full_window_is_repeated_after_resuming(stage: int) -> None:
    run_ranks(2, in_double, _half_full, stage)


def _forget(stage: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    side, _ = parallel(stage, chain())
    window, data = Window(side, 2), inputs(3)
    for i, batch in enumerate(data):
        loss = mean_square(side.model, batch[rank])
        window.add(loss)
        loss.backward()
        if i == 0:
            window.forget()
            assert (window.position, window.filled) == (1, 0)
    window.divide()
    model = chain()
    losses = [mean_square(model, x) / (2 * world) for batch in data[1:] for x in batch]
    assert_same(gradients(side), plain_gradients(model, losses))


@STAGES
def test_a_forgotten_window_leaves_nothing(stage: int) -> None:
    run_ranks(2, in_double, _forget, stage)


# ---- tokens ------------------------------------------------------------------------------------------------------


def _token_mean() -> None:
    rank = dist.get_rank()
    for tokens in (rank, torch.tensor(rank), torch.tensor([5, 6])[:rank].numel()):
        loss = torch.tensor(6.0 * rank, requires_grad=True)
        mean = token_mean(loss, tokens)
        assert mean.item() == 12.0 * rank  # 6 over one token, of two ranks
        mean.backward()
        assert loss.grad.item() == 2.0
    nothing = token_mean(torch.zeros((), requires_grad=True) * 1, 0)
    assert nothing.item() == 0.0
    nothing.backward()
    with pytest.raises(ValueError, match="all ranks together have -2"):
        token_mean(torch.zeros(()), -1)
    with pytest.raises(ValueError, match="all ranks together have nan"):
        token_mean(torch.zeros(()), torch.tensor(math.nan if rank == 1 else 1.0))


def test_token_mean_counts_all_ranks_tokens() -> None:
    run_ranks(2, _token_mean)
