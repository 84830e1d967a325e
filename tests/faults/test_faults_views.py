"""Faults of what outlives a unit and looks at its memory, and of what people attach to parameters (F79, F86, F96)."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import preload, run_ranks
from reference import Pair, check_clean, in_double, random_batches, train_like_one_process
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

import minizero
from minizero.collectives import RollCall, TorchTransport
from minizero.sharding import ShardedAccessError

pytestmark = pytest.mark.ch12
preload("transformers.utils")
every_stage = pytest.mark.parametrize("stage", [1, 2, 3])

# ---- F79: outputs that share memory with parameters --------------------------------------------------------------

Named = namedtuple("Named", "w note")


@dataclass(frozen=True)
class Frozen:
    w: Any


class Slots:
    __slots__ = ("w",)

    def __init__(self, w: Any) -> None:
        self.w = w


@dataclass
class Output(ModelOutput):
    w: Any = None
    more: Any = None


# For each way to hand a tensor out: what the unit returns, and how the caller takes it.
PACKED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "bare": (lambda t: t, lambda o: o),
    "tuple": (lambda t: (3, t), lambda o: o[1]),
    "list in dict": (lambda t: {"a": [t, t]}, lambda o: o["a"][0] + 0 * o["a"][1]),
    "named tuple": (lambda t: Named(w=(t,), note="n"), lambda o: o.w[0] if o.note == "n" else None),
    "frozen dataclass": (Frozen, lambda o: o.w),
    "slots": (Slots, lambda o: o.w),
    "namespace": (lambda t: SimpleNamespace(w=deque([t])), lambda o: o.w[0]),
    "ModelOutput": (lambda t: Output(w=t, more=(t,)), lambda o: o.w + 0 * o["w"] + 0 * o.more[0]),
    "UserDict": (lambda t: UserDict(w=OrderedDict(w=t)), lambda o: o["w"]["w"]),
    "set": (lambda t: {t}, lambda o: next(iter(o))),
    "frozenset": (lambda t: frozenset([t]), lambda o: next(iter(o))),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda w: w[1:3],
    "parameter": lambda w: w,
    "view of a view": lambda w: w.t()[1:].t()[:2].unsqueeze(0),
    "detached": lambda w: w.detach()[:2],
    "data": lambda w: w.data[2:],
    "expanded": lambda w: w[:1].expand(3, 4),
    "unbound": lambda w: w.unbind(0)[1],
    "split": lambda w: w.split(2)[1],
    "diagonal": lambda w: w.diagonal(),
    "strided": lambda w: w.as_strided((2, 2), (5, 1), 2),
}


class Positions(nn.Module):
    """Learned positions: returns a view of its table, as `way` and `packed` say."""

    def __init__(self, way: str, packed: str, seed: int = 0) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.linspace(0, 1, 3))
        self.table = nn.Parameter(torch.arange(16.0).view(4, 4).sin() + seed)
        self.register_buffer("ones", torch.ones(4))
        self.way, self.packed = way, packed

    def forward(self) -> Any:
        return PACKED[self.packed][0](VIEWS[self.way](self.table))


class WithPositions(nn.Module):
    """Each position table is a unit and is used by the root, between layers that are units too."""

    def __init__(self, ways: list[tuple[str, str]], checkpointed: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.tables = nn.ModuleList(Positions(way, packed, i) for i, (way, packed) in enumerate(ways))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in ways)
        self.checkpointed = checkpointed
        self.tables.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        for table, layer in zip(self.tables, self.layers, strict=True):
            out = checkpoint(table, use_reentrant=False) if self.checkpointed else table()
            x = layer(x).tanh() * (1 + PACKED[table.packed][1](out).square().sum())
        return x


def return_views(stage: int) -> None:
    ways = [*zip(VIEWS, PACKED, strict=False), *(("slice", packed) for packed in PACKED)]
    units = lambda model: [*model.tables, *model.layers]  # noqa: E731
    for checkpointed, frozen in ((False, False), (True, False), (False, True)):
        pair = Pair(partial(WithPositions, ways, checkpointed, frozen), stage, units=units)
        x = torch.ones(2, 4)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(pair.model(x), pair.reference(x))
        for batch in random_batches(2, 2, 4):
            pair.backward(batch)
            pair.check_gradients()
            pair.step()
        pair.check()


@every_stage
def test_F79_views_as_outputs_have_the_values_and_gradients_of_the_plain_model(stage: int) -> None:
    run_ranks(2, in_double, return_views, stage)


class Passing(nn.Module):
    """Returns a view of what it is given, and of its own parameter; `inner`, a unit in this one, does too."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.rand(4, 4))
        self.inner = inner

    def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
        if self.inner is None:
            return given[1:], self.own[:3]
        mine, inners = self.inner(self.own)
        assert mine._is_view(), "memory that stays is not copied"
        return given[1:] + mine, inners


class Handing(nn.Module):
    """The root hands its parameter to the unit in it, and returns views of its own, of a tied one and of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.rand(4, 4))
        self.passing = Passing(Passing())
        self.tied = Positions("slice", "bare")
        self.tied.table = self.own
        self.register_buffer("table", torch.rand(4, 4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        given, inners = self.passing(self.own)
        return {"y": x * given.sum(), "inner": inners, "own": self.own, "tied": self.tied(), "buffer": self.table[:2]}


def sum_of_all(model: nn.Module, x: Tensor) -> Tensor:
    return sum(part.square().sum() for part in model(x).values())


def hand_over(stage: int) -> None:
    units = lambda model: [model.passing, model.passing.inner, model.tied]  # noqa: E731
    pair = train_like_one_process(Handing, random_batches(2, 3, 4), stage, units=units, loss_of=sum_of_all)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found, wanted = pair.model(torch.ones(4)), pair.reference(torch.ones(4))
            found["y"].mul_(2)
            wanted["y"].mul_(2)
        pair.check()  # nothing is whole: `found` has memory of its own
        torch.testing.assert_close(found, wanted)
        assert found["buffer"].data_ptr() == pair.model.table.data_ptr()
    # A parameter that comes out of a forward without a graph is still one to train.
    with torch.no_grad():
        mine, others = pair.model(torch.ones(4))["own"], pair.reference(torch.ones(4))["own"]
    mine.square().sum().backward()
    (others.square().sum()).backward()
    pair.check_gradients()


@every_stage
def test_F79_views_of_another_units_parameters_of_the_roots_and_of_buffers(stage: int) -> None:
    run_ranks(2, in_double, hand_over, stage)


class Returning(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.wrap = nn.Parameter(torch.rand(4, 4)), wrap

    def forward(self) -> Any:
        return self.wrap(self.weight)


def deeply_nested(w: Tensor) -> Any:
    out: Any = w[:2]
    for _ in range(3000):
        out = [out]
    return out


def return_awkward_things(stage: int) -> None:
    for wrap in (lambda w: MappingProxyType({"a": w[:2]}), deeply_nested):
        model = nn.Sequential(Returning(wrap))
        model.forward = lambda model=model: model[0]()
        minizero.Zero(model, [], stage=stage)
        for mode in (torch.enable_grad, torch.no_grad) if stage == 3 else ():
            match = r"unit 'root' returns a view of parameter '0\.weight'.*clone"
            with mode(), pytest.raises(TypeError, match=match):
                model()
    for wrap, to_list in (
        (lambda w: w.detach()[1:].numpy(), lambda out: out.tolist()),
        (lambda w: w[:2].to_sparse(), lambda out: out.to_dense().tolist()),
        (lambda w: torch.view_as_complex(w.view(8, 2)), lambda out: torch.view_as_real(out).tolist()),
        (lambda w: torch.max(w, 0), lambda out: out.values.tolist()),
        (lambda w: torch.nn.utils.rnn.PackedSequence(w[0], torch.ones(4)), lambda out: out.data.tolist()),
        (lambda w: [w.data_ptr, w[0]], lambda out: out[1].tolist()),
    ):
        torch.manual_seed(0)
        plain = Returning(wrap)
        torch.manual_seed(0)
        model = Returning(wrap)
        minizero.Zero(model, stage=stage)
        with torch.no_grad():
            assert to_list(model()) == to_list(plain())


@every_stage
def test_F79_what_cannot_be_copied_is_refused_by_unit_and_parameter(stage: int) -> None:
    run_ranks(2, return_awkward_things, stage)


class Caching(nn.Module):
    """Keeps views of its parameter as attributes: set anew at each forward, or once and relied on."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight, self.way = nn.Parameter(torch.rand(4, 4)), way
        self.cache: Any = None
        self.register_buffer("kept", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "anew" or self.cache is None:
            self.cache = {"a": [(self.weight[:2], 1)]}
            self.kept = self.weight[2:]
        return x * self.cache["a"][0][0].sum() + self.kept.sum()


def cache_views(stage: int) -> None:
    for way in ("anew", "once"):
        zero = minizero.Zero(nn.Sequential(Caching(way)), stage=stage)
        for mode in (torch.enable_grad, torch.no_grad):
            zero.model[0].cache = None
            with mode():
                first = zero.model(torch.ones(3))
                if way == "anew" or stage < 3:
                    torch.testing.assert_close(zero.model(torch.ones(3)), first)
                else:
                    with pytest.raises(ShardedAccessError, match=r"0\.weight, kept as an attribute"):
                        zero.model(torch.ones(3))
        if stage == 3:
            with pytest.raises(ShardedAccessError, match=r"0\.weight, kept as an attribute"):
                zero.model[0].kept + 1
        assert sum(p.numel() for p in zero.model.parameters()) == 16


class Storing(nn.Module):
    """Puts views of its parameters into a cache that the caller owns."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.Parameter(torch.rand(4, 4))

    def forward(self, x: Tensor, cache: Any, notes: dict[str, Any]) -> Tensor:
        cache.layers[0].keys = self.prefix[:2]
        notes["values"] = [(self.prefix[2:], "note")]
        return x


def store_views(stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Storing())
    model.forward = lambda x, cache, notes: model[0](x, cache, notes=notes)
    values = model[0].prefix.tolist()
    minizero.Zero(model, [model[0]], stage=stage)
    for mode in (torch.enable_grad, torch.no_grad):
        cache, notes = SimpleNamespace(layers=[SimpleNamespace(keys=None)]), {}
        with mode():
            model(torch.ones(2), cache, notes)
        assert [*cache.layers[0].keys.tolist(), *notes["values"][0][0].tolist()] == values
        assert cache.layers[0].keys.requires_grad  # so does a view of a parameter in torch, whatever the mode


@every_stage
def test_F79_views_in_a_cache_that_was_passed_in_have_memory_of_their_own(stage: int) -> None:
    run_ranks(2, store_views, stage)


@every_stage
def test_F79_a_view_that_a_module_keeps_is_named_when_it_is_used_after_the_unit(stage: int) -> None:
    run_ranks(2, cache_views, stage)


def take_views_out_of_gathered(stage: int) -> None:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(Returning(lambda w: w[1:]), nn.Linear(4, 4))
    model.forward = lambda: model[1](model[0]())
    zero = minizero.Zero(model, [model[0]], stage=stage)
    for fails in (False, True):
        kept: list[Tensor] = []
        with pytest.raises(KeyError) if fails else nullcontext(), zero.gathered():
            with torch.no_grad():
                model[0].weight += 1
            kept += [model[1].weight[:2], model[0](), model[1].weight.detach()]
            values = [view.tolist() for view in kept]
            if fails:
                raise KeyError("on purpose")
        check_clean(zero)
        model().sum().backward()  # gathers anew
        assert [view.tolist() for view in kept] == values
        zero.zero_grad()


@every_stage
def test_F79_views_taken_inside_gathered_stay_valid(stage: int) -> None:
    run_ranks(2, take_views_out_of_gathered, stage)


# ---- F86: attributes of parameters -------------------------------------------------------------------------------


class NoDecay(nn.Parameter):
    """A class of parameters by which people tell groups apart."""

    decays = False


def mark(model: nn.Module) -> nn.Module:
    model[0].bias = NoDecay(model[0].bias.detach())
    model[1].weight.no_decay = True
    model[1].weight.home = "a name that a placeholder could need"
    model[1].weight.parameter_name = "another"
    return model


def attributes(zero: minizero.Zero, name: str) -> dict[str, Any]:
    """On all parameters of the model, and on all slices."""
    found = {full: vars(p)[name] for full, p in zero.model.named_parameters() if hasattr(p, name)}
    assert found == {full: getattr(piece, name) for full, piece in zero.named_slices() if hasattr(piece, name)}
    return found


def build_marked(on_meta: bool) -> nn.Module:
    with torch.device("meta" if on_meta else "cpu"):
        return mark(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))


def carry_attributes(stage: int) -> None:
    for on_meta in (False, True):
        model = build_marked(on_meta)
        model.forward = lambda x, model=model: look(model, x)
        zero = minizero.Zero(model, [model[1]], stage=stage)
        for _ in range(2):
            assert attributes(zero, "no_decay") == {"1.weight": True}
            assert attributes(zero, "home") == {"1.weight": "a name that a placeholder could need"}
            assert attributes(zero, "parameter_name") == {"1.weight": "another"}
            assert isinstance(model[0].bias, NoDecay)
            assert not model[0].bias.decays
            with pytest.raises(ShardedAccessError, match=r"0\.bias") if stage == 3 else nullcontext():
                model[0].bias + 1
            model[1].bias.group = "outside"
            model(torch.ones(3)).sum().backward()
            assert attributes(zero, "group") == {"1.bias": "inside"}
            del model[1].bias.group
            with zero.gathered():
                assert not hasattr(model[1].bias, "group")
            groups = [
                {"params": [p for p in model.parameters() if hasattr(p, "no_decay")], "weight_decay": 0.0},
                {"params": [p for p in model.parameters() if not hasattr(p, "no_decay")]},
            ]
            zero.optimizer(minizero.AdamW, groups, lr=0.1).step()
            zero.unwrap()
            assert vars(model[1].weight).keys() == {"no_decay", "home", "parameter_name"}
            assert isinstance(model[0].bias, NoDecay)
            assert not vars(model[0].bias)
            zero = minizero.Zero(model, [model[1]], stage=stage)


def look(model: nn.Module, x: Tensor) -> Tensor:
    x = model[0](x)
    handle = model[1].register_forward_pre_hook(see_group)
    y = model[1](x)
    handle.remove()
    return y


def see_group(module: nn.Module, args: Any) -> None:
    assert module.bias.group == "outside"
    module.bias.group = "inside"


@pytest.mark.ch11
@every_stage
def test_F86_attributes_of_parameters_are_seen_both_ways_and_survive(stage: int) -> None:
    run_ranks(2, carry_attributes, stage)


# ---- F96: one error, the true one --------------------------------------------------------------------------------


def fail_to_gather() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    zero = minizero.Zero(model, [model[1]], stage=3)
    optimizer = zero.optimizer(torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for unit in (0, 1):
            verb = zero.units[unit].wait
            zero.units[unit].wait = lambda: 1 / 0  # type: ignore[assignment,return-value]
            with pytest.raises(ZeroDivisionError):
                model(torch.ones(2, 3))
            zero.units[unit].wait = verb
        model[0].weight, kept = nn.Parameter(torch.ones(3, 3)), model[0].weight
        with pytest.raises(RuntimeError, match=r"'0\.weight' was added, replaced"):
            model(torch.ones(2, 3))
        model[0].weight = kept
        model(torch.ones(2, 3))


def test_F96_a_gather_that_fails_blames_nobody_else() -> None:
    run_ranks(2, fail_to_gather)


def see_differently() -> None:
    rank = dist.get_rank()
    check = RollCall(["root", "a", "b"], TorchTransport()).call(1, seen=5 if rank == 2 else 7)
    with pytest.raises(
        RuntimeError, match=r"gather unit 'a': all ranks are at this unit, but ranks \[2\] ran other units before it"
    ) as e:
        check()
    assert "different units" not in str(e.value)
    check = RollCall(["root", "a", "b"], TorchTransport()).call(1 if rank == 0 else 2, seen=rank)
    with pytest.raises(RuntimeError, match=r"gather unit '[ab]': ranks gather different units") as e:
        check()
    assert len(set(re.findall(r"rank (\d): '[ab]'", str(e.value)))) == 3


def test_F96_ranks_that_came_to_one_unit_by_different_ways_are_told_so() -> None:
    run_ranks(3, see_differently)
