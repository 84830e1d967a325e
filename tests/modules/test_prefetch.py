"""prefetch.py: the order of use is recorded, the next units come ahead within a budget, a wrong guess costs little."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankFailure, preload, run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import minizero
from minizero.gather import State, Unit
from minizero.overlap import ByBytes, ByCount, Record, Trace, full_bytes, tokens_to_hide, waits

pytestmark = pytest.mark.ch23
preload("minizero.overlap.prefetch", "minizero.overlap.trace")
USED = (3, 0, 5, 1, 4, 2)  # the order in which the blocks are used; they are defined in that of their numbers


class Blocks(nn.Module):
    """Six blocks and a head, used in any order; `plan` lists (block, how), how being "", "keep", "redo" or "raise"."""

    def __init__(self, sizes: tuple[int, ...] = (4, 4, 4, 4, 4, 4)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, size), nn.Tanh(), nn.Linear(size, 4)) for size in sizes)
        self.head = nn.Linear(4, 1)
        self.plan: list[tuple[int, str]] = [(i, "") for i in USED]

    def forward(self, x: Tensor) -> Tensor:
        for i, how in self.plan:
            if how == "raise":
                raise ArithmeticError("in the middle")
            if how in ("keep", "redo"):
                x = x + checkpoint(self.blocks[i], x, use_reentrant=how == "redo")
            else:
                x = x + self.blocks[i](x)
        return self.head(x)


def whole(model: nn.Module) -> None:
    """One forward and backward on this rank's data."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    model(torch.randn(3, 4, generator=generator).requires_grad_()).sum().backward()


def record_of(zero: minizero.Zero, action: Callable[[], Any]) -> Record:
    with Trace(zero) as trace:
        action()
    return trace.record


def late(record: Record) -> list[str]:
    return [span.unit.removeprefix("blocks.") for span in record.work if span.kind == "late"]


# ---- the order of use ---------------------------------------------------------------------------------------------


def waits_that_were_not_prefetched(prefetch: Any, used: tuple[int, ...] = USED) -> list[list[str]]:
    torch.manual_seed(0)
    model = Blocks()
    model.plan = [(i, "") for i in used]
    zero = minizero.Zero(model, model.blocks, prefetch=prefetch)
    found = [late(record_of(zero, lambda: whole(model))) for _ in range(3)]
    for _ in range(2):
        with torch.no_grad():
            found.append(late(record_of(zero, lambda: model(torch.ones(1, 4)))))
    return found


def test_after_one_pass_only_the_first_gather_of_a_pass_is_waited_for_in_full() -> None:
    first, *others = run_ranks(2, waits_that_were_not_prefetched, ByCount(1))[0]
    assert first[:2] == ["root", "3"]  # nothing known: the order of definition
    assert first[-1] == "root"  # backward is expected to be the reverse of the forward that was seen
    assert others == [["root", "root"], ["root", "root"], ["root"], ["root"]]


def test_the_fixed_order_waits_where_the_order_of_use_is_another() -> None:
    for used, least in ((USED, 6), ((5, 4, 3, 2, 1, 0), 12)):  # of 14 uses in a step
        fixed = run_ranks(2, waits_that_were_not_prefetched, 1, used)[0]
        assert [len(units) for units in fixed[:3]] >= [least] * 3
        assert run_ranks(2, waits_that_were_not_prefetched, ByCount(1), used)[0][1] == ["root", "root"]
    assert run_ranks(2, waits_that_were_not_prefetched, ByCount(0))[0][2] == ["root", *"305142", "root", *"241503"]


def in_the_order_of_definition(prefetch: Any) -> list[tuple[str, str]]:
    torch.manual_seed(0)
    model = Blocks()
    model.plan = [(i, "") for i in range(6)]
    zero = minizero.Zero(model, model.blocks, prefetch=prefetch)
    whole(model)
    return [(span.kind, span.unit) for span in record_of(zero, lambda: whole(model)).work]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_in_the_order_of_definition_it_does_what_the_fixed_order_does(count: int) -> None:
    assert run_ranks(2, in_the_order_of_definition, ByCount(count)) == run_ranks(2, in_the_order_of_definition, count)


def each_kind_of_pass_has_its_order() -> list[list[str]]:
    model = Blocks()
    zero = minizero.Zero(model, model.blocks, prefetch=ByCount(1))
    found = []
    for _ in range(3):
        model.plan = [(i, "") for i in USED]
        found.append(late(record_of(zero, lambda: whole(model))))
        model.plan = [(i, "") for i in (5, 2)]  # evaluation leaves early
        with torch.no_grad():
            found.append(late(record_of(zero, lambda: model(torch.ones(1, 4)))))
    return found[2:]


def test_an_evaluation_of_another_order_does_not_disturb_training() -> None:
    for found in run_ranks(2, each_kind_of_pass_has_its_order):
        assert found == [["root", "root"], ["root"]] * 2


def two_forwards_then_one_backward() -> list[str]:
    model = Blocks()
    zero = minizero.Zero(model, model.blocks, prefetch=ByCount(1))

    def both() -> None:
        first = model(torch.ones(1, 4))
        model.plan.reverse()
        (first + model(torch.ones(1, 4))).sum().backward()
        model.plan.reverse()

    both()
    both()
    return late(record_of(zero, both))


def test_two_forwards_before_a_backward() -> None:
    found = run_ranks(2, two_forwards_then_one_backward)[0]
    assert found.count("root") == 3  # the first of each pass
    assert found[-1] == "root"  # and no other in backward


class Plain(Blocks):
    """Its root has no parameters, and returns what the last block returned: backward reaches that block first."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, x: Tensor) -> Tensor:
        for i, _ in self.plan:
            x = self.blocks[i](x)
        return x


def without_a_head() -> list[str]:
    model = Plain()
    zero = minizero.Zero(model, model.blocks, prefetch=ByCount(1))
    whole(model)
    model.plan.remove((5, ""))
    surprised, used_to_it = (record_of(zero, lambda: whole(model)) for _ in range(2))
    vain = [span.unit for record in (surprised, used_to_it) for span in record.flights if span.kind == "vain"]
    return [*vain, *late(used_to_it)]


def test_a_root_that_returns_what_its_last_block_returned() -> None:
    assert run_ranks(2, without_a_head)[0] == ["blocks.5", "root", "2", "root"]


# ---- the budget ---------------------------------------------------------------------------------------------------


class Meter:
    """The most bytes, and units, that were gathered and not yet used, at any moment."""

    def __init__(self, zero: minizero.Zero) -> None:
        self.bytes = self.units = 0
        self._ahead: set[Unit] = set()
        need = zero._gatherer.need

        def watched(unit: Unit, moment: Any) -> None:
            need(unit, moment)
            self._ahead.discard(unit)
            self.bytes = max(self.bytes, sum(map(full_bytes, self._ahead)))
            self.units = max(self.units, len(self._ahead))

        zero._gatherer.need = watched
        for unit in zero.units:
            self._watch(unit, unit.unshard, unit.reshard)

    def _watch(self, unit: Unit, unshard: Callable[..., None], reshard: Callable[[], None]) -> None:
        def watched_unshard(*args: Any) -> None:
            if unit.state == State.SHARDED:
                self._ahead.add(unit)
            unshard(*args)

        def watched_reshard() -> None:
            self._ahead.discard(unit)
            reshard()

        unit.unshard, unit.reshard = watched_unshard, watched_reshard


SIZES = (4, 40, 8, 80, 16, 2)


def budget(prefetch: Any) -> tuple[int, int, list[int]]:
    torch.manual_seed(0)
    model = Blocks(SIZES)
    zero = minizero.Zero(model, model.blocks, prefetch=prefetch)
    meter = Meter(zero)
    for plan in (USED, USED, (3, 5, 2), (0, 1, 2, 3, 4, 5), (4, 4, 1, 4), USED, USED):
        model.plan = [(i, "") for i in plan]
        whole(model)
        assert all(unit.state == State.SHARDED for unit in zero.units)
    return meter.bytes, meter.units, [full_bytes(unit) for unit in zero.units]


def test_by_count_holds_at_most_so_many_units_ahead_also_after_wrong_guesses() -> None:
    for count in (0, 1, 2, 3):
        for _, units, _ in run_ranks(2, budget, ByCount(count)):
            assert units == count


def test_by_bytes_holds_at_most_so_many_bytes_ahead_also_after_wrong_guesses() -> None:
    sizes = run_ranks(2, budget, ByCount(0))[0][2]
    assert min(sizes[1:]) < 200
    for limit in (0, min(sizes[1:]), 1000, 3000, 10**9):
        for nbytes, units, _ in run_ranks(2, budget, ByBytes(limit)):
            assert nbytes <= limit
            assert (units > 0) == (limit > 0)


def wrong_guess() -> tuple[int, int, list[str]]:
    model = Blocks()
    zero = minizero.Zero(model, model.blocks, prefetch=ByCount(1))
    whole(model)
    usual = record_of(zero, lambda: whole(model))
    model.plan = [(i, "") for i in USED if i != 5]  # a branch is not taken
    other = record_of(zero, lambda: whole(model))
    started = [sum(span.kind == "launch" for span in record.work) for record in (usual, other)]
    return started[0], started[1], [span.unit for span in other.flights if span.kind == "vain"]


def test_a_wrong_guess_costs_one_gather_and_no_more() -> None:
    for usual, other, vain in run_ranks(2, wrong_guess):
        assert vain == ["blocks.5"]  # in forward; backward knows better
        assert other == usual - 2 + 1


# ---- nothing changes ----------------------------------------------------------------------------------------------


def random_passes(stage: int, prefetch: Any, seed: int) -> dict[str, Tensor]:
    """Training, evaluation, branches, units used twice, recomputation both ways, exceptions: the same on all ranks."""
    torch.manual_seed(0)
    model = Blocks()
    zero = minizero.Zero(model, model.blocks, stage=stage, prefetch=prefetch)
    optimizer = zero.optimizer(minizero.AdamW, lr=0.1)
    chance, data = random.Random(seed), torch.Generator().manual_seed(dist.get_rank())
    for _ in range(12):
        hows = ["", "", "keep", "redo"] if chance.random() < 0.6 else [""]
        model.plan = [(chance.randrange(6), chance.choice(hows)) for _ in range(chance.randint(2, 8))]
        breaks = chance.random() < 0.3
        if breaks:
            model.plan.insert(chance.randrange(len(model.plan)), (0, "raise"))
        x = torch.randn(3, 4, generator=data).requires_grad_()
        in_backward = chance.random() < 0.3
        try:
            if chance.random() < 0.3:
                with torch.no_grad():
                    model(x)
            else:
                loss = model(x).square().mean()
                if in_backward:
                    x.register_hook(fail)
                loss.backward()
                optimizer.step()
        except ArithmeticError:
            pass
        optimizer.zero_grad()
        assert stage < 3 or all(unit.state == State.SHARDED for unit in zero.units)
    return zero.full_state()


def fail(gradient: Tensor) -> None:
    raise ArithmeticError("in backward")


@pytest.mark.parametrize(("stage", "seeds"), [(1, 1), (2, 1), (3, 4)])
def test_random_passes_end_with_the_same_bits(stage: int, seeds: int) -> None:
    for seed in range(seeds):
        off = run_ranks(2, random_passes, stage, 0, seed)[0]
        for prefetch in (ByCount(1), ByCount(3), ByBytes(600)) if stage == 3 else (ByCount(2),):
            on = run_ranks(2, random_passes, stage, prefetch, seed)[0]
            assert all(torch.equal(on[name], value) for name, value in off.items())


# ---- what goes wrong ----------------------------------------------------------------------------------------------


def ranks_take_different_branches() -> None:
    model = Blocks()
    minizero.Zero(model, model.blocks, prefetch=ByCount(2))
    whole(model)
    if dist.get_rank() == 1:
        model.plan = model.plan[2:]
    whole(model)


def test_ranks_that_take_different_branches_are_told_so() -> None:
    with pytest.raises(RankFailure, match=r"ranks \[1\] ran other units before it than rank 0"):
        run_ranks(2, ranks_take_different_branches, timeout=30.0, group_timeout=5.0)


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_a_budget_is_a_whole_number(value: Any) -> None:
    with pytest.raises(ValueError, match="count must be an integer of 0 or more"):
        ByCount(value)
    with pytest.raises(ValueError, match="nbytes must be an integer of 0 or more"):
        ByBytes(value)


# ---- arithmetic ---------------------------------------------------------------------------------------------------


def test_waits_without_prefetch_are_the_gathers_and_with_it_what_computing_does_not_hide() -> None:
    assert waits([3, 3, 3], [1, 1, 1], 0) == [1, 1, 1]
    assert waits([3, 3, 3], [1, 1, 1], 1) == [1, 0, 0]
    assert waits([1, 1, 1], [3, 3, 3], 1) == [3, 2, 2]
    assert waits([1, 1, 1], [3, 3, 3], 2) == [3, 2, 2]  # the link is the bottleneck: more ahead brings nothing
    assert waits([5, 1, 1, 5], [1, 1, 4, 4], 1) == [1, 0, 3, 3]
    assert waits([5, 1, 1, 5], [1, 1, 4, 4], 2) == [1, 0, 0, 2]  # uneven units: it brings something
    assert waits([], [], 1) == []
    with pytest.raises(ValueError, match="one length"):
        waits([1], [], 0)


def test_tokens_to_hide_is_where_computing_and_gathering_take_as_long() -> None:
    flops, bandwidth, world, params = 1e12, 1e9, 4, 12345
    tokens = tokens_to_hide(flops, bandwidth, 2, world)
    assert 2 * params * tokens / flops == pytest.approx(params * 2 * (world - 1) / world / bandwidth)
