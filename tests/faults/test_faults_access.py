"""Faults of where and when parameters are read, as users of sharding libraries have reported them (F06 to F14)."""

from __future__ import annotations

import re
from collections import UserDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankFailure, run_ranks
from reference import Pair, check_clean, in_double, mean_square, random_batches, train_like_one_process
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import minizero

pytestmark = pytest.mark.ch12
every_stage = pytest.mark.parametrize("stage", [1, 2, 3])


class Block(nn.Module):
    """Two layers and a scale that multiplies element by element: each unit of most models here."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


class Chain(nn.Module):
    """Three blocks, each a unit, and a head that belongs to the root; `encode` is a forward without the head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 2)

    def encode(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


def train(pair: Pair, steps: int, *, seed: int = 1, rows: int = 3) -> None:
    """Some steps on random batches (rows, 4), checked."""
    for batch in random_batches(steps, rows, 4, seed=seed):
        pair.backward(batch)
        pair.check_gradients()
        pair.step()
        pair.check()


# ---- F06: a parameter is read outside its module's own forward ---------------------------------------------------


class ReadsAChild(nn.Module):
    """Reads parameters of its children in its own forward, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embedding, self.norm, self.out = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.norm(self.embedding(tokens))
        return {
            "plain": lambda: self.out(h),
            "functional": lambda: F.linear(h, self.embedding.weight),
            "product": lambda: h @ self.embedding.weight.t(),
            "index": lambda: h + self.embedding.weight[tokens],
            "elementwise": lambda: h + self.norm.bias,
            "in place": lambda: h.clone().add_(self.norm.bias),
            "detached": lambda: h * self.norm.bias.detach(),
            "data": lambda: h * self.norm.bias.data,
            "number": lambda: h * self.norm.bias.tolist()[0],
            "scalar": lambda: h * self.norm.bias.norm(),
        }[self.way]()


# Of 7 tokens in 4 dimensions, one rank of two holds no element of the bias: both must raise all the same.
OWNER = {"functional": "embedding", "product": "embedding", "index": "embedding", "plain": ""}
WAYS = ["functional", "product", "index", "elementwise", "in place", "detached", "data", "number", "scalar"]


def token_batches(steps: int, *shape: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    ranks = range(dist.get_world_size())
    return [[torch.randint(0, 7, shape, generator=generator) for _ in ranks] for _ in range(steps)]


def read_children(stage: int) -> None:
    batches = token_batches(3, 2, 3)
    for way in WAYS:
        if stage < 3:
            train_like_one_process(partial(ReadsAChild, way), batches[:2], stage, units=nn.Module.children)
            continue
        pair = Pair(partial(ReadsAChild, way), stage, units=nn.Module.children)
        name = f"{OWNER.get(way, 'norm')}.{'weight' if way in OWNER else 'bias'}"
        with pytest.raises(minizero.ShardedAccessError, match=f"'{name}'"):
            pair.model(batches[0][dist.get_rank()])
        pair.model.way = pair.reference.way = "plain"
        pair.backward(batches[1])
        pair.check_gradients()
        pair.step()
        pair.check()
    # Where the parent is the unit, its children's parameters are there.
    train_like_one_process(partial(ReadsAChild, "functional"), batches, stage)
    train_like_one_process(partial(ReadsAChild, "elementwise"), batches, stage)


@every_stage
def test_F06_reading_a_childs_parameter_is_right_or_raises_its_name(stage: int) -> None:
    run_ranks(2, in_double, read_children, stage)


def encoding_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model.encode(x).square().mean()


def call_another_method(stage: int) -> None:
    pair = Pair(Chain, stage, loss_of=encoding_loss)
    for batch in random_batches(3, 3, 4):  # no forward of the root around the units
        pair.backward(batch)
        pair.check_gradients()
        pair.step()
        pair.check()
        with torch.no_grad():
            pair.model.encode(batch[0])
            pair.model(batch[0])
            pair.model.encode(batch[0])
        pair.check()
    pair.loss_of = mean_square
    with torch.no_grad():
        pair.model.encode(torch.ones(1, 4))
    train(pair, 3, seed=2)
    pair.model.encode = lambda x: pair.model.head(x)
    if stage == 3:
        with pytest.raises(minizero.ShardedAccessError, match=r"'head\.weight'"):
            pair.model.encode(torch.ones(1, 4))
    else:
        assert torch.allclose(pair.model.encode(torch.ones(1, 4)), pair.reference.head(torch.ones(1, 4)))


@every_stage
def test_F06_a_method_other_than_forward_works_on_units_and_raises_on_the_rest(stage: int) -> None:
    run_ranks(2, in_double, call_another_method, stage)


def penalty(model: nn.Module) -> Tensor:
    return 0.1 * sum(p.square().sum() for p in model.parameters())


def penalise(stage: int) -> None:
    batches = random_batches(4, 3, 4)
    pair = Pair(Chain, stage, loss_of=lambda model, x: mean_square(model, x) + penalty(model))
    if stage == 3:
        with pytest.raises(minizero.ShardedAccessError, match=r"'blocks\.0\.scale'"):
            pair.loss_of(pair.model, batches[0][0])
    else:
        train(pair, 2)
        # In a backward of its own, after the model's and before it, and as the only one of a step.
        for order in ("after", "before", "alone"):
            pair.loss_of = mean_square
            if order == "after":
                pair.backward(batches[2])
            penalty(pair.model).backward()
            penalty(pair.reference).backward()
            if order == "before":
                pair.backward(batches[3])
            if order != "alone":
                pair.check_gradients()
            pair.step()
            pair.check()
    pair.loss_of = mean_square
    train(pair, 1)


@every_stage
def test_F06_penalty_on_all_parameters_is_right_or_raises(stage: int) -> None:
    run_ranks(2, in_double, penalise, stage)


# ---- F07: weights computed from other parameters -----------------------------------------------------------------


def normed_chain() -> nn.Module:
    model = Chain()
    for block in model.blocks:
        parametrizations.weight_norm(block.first)
    parametrizations.weight_norm(model.head)
    return model


def train_weight_norm(stage: int) -> None:
    pair = Pair(normed_chain, stage)
    start = {name: value.clone() for name, value in pair.reference.named_parameters()}
    train(pair, 3)
    for name, value in pair.reference.named_parameters():
        assert not torch.equal(value, start[name]), f"{name} did not move"
    assert "head.parametrizations.weight.original1" in start
    wanted = pair.reference.head.weight.detach()
    if stage == 3:
        for module, path in ((pair.model.head, "head"), (pair.model.blocks[1].first, "blocks.1.first")):
            with pytest.raises(minizero.ShardedAccessError, match=rf"'{path}\.parametrizations\.weight\.original[01]'"):
                _ = module.weight
    else:
        assert torch.allclose(pair.model.head.weight, wanted)
    with pair.zero.gathered():
        assert torch.allclose(pair.model.head.weight, wanted)
    train(pair, 1, seed=2)


@every_stage
def test_F07_parametrized_before_sharding_trains_like_one_process(stage: int) -> None:
    run_ranks(2, in_double, train_weight_norm, stage)


class Doubled(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.factor


def learned_parametrization() -> nn.Module:
    model = Chain()
    for layer in (model.head, model.blocks[0].first):
        parametrize.register_parametrization(layer, "weight", Doubled())
    return model


def train_learned_parametrization(stage: int) -> None:
    train_like_one_process(learned_parametrization, random_batches(3, 3, 4), stage)
    with parametrize.cached():
        train_like_one_process(learned_parametrization, random_batches(1, 3, 4), 1)


@every_stage
def test_F07_a_parametrization_with_parameters_trains_like_one_process(stage: int) -> None:
    run_ranks(2, in_double, train_learned_parametrization, stage)


def parametrize_late(stage: int) -> None:
    for path in ("head", "blocks.1.first"):
        model = Chain()
        minizero.Zero(model, stage=stage)
        name = rf"'{path}\.(weight|parametrizations\.weight\.original0)'"
        # Stage 3 raises when the weight is read, stages 1 and 2 at the next forward.
        with pytest.raises(RuntimeError, match=name + ".*before sharding"):
            parametrizations.weight_norm(model.get_submodule(path))
            model(torch.ones(1, 4))


@every_stage
def test_F07_parametrizing_after_sharding_raises(stage: int) -> None:
    run_ranks(2, in_double, parametrize_late, stage)


def hooked_chain() -> nn.Module:
    """The user's own hooks, registered before sharding, read and use the unit's parameters."""
    model = Chain()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: (args[0] * module.first.weight.mean(),))
        block.register_forward_hook(lambda module, args, output: output + module.second.bias)
    model.register_forward_pre_hook(lambda module, args: (args[0] + module.head.weight.detach().mean(),))
    model.register_forward_hook(lambda module, args, output: output * module.head.bias.sum())
    return model


def train_hooked(stage: int) -> None:
    train_like_one_process(hooked_chain, random_batches(3, 3, 4), stage)


@every_stage
def test_F07_hooks_registered_before_sharding_see_the_units_parameters(stage: int) -> None:
    run_ranks(2, in_double, train_hooked, stage)


# ---- F08: containers ---------------------------------------------------------------------------------------------


@dataclass
class Output:
    logits: Any
    extra: Any = None


@dataclass(slots=True)
class SlottedOutput:
    logits: Any


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class InheritsSlots(Slotted):
    __slots__ = "unset"  # one name, not a sequence of letters


class AttributeDict(dict):  # the shape of a ModelOutput
    __getattr__ = dict.__getitem__


Pack = namedtuple("Pack", ["tensor", "note"])
MARK = object()

# name -> (pack a tensor, unpack it again)
CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda y: {"o": y, "mark": MARK}, lambda out: out["o"]),
    "dataclass": (lambda y: Output(y), lambda out: out.logits),
    "dataclass with slots": (SlottedOutput, lambda out: out.logits),
    "nested": (
        lambda y: (y[:, :1], None, [y[:, 1:2], {"k": y[:, 2:]}]),
        lambda out: torch.cat([out[0], out[2][0], out[2][1]["k"]], 1),
    ),
    "slots": (Slotted, lambda out: out.tensor),
    "inherited slots": (InheritsSlots, lambda out: out.tensor),
    "attribute dict": (lambda y: AttributeDict(logits=y), lambda out: out.logits),
    "named tuple": (lambda y: Pack(y, MARK), lambda out: out.tensor),
    "namespace": (lambda y: SimpleNamespace(a=SimpleNamespace(b=[y])), lambda out: out.a.b[0]),
    "user dict": (lambda y: UserDict(o=y), lambda out: out["o"]),
    "set": (lambda y: {y}, lambda out: next(iter(out))),
    "deque": (lambda y: deque([y]), lambda out: out[0]),
    "dict values": (lambda y: {"o": y}.values(), lambda out: next(iter(out))),
    "distribution": (lambda y: torch.distributions.Laplace(y, 1.0), lambda out: out.mean),
    "itself inside": (lambda y: (lambda d: d.update(me=d) or d)({"o": y}), lambda out: out["me"]["o"]),
    "deep": (lambda y: _nest(y, 2000), lambda out: _dig(out)),
}


def _nest(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def _dig(value: Any) -> Any:
    while isinstance(value, list):
        value = value[0]
    return value


class PackingBlock(Block):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, packed: Any) -> Any:  # type: ignore[override]
        pack, unpack = CONTAINERS[self.kind]
        return pack(super().forward(unpack(packed)))


class PackingChain(nn.Module):
    """What a unit takes and gives back is packed; the root's own output too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(PackingBlock(kind) for _ in range(3))
        self.seen: list[Any] = []

    def forward(self, packed: Any) -> Any:
        for block in self.blocks:
            packed = block(packed)
            self.seen.append(packed)
        return packed


def train_packed(stage: int) -> None:
    for kind, (pack, unpack) in CONTAINERS.items():
        pair = train_like_one_process(
            partial(PackingChain, kind),
            random_batches(1, 3, 4),
            stage,
            loss_of=lambda model, x, pack=pack, unpack=unpack: unpack(model(pack(x))).square().mean(),
        )
        sample = pair.model.seen[-1]
        assert type(sample) is type(pack(torch.ones(3, 4))), kind
        assert kind != "dict" or sample["mark"] is MARK
        assert kind != "named tuple" or sample.note is MARK
        assert kind != "dataclass" or sample.extra is None
        assert kind != "nested" or sample[1] is None


@every_stage
def test_F08_gradients_flow_through_every_container(stage: int) -> None:
    run_ranks(2, in_double, train_packed, stage)


def future_of(y: Tensor) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(y)
    return future


class Wrapping(Block):
    """Returns its output wrapped so that nobody can see the tensor."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(super().forward(x))


OPAQUE: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "generator": (lambda y: (part for part in [y]), next),
    "list_iterator": (lambda y: iter([y]), next),
    "function": (lambda y: lambda: y, lambda out: out()),
    "partial": (lambda y: partial(torch.clone, y), lambda out: out()),
    "Future": (future_of, lambda out: out.wait()),
}


class OpaqueChain(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.wrap = kind, OPAQUE[kind][0]
        self.blocks = nn.ModuleList([Wrapping(self.wrap), Wrapping(self.wrap)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = OPAQUE[self.kind][1](block(x))
        return x


def return_opaque(stage: int) -> None:
    for kind in OPAQUE:
        pair = Pair(partial(OpaqueChain, kind), stage)
        if stage == 3 or "iter" in kind or kind == "generator":
            with pytest.raises(TypeError, match=kind):
                pair.model(torch.ones(1, 4))
            for block in [*pair.model.blocks, *pair.reference.blocks]:
                block.wrap = lambda y: [y]
            OPAQUE[kind] = (OPAQUE[kind][0], lambda out: out[0])
        train(pair, 2)


@every_stage
def test_F08_an_opaque_output_is_refused_by_its_class_where_it_would_do_harm(stage: int) -> None:
    run_ranks(2, in_double, return_opaque, stage)


class WithoutTensors(nn.Module):
    """A unit whose output has nothing to do with its parameters, or is no tensor at all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.says = nn.ModuleList(Says(value) for value in (None, 3, "text", (), {}, [None, 2.5], torch.ones(4)))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.says:
            each(x)
        return self.blocks[1](self.blocks[0](x))


class Says(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value, self.weight = value, nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Any:
        return self.value


def train_without_tensors(stage: int) -> None:
    units = lambda model: [*model.blocks, *model.says]  # noqa: E731
    train_like_one_process(WithoutTensors, random_batches(2, 3, 4), stage, units=units)


@every_stage
def test_F08_plain_values_as_output_are_fine(stage: int) -> None:
    run_ranks(2, in_double, train_without_tensors, stage)


class Awkward(nn.Module):
    """Keyword arguments only; outputs that are inputs, views, or changed in place by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([AwkwardBlock(way) for way in ("input", "view", "in place", "detached", "input")])

    def forward(self, *, x: Tensor, note: object = None) -> Tensor:
        for block in self.blocks:
            same, y = block(h=x, options={"again": x})
            if block.way == "in place":
                y.mul_(2)
                y += 1
            elif block.way == "view":
                y.add_(1)
            x = same + y
        return x


class AwkwardBlock(Block):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, *, h: Tensor, options: dict[str, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y = self.frozen(super().forward(options["again"]))
        if self.way == "view":
            y = torch.cat([y, y], 1)[:, 1:5]
        if self.way == "detached":
            y = y.detach()
        return h, y


def train_awkward(stage: int) -> None:
    for wants_gradient in (False, True):
        loss_of = lambda model, x, w=wants_gradient: model(x=x.clone().requires_grad_(w)).square().mean()  # noqa: E731
        train_like_one_process(Awkward, random_batches(3, 3, 4), stage, loss_of=loss_of)


@every_stage
@pytest.mark.parametrize("world", [2, 3])
def test_F08_keyword_arguments_and_outputs_that_alias_inputs(stage: int, world: int) -> None:
    run_ranks(world, in_double, train_awkward, stage)


# ---- F09: the same module twice in one forward -------------------------------------------------------------------


def reentrant(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=True)


def recomputed(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=False)


def twice(block: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: block(torch.tanh(block(x)))


USES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda block, x: twice(block)(x),
    "reentrant each": lambda block, x: reentrant(block, reentrant(block, x)),
    "recomputed each": lambda block, x: recomputed(block, recomputed(block, x)),
    "reentrant both": lambda block, x: reentrant(twice(block), x),
    "recomputed both": lambda block, x: recomputed(twice(block), x),
    "reentrant first": lambda block, x: block(reentrant(block, x)),
    "reentrant second": lambda block, x: reentrant(block, block(x)),
    "reentrant and recomputed": lambda block, x: recomputed(block, reentrant(block, x)),
    "reentrant in reentrant": lambda block, x: reentrant(lambda h: reentrant(block, torch.tanh(block(h))), x),
    "recomputed in reentrant": lambda block, x: reentrant(lambda h: recomputed(block, torch.tanh(block(h))), x),
    "reentrant in recomputed": lambda block, x: recomputed(lambda h: reentrant(block, torch.tanh(block(h))), x),
    "three times": lambda block, x: block(reentrant(twice(block), x)),
}


class Uses(nn.Module):
    """A chain that uses each block in the way given."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = USES[self.way](block, x)
        return x


def wants_input_gradient(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.clone().requires_grad_()).square().mean()  # without it reentrant checkpointing has no backward


def use_twice(stage: int) -> None:
    for way in USES:
        for units in (None, lambda model: [m for m in model.modules() if isinstance(m, nn.Linear)]):
            train_like_one_process(
                partial(Uses, way), random_batches(2, 3, 4), stage, units=units, loss_of=wants_input_gradient
            )


@every_stage
def test_F09_a_module_used_twice_also_under_recomputation(stage: int) -> None:
    run_ranks(2, in_double, use_twice, stage)


class UsesByRank(Uses):
    def forward(self, x: Tensor, way: str) -> Tensor:  # type: ignore[override]
        self.way = way
        return super().forward(x)


USES["once"] = lambda block, x: block(x)


def use_by_rank(ways: tuple[str, str], stage: int) -> None:
    batches = [list(zip(batch, ways, strict=True)) for batch in random_batches(2, 3, 4)]
    loss_of = lambda model, b: model(b[0].clone().requires_grad_(), b[1]).square().mean()  # noqa: E731
    train_like_one_process(partial(UsesByRank, "plain"), batches, stage, loss_of=loss_of)


@pytest.mark.parametrize("stage", [1, 2])  # stage 3 gathers at each use: see F13
@pytest.mark.parametrize("ways", [("reentrant first", "once"), ("once", "reentrant each"), ("plain", "reentrant each")])
def test_F09_uses_of_a_module_where_ranks_differ(ways: tuple[str, str], stage: int) -> None:
    run_ranks(2, in_double, use_by_rank, ways, stage, group_timeout=10.0)


# ---- F10: several forwards and backwards -------------------------------------------------------------------------


def finish_step(pair: Pair) -> None:
    pair.check_gradients()
    pair.step()
    pair.check()


def backward_in_patterns(stage: int) -> None:
    pair, rank = Pair(Chain, stage), dist.get_rank()
    both = (pair.model, pair.reference)
    for first, second in zip(random_batches(3, 3, 4), random_batches(3, 3, 4, seed=2), strict=True):
        # (a) two forwards, one backward of the sum
        pair.loss_of = lambda model, xs: mean_square(model, xs[0]) + mean_square(model, xs[1])
        pair.backward(list(zip(first, second, strict=True)))
        finish_step(pair)

        # (b) two forwards, two backwards, in either order
        for order in (1, -1):
            losses = [mean_square(pair.model, first[rank]), mean_square(pair.model, second[rank])]
            for loss in losses[::order]:
                loss.backward()
            for batch in (*first, *second):
                (mean_square(pair.reference, batch) / len(first)).backward()
            finish_step(pair)

        # (c) one forward, two backwards; (d) the same with zero_grad between
        for forgets in (False, True):
            for model, batches in zip(both, ([first[rank]], first), strict=True):
                outputs = [model(batch) for batch in batches]
                (sum(y.square().mean() for y in outputs) / len(outputs)).backward(retain_graph=True)
                if forgets:
                    model.zero_grad()
                (sum(y.sin().sum() for y in outputs) / len(outputs)).backward()
            finish_step(pair)


@every_stage
def test_F10_several_forwards_and_backwards(stage: int) -> None:
    run_ranks(2, in_double, backward_in_patterns, stage)


def look_away_between(stage: int) -> None:
    """Evaluation and full states between forward and backward change nothing."""
    pair, rank = Pair(Chain, stage), dist.get_rank()
    for batch in random_batches(2, 3, 4):
        first = mean_square(pair.model, batch[rank])
        with torch.no_grad():
            pair.model(batch[0])
        with torch.inference_mode():
            pair.model(batch[0])
        pair.zero.full_state()
        second = mean_square(pair.model, batch[rank])
        first.backward()
        with torch.inference_mode():
            pair.model(batch[0])
        pair.zero.full_state()
        second.backward()
        for x in batch:
            (2 * mean_square(pair.reference, x) / len(batch)).backward()
        finish_step(pair)


@every_stage
def test_F10_evaluation_between_forward_and_backward(stage: int) -> None:
    run_ranks(2, in_double, look_away_between, stage)


def forget_gradients(stage: int) -> None:
    pair = Pair(Chain, stage)
    batches = random_batches(2, 3, 4)
    for forget in (pair.zero.zero_grad, pair.model.zero_grad, pair.optimizer.zero_grad):
        pair.backward(batches[0])
        pair.backward(batches[0])
        forget()
        assert all(piece.grad is None for _, piece in pair.zero.named_slices())
        check_clean(pair.zero)
        pair.reference.zero_grad()
        pair.optimizer.step()  # without a gradient: nothing moves
        pair.check()
        pair.backward(batches[1])
        finish_step(pair)


@every_stage
def test_F10_zero_grad_between_backward_and_step_forgets_everything(stage: int) -> None:
    run_ranks(2, in_double, forget_gradients, stage)


class Stop(Exception):
    """Raised by the user's own hook."""


def stop(gradient: Tensor) -> None:
    raise Stop


def fail_in_backward(stage: int) -> None:
    pair = Pair(Chain, stage)
    for step, batch in enumerate(random_batches(4, 3, 4)):
        hook = pair.model.blocks[step % 3].register_forward_hook(
            lambda m, a, output: output.register_hook(stop) and None
        )
        loss = mean_square(pair.model, batch[dist.get_rank()])
        hook.remove()
        with pytest.raises(Stop):
            loss.backward()
        if step == 0:
            pair.zero.full_state()
        pair.zero.zero_grad()
        pair.check()
        pair.backward(batch)
        finish_step(pair)


@every_stage
def test_F10_a_backward_that_raises_leaves_the_next_step_right(stage: int) -> None:
    run_ranks(2, in_double, fail_in_backward, stage)


def step_under_a_graph(stage: int) -> None:
    pair = Pair(Chain, stage)
    batch = random_batches(1, 3, 4)[0]
    for model, optimizer in ((pair.reference, pair.reference_optimizer), (pair.model, pair.optimizer)):
        old = mean_square(model, batch[0])
        mean_square(model, batch[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()
        optimizer.zero_grad()
    pair.check()
    train(pair, 1)


@every_stage
def test_F10_backward_through_parameters_that_a_step_has_changed_raises_as_in_torch(stage: int) -> None:
    run_ranks(2, in_double, step_under_a_graph, stage)


def gradient_penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    loss = model(x).square().mean()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().mean()


def gradient_of_the_input(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().mean(), x)
    return model(x + gradient).square().mean()


def differentiate_twice(stage: int) -> None:
    batches = random_batches(3, 3, 4)
    train_like_one_process(Chain, batches, stage, loss_of=gradient_of_the_input)
    pair = Pair(Chain, stage, loss_of=gradient_penalty)
    if stage < 3:
        for batch in batches:
            pair.backward(batch)
            finish_step(pair)
        return
    with pytest.raises(RuntimeError, match="create_graph"):
        pair.backward(batches[0])
    pair.zero.zero_grad()
    pair.reference.zero_grad()
    for batch in batches:
        with pair.zero.gathered():
            pair.backward(batch)
        finish_step(pair)


@every_stage
def test_F10_double_backward_is_right_or_refused(stage: int) -> None:
    run_ranks(2, in_double, differentiate_twice, stage)


class Outer(nn.Module):
    """A unit that contains a unit, has parameters before and after it, and a layer that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner, self.after, self.never = nn.Linear(4, 4), Block(), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(self.before(x))) * self.inner.second.in_features


def train_nested(stage: int) -> None:
    build = lambda: nn.Sequential(Outer(), nn.Tanh(), Outer())  # noqa: E731
    for units in (
        lambda m: [m[0], m[0].inner, m[2].inner],
        lambda m: [m[2].never, m[0].inner, m[0].inner.first, m[2], m[0], m[0].never],
        lambda m: [],
        lambda m: [m],
    ):
        for prefetch in (0, 1, 5) if stage == 3 else (1,):
            train_like_one_process(build, random_batches(2, 3, 4), stage, units=units, clip=0.5, prefetch=prefetch)


@every_stage
def test_F10_units_in_units_and_units_never_called(stage: int) -> None:
    run_ranks(2, in_double, train_nested, stage)


# ---- F11: frozen parameters --------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer plus the rank-1 product of two trained vectors (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.A, self.B = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.randn(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.A.t() @ self.B.t()


class Adapters(nn.Module):
    """Adapted blocks around a block that is frozen altogether, between a frozen embedding and a frozen head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4).requires_grad_(False)
        self.blocks = nn.ModuleList([Adapted(), Block().requires_grad_(False), Adapted()])
        self.head = nn.Linear(4, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def is_frozen(name: str) -> bool:
    return name.rsplit(".", 1)[-1] not in ("A", "B")


def train_adapters(stage: int) -> None:
    everything = lambda m: [m.stem, *m.blocks, m.head]  # noqa: E731
    for units, loss_of in ((None, mean_square), (everything, mean_square), (everything, wants_input_gradient)):
        pair = Pair(Adapters, stage, units=units, loss_of=loss_of)
        start = pair.zero.full_state()
        assert [name for name, _ in pair.zero.named_slices()] == [
            name for name in dict(pair.model.named_parameters()) if not is_frozen(name)
        ]
        with minizero.Ledger() as ledger:
            pair.backward(random_batches(1, 3, 4)[0])
            pair.step()
        # 16 trained values of 8 bytes; each of two ranks sends the half that the other owns.
        assert ledger.sent["all_to_all"] == 16 * 8 // 2
        pair.check()
        train(pair, 2, seed=2)
        for name, value in pair.zero.full_state().items():
            assert torch.equal(value, start[name]) == is_frozen(name), name
        assert sum(len(group["params"]) for group in pair.optimizer.param_groups) == 4


@pytest.mark.ch15
@every_stage
def test_F11_frozen_parameters_stay_and_cost_no_gradient(stage: int) -> None:
    run_ranks(2, in_double, train_adapters, stage)


def thaw(stage: int) -> None:
    pair = Pair(Adapters, stage)
    with torch.no_grad():
        pair.model(torch.ones(1, 4))
    for path, now in (("blocks.0.base.bias", True), ("blocks.2.A", False), ("head.weight", True)):
        parameter = pair.model.get_parameter(path)
        with pytest.raises(RuntimeError, match=rf"'?{path}'?.*before"):
            parameter.requires_grad_(now)
            pair.model(torch.ones(1, 4))
        with pytest.raises(RuntimeError, match=rf"'?{path}'?.*before"):
            parameter.requires_grad = now
            pair.model(torch.ones(1, 4))
        parameter.requires_grad_(not now)
    with pytest.raises(RuntimeError, match="before"):
        pair.model.requires_grad_(True)
        pair.model(torch.ones(1, 4))
    for name, parameter in pair.model.named_parameters():
        parameter.requires_grad_(not is_frozen(name))  # as it was: harmless
    train(pair, 2)


@pytest.mark.ch15
@every_stage
def test_F11_freezing_and_unfreezing_after_sharding_is_refused_by_name(stage: int) -> None:
    run_ranks(2, in_double, thaw, stage)


# ---- F12, F13: parameters without a gradient ---------------------------------------------------------------------


class Heads(nn.Module):
    """A body and two heads; a forward uses the heads it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.a, self.b = Block(), Block()

    def forward(self, x: Tensor, heads: str) -> Tensor:
        x = self.body(x)
        return sum((getattr(self, head)(x) for head in heads), torch.zeros(()))


def heads_loss(model: nn.Module, batch: tuple[Tensor, str]) -> Tensor:
    return model(*batch).square().mean()


CUTS: dict[str, Callable[[nn.Module], list[nn.Module]]] = {
    "one unit": lambda model: [],
    "each its own unit": lambda model: [model.body, model.a, model.b],
}


def alternate_heads(stage: int) -> None:
    for set_to_none in (True, False):
        for units in CUTS.values():
            # Adam: a zero gradient moves a parameter by its momentum, none at all leaves it.
            pair = Pair(Heads, stage, units=units, loss_of=heads_loss, optimizer=torch.optim.Adam, options={"lr": 0.1})
            for k, batch in enumerate(random_batches(4, 3, 4)):
                pair.backward([(x, "ab"[k % 2]) for x in batch])
                if stage > 1 or k % 2:
                    pair.check_gradients()
                pair.step(set_to_none)
                pair.check()


def move_by_momentum(stage: int) -> list[float]:
    """Where a parameter goes that starts at 1 and gets gradient 1 once or never, then none at all."""
    model = Heads()
    zero = minizero.Zero(model, CUTS["each its own unit"](model), stage=stage)
    ones = {name: torch.ones_like(value) for name, value in zero.full_state().items()}
    seen = []
    for optimizer, uses in (
        (zero.optimizer(torch.optim.Adam, lr=0.1), ("ab", "a")),
        (zero.optimizer(minizero.AdamW, lr=0.1, weight_decay=0.1), ("a",)),
    ):
        zero.load_full_state(ones)
        for heads in uses:
            model(torch.ones(1, 4), heads).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(zero.full_state().get("b.second.bias", torch.zeros(1))[0].item())
    return seen


@pytest.mark.ch13
@every_stage
def test_F12_parameters_unused_on_all_ranks_count_as_zero_gradient(stage: int) -> None:
    run_ranks(2, in_double, alternate_heads, stage)
    # Known values: Adam goes on by momentum (None would leave 0.9), AdamW decays (None would leave 1).
    assert run_ranks(2, in_double, move_by_momentum, stage)[0] == pytest.approx([0.9, 0.8330, 0.99], abs=5e-5)


def use_heads_by_rank(cut: str, stage: int) -> None:
    batches = [list(zip(batch, ("a", "ab", ""), strict=False)) for batch in random_batches(3, 3, 4)]
    train_like_one_process(Heads, batches, stage, units=CUTS[cut], loss_of=heads_loss, clip=0.5)


@pytest.mark.ch13
@every_stage
@pytest.mark.parametrize("cut", CUTS)
def test_F13_unused_on_one_rank_counts_as_zero(cut: str, stage: int) -> None:
    if stage == 3 and cut != "one unit":
        return  # the next test
    run_ranks(2, in_double, use_heads_by_rank, cut, stage, group_timeout=10.0)


def gather_different_units(same_size: bool, prefetch: int, uses: tuple[str, str]) -> None:
    model = Heads()
    if not same_size:
        model.b = nn.Sequential(Block(), nn.Linear(4, 4))
    minizero.Zero(model, CUTS["each its own unit"](model), prefetch=prefetch)
    for _ in range(2):
        model(torch.ones(3, 4), uses[dist.get_rank()])


@pytest.mark.ch13
@pytest.mark.parametrize(("prefetch", "uses"), [(0, ("a", "ab")), (1, ("", "ab"))])
@pytest.mark.parametrize("same_size", [True, False])
def test_F13_ranks_that_gather_different_units_all_raise_and_name_them(
    same_size: bool, prefetch: int, uses: tuple[str, str]
) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, gather_different_units, same_size, prefetch, uses, timeout=30.0, group_timeout=3.0)
    assert sorted(caught.value.ranks) == [0, 1]
    for text in str(caught.value).split("--- rank ")[1:]:
        assert re.search(r"ranks gather different units \(rank 0: '.*', rank 1: '.*b'\)", text)


def use_b_on_one_rank() -> None:
    batches = [list(zip(batch, ("a", "ab"), strict=True)) for batch in random_batches(2, 3, 4)]
    train_like_one_process(Heads, batches, 3, units=CUTS["each its own unit"], loss_of=heads_loss)


@pytest.mark.ch13
def test_F13_a_difference_that_gathering_ahead_makes_up_for_does_no_harm() -> None:
    """Rank 0 gathers b ahead and in vain. On the CPU its next reduction need not wait for rank 1 to be as far."""
    run_ranks(2, in_double, use_b_on_one_rank, timeout=30.0, group_timeout=10.0)


# ---- F14: ranks call the model a different number of times -------------------------------------------------------


def generate_then_train(stage: int) -> None:
    pair = Pair(Chain, stage)
    train(pair, 1)
    for evaluate in (torch.no_grad, torch.inference_mode):
        pair.model.eval()
        with pair.zero.gathered(), evaluate():
            for _ in range(3 + 4 * dist.get_rank()):
                found = pair.model(torch.ones(1, 4))
        torch.testing.assert_close(found, pair.reference(torch.ones(1, 4)))
        pair.check()
        pair.model.train()
        train(pair, 2, seed=2)
        with evaluate():  # the same number on each rank needs no context
            pair.model(torch.ones(1, 4))
        check_clean(pair.zero)
        train(pair, 1, seed=3)


@every_stage
def test_F14_ranks_generate_as_long_as_they_like_inside_gathered(stage: int) -> None:
    run_ranks(2, in_double, generate_then_train, stage)


def generate_without_context(trains: bool) -> None:
    model = Chain()
    minizero.Zero(model)
    with torch.no_grad():
        for _ in range(3 + 4 * dist.get_rank()):
            model(torch.ones(1, 4))
    if trains:
        model(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize("trains", [True, False])
def test_F14_without_the_context_ranks_raise_the_units_name_in_time(trains: bool) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, generate_without_context, trains, timeout=30.0, group_timeout=2.0)
    assert "could not gather unit '" in str(caught.value)
    assert 1 in caught.value.ranks
    if trains:  # rank 0 has gone on to its backward: both know at once
        assert sorted(caught.value.ranks) == [0, 1]
        for text in str(caught.value).split("--- rank ")[1:]:
            assert "ranks gather different units (rank 0: 'blocks.2', rank 1: 'blocks.0')" in text
            assert "with zero.gathered():" in text
    assert "no answer in" not in str(caught.value)
