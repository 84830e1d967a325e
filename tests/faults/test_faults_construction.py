"""Faults of construction and of changes after sharding, as users of sharding libraries have reported (F39 to F43)."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from harness import preload, run_ranks
from reference import Pair, check_values, in_double, random_batches, train_like_one_process
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import minizero
from minizero.zero.blank import is_blank, make_blank

pytestmark = pytest.mark.ch15
preload("peft")
every_stage = pytest.mark.parametrize("stage", [1, 2, 3])


class Xavier(nn.Linear):
    """Its values depend on the shape it sees: a flat shard would give others."""

    def reset_parameters(self) -> None:
        nn.init.xavier_normal_(self.weight)
        nn.init.uniform_(self.bias, -1.0, 1.0)


class Block(nn.Module):
    """A layer and a unit inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Xavier(4, 4)
        self.inner = nn.Sequential(Xavier(4, 6), nn.Tanh(), Xavier(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.first(x)))


class Chain(nn.Module):
    """Units in units, a norm with buffers, and a head in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Xavier(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = Xavier(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def nested_units(model: nn.Module) -> list[nn.Module]:
    return [model.blocks[0], model.blocks[0].inner, model.blocks[1].inner[2], model.head]


def equal_states(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Bitwise, on rank 0; {} elsewhere."""
    assert set(found) == (set(wanted) if dist.get_rank() == 0 else set())
    for name, value in found.items():
        assert torch.equal(value, wanted[name]), name


# ---- F39: construction on the meta device ------------------------------------------------------------------------


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def materialise_chain(stage: int) -> None:
    torch.manual_seed(0)
    wanted = Chain().state_dict()
    assert all(value.isfinite().all() for value in wanted.values())
    for units in (None, nested_units):
        model = build_on_meta(Chain)
        torch.manual_seed(0 if dist.get_rank() == 0 else 17)  # rank 0's values count
        zero = minizero.Zero(model, units(model) if units else None, stage=stage)
        equal_states(zero.full_state(), wanted)
        assert not any(buffer.is_meta for buffer in model.buffers())
        assert not any(parameter.is_meta for parameter in model.parameters())
    # What was filled is what computes.
    torch.manual_seed(0)
    plain, x = Chain().eval(), random_batches(1, 4, 4)[0][0]
    torch.testing.assert_close(model.eval()(x), plain(x))


@every_stage
@pytest.mark.parametrize("world", [1, 2, 3])
def test_F39_meta_construction_gives_the_values_of_the_usual_one(stage: int, world: int) -> None:
    run_ranks(world, materialise_chain, stage)


def initialise_by_hand(stage: int) -> None:
    """`initialize` is called once with each module that had something on the meta device, at full shape."""
    seen: list[tuple[str, torch.Size]] = []

    def initialize(module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            seen.append((name, parameter.shape))
            nn.init.constant_(parameter, len(seen))
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()

    model = build_on_meta(Chain)
    real = Xavier(4, 2)
    model.head = real  # not on the meta device: keeps its values
    kept = {name: value.detach().clone() for name, value in real.state_dict().items()}
    shapes = [p.shape for name, p in model.named_parameters() if not name.startswith("head")]
    zero = minizero.Zero(model, nested_units(model), stage=stage, initialize=initialize)
    assert [shape for _, shape in seen] == shapes
    state = zero.full_state()
    if dist.get_rank() == 0:
        names = [name for name, _ in model.named_parameters()]
        assert [state[name].unique().tolist() for name in names[: len(shapes)]] == [[i + 1] for i in range(len(shapes))]
        assert torch.equal(state["head.weight"], kept["weight"])
        assert state["norm.num_batches_tracked"].item() == 0


@every_stage
def test_F39_initialize_sees_each_module_once_at_full_shape(stage: int) -> None:
    run_ranks(2, initialise_by_hand, stage)


class TiedWithBias(nn.Module):
    """The output layer shares the embedding's weight and has a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight


def materialise_tied(stage: int) -> None:
    torch.manual_seed(0)
    wanted = TiedWithBias().state_dict()
    model = build_on_meta(TiedWithBias)
    assert model.head.weight is model.embedding.weight
    torch.manual_seed(0)
    zero = minizero.Zero(model, [model.embedding, model.head], stage=stage)
    assert model.head.weight is model.embedding.weight
    equal_states(zero.full_state(), wanted)
    # minizero's own model, tied and not, in blocks
    for tied in (True, False):
        config = minizero.GPTConfig(vocab_size=11, context=4, width=8, heads=2, layers=2, tied=tied)
        torch.manual_seed(3)
        wanted = minizero.GPT(config).state_dict()
        model = build_on_meta(partial(minizero.GPT, config))
        torch.manual_seed(3)
        equal_states(minizero.Zero(model, stage=stage).full_state(), wanted)


@every_stage
def test_F39_tied_weights_are_initialised_once(stage: int) -> None:
    run_ranks(2, materialise_tied, stage)


class Unready(nn.Module):
    """Holds a parameter or a buffer and has no reset_parameters."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        if kind == "parameter":
            self.scale = nn.Parameter(torch.ones(2))
        else:
            self.register_buffer("table", torch.arange(4))


class Forgetful(nn.Linear):
    """Sets the weight and leaves the bias."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def materialise_badly(stage: int) -> None:
    for kind in ("parameter", "buffer"):
        model = nn.Sequential(nn.Linear(2, 2), build_on_meta(partial(Unready, kind)))
        with pytest.raises(TypeError, match=r"module '1' .*reset_parameters"):
            minizero.Zero(model, stage=stage)
        assert model[1].linear.weight.is_meta, "nothing was changed"
    model = nn.Sequential(nn.Linear(2, 2), build_on_meta(partial(Forgetful, 2, 2)))
    with pytest.raises(ValueError, match=r"module '1' left values of 'bias' unset"):
        minizero.Zero(model, stage=stage)
    model = nn.Sequential(build_on_meta(partial(nn.Linear, 2, 2)))
    with pytest.raises(ValueError, match=r"module '0' left values of 'weight' unset"):
        minizero.Zero(model, stage=stage, initialize=lambda module: None)


@every_stage
def test_F39_what_cannot_be_initialised_is_named(stage: int) -> None:
    run_ranks(2, materialise_badly, stage)


# ---- F98: memory that nobody filled ------------------------------------------------------------------------------


class Tables(nn.Module):
    """Tensors that the constructor fills; `reset_parameters` sets those that `sets` names, as `way` says."""

    def __init__(self, sets: str, way: str = "in place") -> None:
        super().__init__()
        self.sets, self.way = sets.split(), way
        self.weight = nn.Parameter(torch.ones(4, 3))
        for name, value in self.values().items():
            if name == "codes":
                self.codes = nn.Parameter(value, requires_grad=False)
            elif name == "plain":
                self.plain = value
            else:
                self.register_buffer(name, value, persistent=name not in ("mask", "rotary"))
        self.alias, self.aliases = self.positions, [self.weight, self.mask]

    def values(self) -> dict[str, Tensor]:
        return {
            "positions": torch.arange(6)[::2],
            "mask": torch.ones(4, 4, dtype=torch.bool).tril(),
            "counter": torch.zeros((), dtype=torch.int32),
            "codes": torch.arange(256).to(torch.uint8),
            "small": torch.full((3, 2), -7, dtype=torch.int8).t(),
            "rotary": torch.polar(torch.ones(3), torch.arange(3.0)),
            "scale": torch.linspace(0, 1, 4).to(torch.bfloat16)[1:],
            "plain": torch.arange(3),
        }

    def reset_parameters(self) -> None:
        self.weight.data.normal_()
        with torch.device("cpu"):
            values = self.values()
        for name in self.sets:
            if self.way == "replaced" and name == "codes":
                self.codes = nn.Parameter(values[name], requires_grad=False)
            elif self.way == "replaced" or name == "plain":
                setattr(self, name, values[name])
            elif self.way == "data":
                getattr(self, name).data.copy_(values[name])
            else:
                with torch.no_grad():
                    getattr(self, name).copy_(values[name])


ALL = "positions mask counter codes small rotary scale plain"


def fill_tables(stage: int) -> None:
    for way in ("in place", "data", "replaced"):
        model = nn.Sequential(nn.Linear(3, 3), build_on_meta(partial(Tables, ALL, way)))
        torch.manual_seed(0)
        minizero.Zero(model, stage=stage)
        torch.manual_seed(0)
        wanted = Tables(ALL)
        wanted.reset_parameters()
        tables = model[1]
        found = {**dict(tables.named_buffers()), "plain": tables.plain}
        for name, value in found.items():
            assert torch.equal(value, getattr(wanted, name)), (way, name)
        if way != "replaced":
            assert tables.alias is tables.positions
            assert tables.aliases[1] is tables.mask


def forget_tables(stage: int) -> None:
    for forgotten in ALL.split():
        sets = ALL.replace(forgotten, "").strip()
        real, first = nn.Linear(3, 3), build_on_meta(partial(nn.Linear, 3, 3))
        values = real.weight.tolist()
        model = nn.Sequential(real, first, build_on_meta(partial(Tables, sets)), nn.Linear(3, 3))
        before = dict(model.named_parameters())
        with pytest.raises(ValueError, match=f"initializing module '2' left (values of )?'{forgotten}'"):
            minizero.Zero(model, [real, first], stage=stage)
        after = dict(model.named_parameters())
        assert all(after[name] is before[name] for name in before), "nothing is sharded"
        assert real.weight.tolist() == values
        assert model[2].mask.is_meta
        model[2].sets = ALL.split()
        minizero.Zero(model, [real, first], stage=stage)  # and it can be tried again
    # Parts count too; rank 0's values are those that matter, and all ranks hear of it.
    for wrong, raises in ((0, True), (1, False)):
        model = build_on_meta(partial(Tables, ALL))

        def initialize(module: nn.Module, wrong: int = wrong) -> None:
            module.reset_parameters()
            if dist.get_rank() == wrong:
                module.mask.view(torch.uint8)[3, 3] = torch.tensor([0xA5], dtype=torch.uint8)

        with pytest.raises(ValueError, match="'mask' unset") if raises else nullcontext():
            minizero.Zero(model, stage=stage, initialize=initialize)
    assert raises or model.mask.all(1).tolist() == [False, False, False, True]


class Expanded(nn.Linear):
    """One weight is to be initialised; a buffer, whose rows are one row, has its values already."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        with torch.device("cpu"):
            self.register_buffer("rows", torch.arange(3.0).expand(2, 3))


def keep_rows(stage: int) -> None:
    model = nn.Sequential(build_on_meta(Expanded))
    minizero.Zero(model, stage=stage)
    assert model[0].rows.tolist() == [[0, 1, 2]] * 2


@every_stage
def test_F98_values_that_share_memory_stay_when_the_rest_is_filled(stage: int) -> None:
    run_ranks(2, keep_rows, stage)


@every_stage
def test_F98_tables_masks_and_counters_are_filled_or_named_on_all_ranks(stage: int) -> None:
    run_ranks(2, fill_tables, stage)
    run_ranks(2, forget_tables, stage)


def test_F98_random_contents_do_not_look_forgotten() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        words = torch.randint(-(2**31), 2**31, (1 << 18,), generator=generator).to(dtype)
        assert not is_blank(words)
        make_blank(words[: 1 << 16])
        assert is_blank(words)
    for dtype in (torch.bool, torch.uint16, torch.complex128, torch.float8_e4m3fn, torch.float16):
        tensor = torch.zeros(5, 4, dtype=dtype).t()
        assert not is_blank(tensor)
        make_blank(tensor[:, 1:])
        assert is_blank(tensor)


def share_on_meta() -> None:
    """A buffer of two modules, LSTM's list of weights, and classes and attributes of parameters survive."""
    with torch.device("meta"):
        model = nn.ModuleDict({"lstm": nn.LSTM(3, 3), "a": nn.BatchNorm1d(3), "b": nn.BatchNorm1d(3)})
        model["b"].running_mean = model["a"].running_mean
    model.forward = lambda x: model["b"](model["a"](model["lstm"](x)[0]))  # type: ignore[method-assign]
    torch.manual_seed(0)
    minizero.Zero(model)
    assert model["a"].running_mean is model["b"].running_mean
    torch.manual_seed(0)
    wanted = nn.LSTM(3, 3)
    x = torch.ones(2, 3)
    torch.testing.assert_close(model(x), nn.BatchNorm1d(3)(nn.BatchNorm1d(3)(wanted(x)[0])))


def test_F98_what_several_places_hold_stays_one() -> None:
    run_ranks(2, share_on_meta)


# ---- F40: ranks that start from different values -----------------------------------------------------------------


def start_apart(stage: int) -> None:
    torch.manual_seed(0)
    wanted = Chain()
    wanted.norm.running_mean += 0.5
    torch.manual_seed(dist.get_rank())
    model = Chain()
    model.norm.running_mean += 0.5 + dist.get_rank()
    model.norm.num_batches_tracked += dist.get_rank()
    zero = minizero.Zero(model, stage=stage)
    equal_states(zero.full_state(), wanted.state_dict())
    for name, buffer in model.named_buffers():  # on every rank
        assert torch.equal(buffer, wanted.get_buffer(name)), name
    with zero.gathered():
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, wanted.get_parameter(name)), name


@every_stage
@pytest.mark.parametrize("world", [2, 3])
def test_F40_all_ranks_start_from_rank_0(stage: int, world: int) -> None:
    run_ranks(world, start_apart, stage)


def shard_different_models(stage: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + dist.get_rank()))
    with pytest.raises(ValueError, match=r"'1\.weight': \(4, 4\).*rank 1 has.*'1\.weight': \(5, 4\)"):
        minizero.Zero(model, stage=stage)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(dist.get_rank() == 0))
    with pytest.raises(ValueError, match=r"'1\.weight'.*requires_grad=False"):
        minizero.Zero(model, stage=stage)
    with pytest.raises(ValueError, match=r"stage \d"):
        minizero.Zero(model.requires_grad_(True), stage=1 + (stage + dist.get_rank()) % 3)


@every_stage
def test_F40_ranks_that_shard_different_models_all_raise_and_name_the_difference(stage: int) -> None:
    run_ranks(2, shard_different_models, stage)


# ---- F41: the model is changed after sharding --------------------------------------------------------------------


def forward(model: nn.Module) -> Tensor:
    return model(torch.ones(3, 4, dtype=torch.get_default_dtype()))


def replace(model: nn.Module) -> None:
    model.head.weight = nn.Parameter(torch.ones(2, 4))


def assign(model: nn.Module) -> None:
    model.load_state_dict(Chain().state_dict(), assign=True)


def extend(model: nn.Module) -> None:
    model.blocks[0].add_module("extra", nn.Linear(2, 2))


def register(model: nn.Module) -> None:
    model.register_parameter("bonus", nn.Parameter(torch.ones(3)))


# change -> what the error names
CHANGES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "scale": (lambda model: model.half(), "'stem.weight'"),
    "bfloat16": (lambda model: model.to(torch.bfloat16), "'stem.weight'"),
    "one layer": (lambda model: model.blocks[1].inner[2].half(), r"'blocks\.1\.inner\.2\.weight'"),
    "meta": (lambda model: model.to("meta"), "'stem.weight'"),
    "to_empty": (lambda model: model.to_empty(device="cpu"), "'stem.weight'"),
    "replace": (replace, r"'head\.weight'"),
    "assign": (assign, "'stem.weight'"),
    "extend": (extend, r"'blocks\.0\.extra\.weight'"),
    "register": (register, "'bonus'"),
}


def change_after_sharding(stage: int) -> None:
    for how, (change, name) in CHANGES.items():
        torch.manual_seed(0)
        model = Chain()
        minizero.Zero(model, stage=stage)
        with pytest.raises(RuntimeError, match=name):
            change(model)
            forward(model)
            pytest.fail(f"{how}: no error")


@every_stage
def test_F41_a_change_after_sharding_raises_at_once_or_at_the_next_forward(stage: int) -> None:
    run_ranks(2, in_double, change_after_sharding, stage)


def change_nothing(stage: int) -> None:
    pair = Pair(Chain, stage)
    pair.model.to("cpu")
    pair.model.cpu().double().to(torch.float64).to(device="cpu", dtype=torch.float64)
    pair.model.to("cpu", non_blocking=True).train().requires_grad_(True)
    pair.check()
    pair.model.blocks[0].inner.to("cpu")
    pair.model.eval()
    pair.reference.eval()
    for batch in random_batches(2, 4, 4):
        pair.backward(batch)
        pair.check_gradients()
        pair.step()
        check_values(pair.zero.full_state(), pair.reference)
    assert forward(pair.model).dtype == torch.float64


@every_stage
def test_F41_moving_and_casting_to_what_it_is_are_harmless(stage: int) -> None:
    run_ranks(2, in_double, change_nothing, stage)


def replace_and_look_away(stage: int) -> None:
    """A replaced parameter must not be put back silently by the next gather."""

    def in_context(zero: minizero.Zero) -> None:
        with zero.gathered():
            replace(zero.model)

    def before_context(zero: minizero.Zero) -> None:
        replace(zero.model)
        with zero.gathered():
            pass

    def before_full_state(zero: minizero.Zero) -> None:
        replace(zero.model)
        zero.full_state()

    for way in (in_context, before_context, before_full_state):
        zero = minizero.Zero(Chain(), stage=stage)
        with pytest.raises(RuntimeError, match=r"'head\.weight'"):
            way(zero)
            forward(zero.model)
            pytest.fail(f"{way.__name__}: no error")


@pytest.mark.ch11
@every_stage
def test_F41_a_replaced_parameter_is_not_lost_without_a_word(stage: int) -> None:
    run_ranks(2, in_double, replace_and_look_away, stage)


class Plain(nn.Module):
    """Without buffers, so that training is the same on any number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = Xavier(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(pair: Pair, seed: int = 1) -> None:
    for batch in random_batches(2, 3, 4, seed=seed):
        pair.backward(batch)
        pair.check_gradients()
        pair.step()
        pair.check()


def operate(stage: int) -> None:
    """Surgery inside gathered(): in place and by .data, on weights of a unit and of the root."""
    pair = Pair(Plain, stage)
    state = {name: value + 1 for name, value in pair.reference.state_dict().items()}

    def surgery(model: nn.Module) -> None:
        model.head.weight.data = torch.ones(2, 4)
        model.blocks[1].first.bias.data = model.blocks[1].first.bias.data * 3
        with torch.no_grad():
            model.blocks[0].inner[2].weight.fill_(0.5)

    with pair.zero.gathered():
        surgery(pair.model)
    surgery(pair.reference)
    pair.check()
    train(pair)
    with pair.zero.gathered():
        pair.model.load_state_dict(state)
    pair.reference.load_state_dict(state)
    pair.check()
    train(pair, seed=2)


@every_stage
def test_F41_surgery_inside_gathered_reaches_every_shard(stage: int) -> None:
    run_ranks(2, in_double, operate, stage)


# ---- F42: copies and pickles -------------------------------------------------------------------------------------


def copy_sharded(stage: int) -> None:
    pair = Pair(Plain, stage)
    for _ in range(2):  # before and after training
        for attempt in (
            lambda: copy.deepcopy(pair.model),
            lambda: pickle.dumps(pair.model),
            lambda: AveragedModel(pair.model),
            lambda: copy.deepcopy(pair.model.blocks[0]),
            lambda: copy.deepcopy(pair.zero),
            lambda: pickle.dumps(pair.zero),
        ):
            with pytest.raises((TypeError, minizero.ShardedAccessError), match="full_state"):
                attempt()
        train(pair)
    # The way out: the plain model, which can do all of it, and be sharded again.
    plain = pair.zero.unwrap()
    twin, averaged = copy.deepcopy(plain), AveragedModel(plain)
    check_values(dict(twin.named_parameters()), pair.reference)
    assert torch.equal(averaged(torch.ones(1, 4)), plain(torch.ones(1, 4)))
    pickle.dumps(plain.state_dict())
    with torch.no_grad():
        plain.head.bias += 1
    check_values(dict(twin.named_parameters()), pair.reference)
    minizero.Zero(twin, stage=stage)
    minizero.Zero(plain, stage=stage)


@every_stage
def test_F42_a_sharded_model_refuses_copies_and_points_to_full_state(stage: int) -> None:
    run_ranks(2, in_double, copy_sharded, stage)


# ---- F43: sharded twice, two models ------------------------------------------------------------------------------


def shard_twice(stage: int) -> None:
    pair = Pair(Plain, stage)
    for again in (pair.model, pair.model.blocks[0], nn.Sequential(nn.Linear(4, 4), pair.model.blocks)):
        for other in (1, 2, 3):
            with pytest.raises(ValueError, match=r"'.*(blocks|first|inner|head).*' is sharded already"):
                minizero.Zero(again, stage=other)
    train(pair)  # the refusals have changed nothing
    model = Plain()
    minizero.Zero(model.blocks[0], [], stage=stage)  # a child first, then its parent
    with pytest.raises(ValueError, match=r"'blocks\.0\.first\.weight' is sharded already"):
        minizero.Zero(model, stage=stage)


@every_stage
def test_F43_sharding_twice_raises_and_changes_nothing(stage: int) -> None:
    run_ranks(2, in_double, shard_twice, stage)


def train_two_models(stage: int) -> None:
    first, second = Pair(Plain, stage), Pair(Block, 1 + stage % 3, units=lambda model: [model.inner])
    for seed in range(2):
        train(first, seed)
        train(second, seed)
    a, b = random_batches(2, 3, 4, seed=5)
    first.backward(a)
    second.backward(b)
    first.check_gradients()
    second.check_gradients()
    # One feeds the other: one backward through both.
    rank = dist.get_rank()
    second.model(first.model.blocks[0](a[rank])).sum().backward()
    for x in a:
        (second.reference(first.reference.blocks[0](x)).sum() / len(a)).backward()
    for pair in (first, second):
        pair.check_gradients()
        pair.step()
        pair.check()
    del first, pair
    gc.collect()
    train(second, 7)
    train(Pair(Plain, stage), 8)


@every_stage
def test_F43_two_models_do_not_disturb_each_other(stage: int) -> None:
    run_ranks(2, in_double, train_two_models, stage)


def refuse_units(stage: int) -> None:
    """A failed attempt leaves the model as it was: trained afterwards, it equals one process."""
    model = Plain()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    for units, name in (
        ([nn.Linear(2, 2)], "not a module inside the model"),
        ([model.blocks], r"'blocks' \(ModuleList\) has no forward"),
    ):
        with pytest.raises(ValueError, match=name):
            minizero.Zero(model, units, stage=stage)
    with pytest.raises(ValueError, match="prefetch"):
        minizero.Zero(model, stage=stage, prefetch=-1)
    with pytest.raises(ValueError, match="stage must be 1, 2 or 3"):
        minizero.Zero(model, stage=4)
    with pytest.raises(ValueError, match="no parameters"):
        minizero.Zero(nn.Tanh(), stage=stage)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert not model._forward_pre_hooks
    minizero.Zero(model, stage=stage)


@every_stage
def test_F43_a_refused_attempt_changes_nothing(stage: int) -> None:
    run_ranks(2, in_double, refuse_units, stage)


class Pairs(nn.Module):
    """Layers as a list of [attention, feed-forward] lists."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Xavier(4, 4), Block()]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for first, second in self.layers:
            x = second(first(x))
        return x


def train_lists_of_lists(stage: int) -> None:
    pair = train_like_one_process(Pairs, random_batches(1, 3, 4), stage)
    names = [unit.name for unit in pair.zero.units]
    assert names == ["root", "layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]


@every_stage
def test_F43_lists_of_lists_give_a_unit_for_each_inner_element(stage: int) -> None:
    run_ranks(2, in_double, train_lists_of_lists, stage)


# ---- the way out that the refusals name: unwrap, change, shard again ---------------------------------------------


def unwrap_and_change(stage: int) -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).requires_grad_(False)
    plain = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(target_modules=["0", "2"], r=2))
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0", "2"], r=2))
    nn.init.normal_(plain.base_model.model[0].lora_B["default"].weight)
    model.load_state_dict(plain.state_dict())
    x = torch.ones(3, 4)
    zero = minizero.Zero(model, stage=stage)
    with pytest.raises(RuntimeError, match=r"(requires_grad|lora_).*zero.unwrap\(\)"), model.disable_adapter():
        model(x)
    model = zero.unwrap()
    with plain.disable_adapter(), model.disable_adapter():
        torch.testing.assert_close(model(x), plain(x))
    for each in (plain, model):
        each.base_model.model[2].base_layer.requires_grad_(True)
    zero = minizero.Zero(model, stage=stage)
    optimizer, reference = zero.optimizer(torch.optim.AdamW), torch.optim.AdamW(plain.parameters())
    for _ in range(2):
        for each, steps in ((model, optimizer), (plain, reference)):
            each(x).square().sum().backward()
            steps.step()
            steps.zero_grad()
    state = zero.full_state()
    for name, value in plain.state_dict().items() if dist.get_rank() == 0 else ():
        torch.testing.assert_close(state[name], value)


@every_stage
def test_F41_unwrap_change_and_shard_again_as_the_refusals_say(stage: int) -> None:
    run_ranks(2, unwrap_and_change, stage)
