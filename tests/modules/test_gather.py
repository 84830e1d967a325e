"""gather/: a unit's verbs and states, the hooks around forward and backward, the search for tensors."""

from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn

import minizero
from minizero.collectives import Ledger, World
from minizero.gather import State, Unit, in_backward
from minizero.gather.outputs import tensors_in
from minizero.sharding import FlatParameters, ShardedParameter, holders_of

pytestmark = pytest.mark.ch12


def _verbs() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    weight = layer.weight.detach().clone()
    flat = FlatParameters(holders_of(layer), rank, world, aliased=False)
    unit = Unit("layer", layer, [flat], World())
    assert unit.state == State.FULL

    unit.reshard()
    unit.reshard()  # doing it twice does no harm
    assert unit.state == State.SHARDED
    assert isinstance(layer.weight, ShardedParameter)
    assert flat.full.untyped_storage().nbytes() == 0

    unit.unshard()
    unit.unshard()
    assert unit.state == State.IN_FLIGHT
    assert isinstance(layer.weight, ShardedParameter)  # nobody reads what has not landed
    unit.wait()
    assert unit.state == State.FULL
    assert torch.equal(layer.weight, weight)

    unit.reshard()
    unit.unshard()
    unit.reshard()  # also out of the air
    assert flat.full.untyped_storage().nbytes() == 0
    assert repr(unit) == "Unit('layer', 8 parameters, SHARDED)"


def test_verbs_of_a_unit() -> None:
    run_ranks(2, _verbs)


def _events(prefetch: int) -> list[str]:
    """Which units were in memory when each block's forward and backward ran."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    zero = minizero.Zero(model, list(model), prefetch=prefetch)
    events: list[str] = []

    def note(text: str) -> None:
        here = [unit.name for unit in zero.units if unit.state != "SHARDED" and unit.flats]
        events.append(f"{text}: {' '.join(here)}")

    for i, block in enumerate(model):
        block.register_forward_pre_hook(lambda m, args, i=i: note(f"forward {i}"))
        block.register_forward_hook(
            lambda m, args, out, i=i: out.register_hook(lambda g: note(f"backward {i}")) and None
        )
    loss = model(torch.ones(2, 4)).sum()
    note("between")
    loss.backward()
    note("after")
    return events


@pytest.mark.parametrize(
    ("prefetch", "forward", "backward"),
    [
        (0, "0,1,2,3", "3,2,1,0"),
        (1, "0 1,1 2,2 3,3", "2 3,1 2,0 1,0"),
        (9, "0 1 2 3,1 2 3,2 3,3", "0 1 2 3,0 1 2,0 1,0"),
    ],
)
def test_units_come_ahead_and_leave(prefetch: int, forward: str, backward: str) -> None:
    expected = [f"forward {i}: {units}" for i, units in enumerate(forward.split(","))]
    expected += ["between: ", *(f"backward {3 - i}: {units}" for i, units in enumerate(backward.split(","))), "after: "]
    assert run_ranks(2, _events, prefetch) == [expected, expected]


def _verbs_of_a_step() -> str:
    """The verbs called in one step, with the unit's name: c(ompare), w(ait), and u(nshard) if it launches."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    zero = minizero.Zero(model, list(model))
    verbs: list[str] = []
    acts_when = {"unshard": State.SHARDED, "compare": State.IN_FLIGHT}

    def note(unit: Unit, verb: str) -> None:
        def noted(*args: Any) -> None:
            if unit.flats and unit.state == acts_when.get(verb, unit.state):
                verbs.append(verb[0] + unit.name)
            original(*args)

        original = getattr(unit, verb)
        setattr(unit, verb, noted)

    for unit in zero.units:
        for verb in ("unshard", "compare", "wait"):
            note(unit, verb)
    model(torch.ones(2, 4)).sum().backward()
    return " ".join(verbs)


def test_the_next_gather_is_launched_before_the_wait_and_after_the_comparison() -> None:
    # Later would leave the link idle; earlier, ranks that disagree would wait for messages that nobody sends (F13).
    forward = "u0 c0 u1 w0 c0 c1 u2 w1 c1 c2 w2 c2"
    assert run_ranks(2, _verbs_of_a_step)[0].startswith(forward)


def _frozen_units_in_backward() -> list[str]:
    """A frozen unit has no gradient that tells when backward is through with it."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    for block in model[1:3]:
        block.requires_grad_(False)
    zero = minizero.Zero(model, list(model), prefetch=0)
    seen: list[str] = []
    for block in model:
        block.register_forward_hook(
            lambda m, args, out: (
                out.register_hook(
                    lambda g: seen.append(" ".join(u.name for u in zero.units if u.state == "FULL" and u.flats))
                )
                and None
            )
        )
    model(torch.ones(2, 4)).sum().backward()
    return seen


def test_frozen_units_leave_in_backward_too() -> None:
    # unit 2 leaves when the gradient of its input is there, which is the moment at which unit 1 comes
    assert run_ranks(2, _frozen_units_in_backward)[0] == ["3", "2", "1 2", "0 1"]


def _bitwise(prefetch: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = minizero.GPT(minizero.GPTConfig(vocab_size=16, context=8, layers=3, width=8, heads=2))
    zero = minizero.Zero(model, prefetch=prefetch)
    optimizer = zero.optimizer(minizero.AdamW, lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        tokens = torch.randint(16, (2, 9), generator=generator)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return zero.full_state()


def test_prefetch_changes_no_bit() -> None:
    states = [run_ranks(2, _bitwise, prefetch)[0] for prefetch in (0, 1, 2)]
    assert len(states[0]) > 10
    for state in states[1:]:
        assert all(torch.equal(state[name], value) for name, value in states[0].items())


class _WithCache(nn.Module):
    """Returns what each block made beside the result, as a language model returns keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        cache = []
        for block in self.blocks:
            x = block(x).tanh()
            cache.append(x)
        return {"out": self.head(x), "cache": cache}


def _bytes_with_cache() -> tuple[int, int]:
    torch.manual_seed(0)
    model = _WithCache()
    zero = minizero.Zero(model, model.blocks)
    with Ledger() as ledger:
        model(torch.ones(2, 4))["out"].sum().backward()
    shards = sum(4 * flat.layout.shard_numel for unit in zero.units for flat in unit.flats)
    roll_calls = 2 * len(zero.units) * 8
    return ledger.sent["all_gather"], (2 * shards + roll_calls) * (dist.get_world_size() - 1)


def test_each_unit_is_gathered_twice_whatever_else_the_root_returns() -> None:
    for sent, expected in run_ranks(2, _bytes_with_cache):
        assert sent == expected


def test_in_backward() -> None:
    seen: list[bool] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda g: seen.append(in_backward()))
    (x * 2).sum().backward()
    assert seen == [True]
    assert not in_backward()


class Slotted:
    __slots__ = ("empty", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@dataclass
class Output:
    logits: torch.Tensor
    extra: object = None


class AttributeDict(OrderedDict):
    """The shape of transformers' ModelOutput: keys and attributes are the same things."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def test_tensors_in_any_container() -> None:
    t = [torch.zeros(i) for i in range(9)]
    attributes = AttributeDict()
    attributes["a"] = t[5]
    value = (
        [t[0], {"k": t[1], "n": None}, Output(t[2], extra=Output(t[3]))],
        Slotted(t[4]),
        attributes,
        SimpleNamespace(x=t[6]),
        {t[7]},
        t[0],  # seen already
        "text",
        3.5,
        torch.float32,
        nn.Linear(2, 2),  # its parameters are no output
        len,
    )
    cycle = [t[8]]
    cycle.append(cycle)
    found = tensors_in((value, cycle))
    assert sorted(x.numel() for x in found) == list(range(9))
    assert tensors_in(None) == []


def test_tensors_in_refuses_an_iterator() -> None:
    with pytest.raises(TypeError, match="cannot look for tensors in a generator"):
        tensors_in({"x": (torch.zeros(1) for _ in range(2))})
