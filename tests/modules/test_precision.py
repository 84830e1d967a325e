"""precision.py and the masters in sharding/: 16 bits where it is said, 32 where it matters, the bytes of theory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from by_hand import ByHand
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import check_clean, random_batches
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import minizero
from minizero import GPT, GPTConfig, Ledger
from minizero.collectives import ring_bytes
from minizero.memory import PRECISIONS, model_states
from minizero.memory import Precision as BytesPerParameter
from minizero.precision import LossScaleError, LossScaler, Precision, cast
from minizero.sharding import FlatParameters, holders_of
from minizero.zero import Zero

pytestmark = pytest.mark.ch21
harness.preload("minizero.precision", "minizero.models")
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=64, context=8, layers=2, width=16, heads=2))


def tokens(steps: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randint(64, (2, 9), generator=generator) for _ in range(dist.get_world_size())] for _ in range(steps)
    ]


def token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch[:, :-1], batch[:, 1:])


# ---- the same bits as mixed precision by hand -----------------------------------------------------------------------

POLICIES = [
    Precision(BF16),
    Precision(BF16, FP32),
    Precision(FP16, FP32, (nn.LayerNorm,)),
    Precision(FP32, BF16),
    Precision(BF16, FP16, (nn.Embedding, nn.LayerNorm)),
]


def trains_by_hand(stage: int) -> None:
    for precision in POLICIES:
        model, hand = gpt(), ByHand(gpt(), precision, torch.optim.SGD, lr=0.5)
        zero = Zero(model, stage=stage, dtypes=precision)
        optimizer = zero.optimizer(torch.optim.SGD, lr=0.5)
        hand.check(zero)
        for batches in tokens(3):
            for _ in range(2):  # micro-steps: the second gradient is added to the first
                loss = token_loss(model, batches[dist.get_rank()])
                loss.backward()
                assert loss == hand.backward(token_loss, batches)[dist.get_rank()]
            optimizer.step()
            hand.step()
            optimizer.zero_grad()
            hand.check(zero)
            check_clean(zero)


@STAGES
@pytest.mark.parametrize("world", [2, 3])
def test_every_stage_has_the_bits_of_mixed_precision_by_hand(stage: int, world: int) -> None:
    harness.run_ranks(world, trains_by_hand, stage)


def checkpointed(reentrant: bool) -> None:
    """Reentrant checkpointing hands over several gradients for a parameter in one backward: summed in fp32."""
    for stage in (1, 2, 3):
        model = gpt()
        zero = Zero(model, stage=stage, dtypes=Precision(BF16))

        def twice(m: nn.Module, batch: Tensor) -> Tensor:
            x = m.token_embedding(batch[:, :-1])
            for block in m.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
                x = checkpoint(block, x, use_reentrant=reentrant)
            return m.head(x).float().square().mean()

        with zero.gathered():
            twice(model, tokens(1)[0][dist.get_rank()]).backward()
        zero.reduce()
        assert all(piece.grad.dtype == FP32 for _, piece in zero.named_slices() if piece.grad is not None)


def test_recomputed_blocks_that_are_used_twice_work_in_bf16() -> None:
    harness.run_ranks(2, checkpointed, True)
    harness.run_ranks(2, checkpointed, False)


# ---- which dtype where ----------------------------------------------------------------------------------------------


class Probe(nn.Module):
    """Says what came in; returns it, in containers."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.full((4,), 1.0 + 2**-12))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *, extra: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        self.seen = [x.dtype, extra["mask"].dtype, extra["ids"].dtype, self.scale.dtype, self.table.dtype]
        if self.inner is not None:
            x, extra = self.inner(x, extra=extra)
            self.seen.append(x.dtype)
        return x * self.scale, extra


class Kept(Probe):
    pass


def inputs() -> tuple[Tensor, dict[str, Any]]:
    return torch.ones(2, 4, requires_grad=True), {"mask": torch.zeros(2), "ids": torch.zeros(2, dtype=torch.int64)}


def dtypes_inside(stage: int) -> None:
    model = Probe(Kept(Kept()))
    inner, innermost = model.inner, model.inner.inner
    zero = Zero(model, units=[model.inner], stage=stage, dtypes=Precision(BF16, keep_fp32=(Kept,)))
    x, extra = inputs()
    y, extra = model(x, extra=extra)
    assert model.seen == [BF16, BF16, torch.int64, BF16, FP32, BF16]
    assert innermost.seen == [FP32, FP32, torch.int64, FP32, FP32]
    assert inner.seen == [*innermost.seen, FP32]
    assert (y.dtype, extra["mask"].dtype, extra["ids"].dtype) == (BF16, BF16, torch.int64)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == FP32
    zero.reduce()
    assert all(piece.grad is not None and piece.grad.dtype == FP32 for _, piece in zero.named_slices())
    assert {str(flat.wire) for unit in zero.units for flat in unit.flats} == {"torch.bfloat16", "torch.float32"}
    zero.unwrap()
    y, _ = model(*inputs()[:1], extra=inputs()[1])
    assert [y.dtype, model.seen[0]] == [FP32, FP32]  # the hooks are gone, and the parameters are as before


@STAGES
def test_inputs_are_cast_and_kept_modules_compute_in_fp32(stage: int) -> None:
    harness.run_ranks(2, dtypes_inside, stage)


def test_cast_reaches_into_containers_and_leaves_the_rest() -> None:
    value = {"a": [torch.ones(1), (torch.ones(1, dtype=torch.int32), "text", None)], "b": torch.ones(1, dtype=BF16)}
    out = cast(value, BF16)
    assert [out["a"][0].dtype, out["a"][1][0].dtype, out["b"].dtype] == [BF16, torch.int32, BF16]
    assert out["a"][1][1:] == ("text", None)
    assert out["b"] is value["b"]  # no copy where nothing is to do


def kept_root() -> None:
    model = nn.Linear(3, 2)
    zero = Zero(model, dtypes=Precision(BF16, keep_fp32=(nn.Linear,)))
    assert model(torch.ones(1, 3)).dtype == FP32
    assert zero.units[0].flats[0].master is zero.units[0].flats[0].shard


def test_a_model_that_is_kept_as_a_whole_stays_as_it_is() -> None:
    harness.run_ranks(2, kept_root)


class TiedToKept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight


def refusals() -> None:
    with pytest.raises(ValueError, match=r"'embedding\.weight' and 'head\.weight', which are one parameter"):
        Zero(TiedToKept(), dtypes=Precision(BF16, keep_fp32=(nn.Embedding,)))
    Zero(TiedToKept(), dtypes=Precision(BF16, keep_fp32=(nn.Embedding, nn.Linear)))
    with pytest.raises(ValueError, match=r"ranks bring different models.*computed in torch\.(bfloat16|float16)"):
        Zero(nn.Linear(2, 2), dtypes=Precision(BF16 if dist.get_rank() else FP16))
    with pytest.raises(ValueError, match="ranks bring different models"):
        Zero(nn.Linear(2, 2), dtypes=Precision(BF16) if dist.get_rank() else None)


def test_ranks_that_disagree_and_ties_across_dtypes_are_refused_on_every_rank() -> None:
    harness.run_ranks(2, refusals)


def test_precision_names_a_bad_argument() -> None:
    for arguments, message in (
        ({"dtype": torch.int8}, "dtype must be"),
        ({"dtype": "bf16"}, "dtype must be"),
        ({"dtype": BF16, "reduce_dtype": torch.float64}, "reduce_dtype must be"),
    ):
        with pytest.raises(ValueError, match=message):
            Precision(**arguments)
    with pytest.raises(TypeError, match="keep_fp32"):
        Precision(BF16, keep_fp32=("LayerNorm",))


def other_dtypes() -> None:
    """float64 parameters keep a float64 master, bf16 ones get one of fp32, frozen ones and integers need none."""
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Linear(3, 3)})
    model["a"].double()
    model["b"].bfloat16()
    model["c"].requires_grad_(False)
    model.register_parameter("steps", nn.Parameter(torch.arange(3), requires_grad=False))
    zero = Zero(model, units=[], dtypes=Precision(BF16))
    found = {name: flat for flat in zero.units[0].flats for name in flat.names}
    assert {name: (flat.full.dtype, flat.master.dtype) for name, flat in found.items()} == {
        **{f"a.{name}": (BF16, torch.float64) for name in ("weight", "bias")},
        **{f"b.{name}": (BF16, FP32) for name in ("weight", "bias")},
        **{f"c.{name}": (BF16, FP32) for name in ("weight", "bias")},
        "steps": (torch.int64, torch.int64),
    }


def test_what_becomes_of_other_dtypes() -> None:
    harness.run_ranks(2, other_dtypes)


# ---- bytes ----------------------------------------------------------------------------------------------------------


def wire(stage: int) -> dict[str, int]:
    sent = {}
    for name, precision in (("fp32", None), ("bf16", Precision(BF16)), ("bf16, fp32 sums", Precision(BF16, FP32))):
        model = gpt()
        zero = Zero(model, stage=stage, dtypes=precision)
        optimizer = zero.optimizer(torch.optim.SGD, lr=0.1)
        with Ledger() as ledger:
            for _ in range(2 if stage == 1 else 1):  # stage 1 adds in fp32 and sends in 16 bits
                token_loss(model, tokens(1)[0][dist.get_rank()]).backward()
            optimizer.step()
        roll_calls = 2 * len(zero.units) * 8 * (dist.get_world_size() - 1) if stage == 3 else 0
        sent[name] = ledger.total - roll_calls
        padded = sum(flat.layout.padded_numel for unit in zero.units for flat in unit.flats)
        itemsize = {"fp32": (4, 4), "bf16": (2, 2), "bf16, fp32 sums": (2, 4)}[name]
        once = ring_bytes("all_gather", padded, dist.get_world_size())
        assert sent[name] == once * ((2 if stage == 3 else 1) * itemsize[0] + itemsize[1])
    return sent


@STAGES
def test_half_the_bytes_go_over_the_wire(stage: int) -> None:
    for sent in harness.run_ranks(3, wire, stage):
        assert sent["bf16"] * 2 == sent["fp32"]


def alive(zero: Zero, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Bytes of every storage that flats, gradients and optimizer hold (without step counts); padded parameters."""
    flats = [flat for unit in zero.units for flat in unit.flats]
    tensors = [t for flat in flats for t in (flat.full, flat.shard, flat.master)]
    tensors += [piece.grad for flat in flats for piece in flat.slices if piece.grad is not None]
    whole = [torch.Tensor.grad.__get__(leaf) for flat in flats for leaf in flat.leaves]  # past what refuses it
    tensors += [gradient for gradient in whole if gradient is not None]
    tensors += zero.unreduced()
    tensors += [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()), sum(flat.layout.padded_numel for flat in flats)


def kept(stage: int, apart: bool) -> tuple[int, int]:
    model = gpt()
    zero = Zero(model, stage=stage, dtypes=Precision(BF16))
    for flat in (flat for unit in zero.units for flat in unit.flats) if apart else ():
        flat.set_master(torch.empty_like(flat.master))
    optimizer = zero.optimizer(minizero.AdamW)
    for batches in tokens(2):  # measured between the second backward and its step
        optimizer.step()
        optimizer.zero_grad()
        token_loss(model, batches[dist.get_rank()]).backward()
    return alive(zero, optimizer)


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_per_parameter_are_16_or_18_over_n(world: int) -> None:
    # stage 3 sends its master, rounded: 4 master + 4 gradient + 8 moments; with a 16-bit shard beside it: 18
    whole = BytesPerParameter(parameters=4, gradients=4, optimizer=8)
    for apart, precision, total in ((False, whole, 16), (True, PRECISIONS["mixed-fp32-gradients"], 18)):
        for nbytes, padded in harness.run_ranks(world, kept, 3, apart):
            assert nbytes == model_states(padded, world, 3, precision).total == total * padded // world
    # stages 1 and 2 hold all 16-bit weights; stage 1 all 16-bit gradients, stage 2 a share of them in fp32
    for stage, precision in ((1, "mixed"), (2, "mixed-fp32-gradients")):
        for nbytes, padded in harness.run_ranks(world, kept, stage, False):
            assert nbytes == model_states(padded, world, stage, precision).total


# ---- masters --------------------------------------------------------------------------------------------------------


def masters_elsewhere(stage: int) -> None:
    for precision in (None, Precision(BF16)):
        ends = []
        for apart in (False, True):
            model = gpt()
            zero = Zero(model, stage=stage, dtypes=precision)
            for flat in (flat for unit in zero.units for flat in unit.flats) if apart else ():
                master = torch.empty_like(flat.master)
                flat.set_master(master)
                assert flat.master is master
                assert flat.shard is not master
                assert flat.shard.dtype == flat.full.dtype
            optimizer = zero.optimizer(minizero.AdamW, lr=0.1)
            for batches in tokens(2):
                token_loss(model, batches[dist.get_rank()]).backward()
                optimizer.step()
                optimizer.zero_grad()
            state = zero.full_state()
            zero.load_full_state(state)
            with zero.gathered(), torch.no_grad():
                model.head.weight[0, 0] = 0.3
            ends.append(zero.full_state())
        if dist.get_rank() == 0:
            assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@STAGES
def test_a_master_elsewhere_changes_no_bit(stage: int) -> None:
    harness.run_ranks(2, masters_elsewhere, stage)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=2), min_size=1, max_size=3),
    world=st.integers(1, 5),
    low=st.sampled_from([BF16, FP16]),
    aliased=st.booleans(),
    data=st.data(),
)
def test_a_master_changes_where_the_full_parameters_were_changed_and_nowhere_else(
    shapes: list[list[int]], world: int, low: torch.dtype, aliased: bool, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world - 1))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    model = nn.ParameterList([nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes])
    before = torch.cat([p.detach().flatten() for p in model])
    flat = FlatParameters(holders_of(model), rank, world, aliased)
    flat.compute_in(low, low)
    padded = torch.zeros(flat.layout.padded_numel)
    padded[: len(before)] = before
    assert torch.equal(flat.master, flat.cut(padded))
    changed = torch.rand(flat.layout.padded_numel, generator=generator) < 0.5
    changed[len(before) :] = False
    flat.full[changed] = 1.5
    flat.take_shard()
    assert torch.equal(flat.master, torch.where(flat.cut(changed), 1.5, flat.cut(padded)))
    assert torch.equal(flat.shard.to(low), flat.master.to(low))
    assert all(
        torch.equal(piece, flat.master[flat.layout.slice_of(i, rank)]) and piece.dtype == FP32
        for i, piece in enumerate(flat.slices)
    )


def test_a_master_survives_values_that_16_bits_cannot_hold() -> None:
    model = nn.ParameterList([nn.Parameter(torch.tensor([1e6, -1e6, 1e-30, 0.1]))])  # in fp16: inf, -inf, 0
    flat = FlatParameters(holders_of(model), 0, 2, aliased=False)
    flat.compute_in(FP16, FP16)
    flat.take_shard()
    assert torch.equal(flat.master, torch.tensor([1e6, -1e6]))


def state_inside_gathered(stage: int) -> None:
    model = gpt()
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    zero = Zero(model, stage=stage, dtypes=Precision(BF16))
    with zero.gathered(), torch.no_grad():
        model.head.weight[0] = 2.0
        inside = zero.full_state()
    after = zero.full_state()
    exact["head.weight"][0] = 2.0
    if dist.get_rank() == 0:
        for state in (inside, after):
            assert all(torch.equal(state[name], value) for name, value in exact.items())
    plain = zero.unwrap()
    assert all(torch.equal(value, exact[name]) for name, value in plain.state_dict().items())
    again = Zero(plain, stage=stage).full_state()
    assert dist.get_rank() > 0 or all(torch.equal(again[name], value) for name, value in exact.items())


@STAGES
def test_whole_parameters_are_exact_inside_gathered_after_it_and_when_unwrapped(stage: int) -> None:
    harness.run_ranks(2, state_inside_gathered, stage)


# ---- the loss scale -------------------------------------------------------------------------------------------------


def scales(scaler: LossScaler, finite: Sequence[bool]) -> list[float]:
    found = []
    for is_finite in finite:
        scaler.update(is_finite)
        found.append(scaler.scale)
    return found


def test_the_scale_doubles_after_a_window_and_halves_after_the_forgiven_overflows() -> None:
    scaler = LossScaler(initial=8, window=3, hysteresis=2, minimum=2, max_skips=2)
    assert scales(scaler, [True] * 3 + [False] * 2) == [8, 8, 16, 16, 8]
    assert scales(scaler, [False, True, True, False]) == [4, 4, 4, 2]  # nothing is forgiven before the next doubling
    assert scales(scaler, [True] * 3 + [False, False]) == [2, 2, 4, 4, 2]
    scaler.update(False)
    with pytest.raises(LossScaleError, match="2 steps in a row had infinite or NaN gradients at a loss scale of 2"):
        scaler.update(False)


def test_the_scale_stops_at_its_minimum() -> None:
    assert scales(LossScaler(initial=8, hysteresis=1, minimum=3), [False] * 3) == [4, 3, 3]


def test_a_static_scale_stays_and_gives_up_too() -> None:
    scaler = LossScaler(initial=1024, window=None, max_skips=3)
    assert scales(scaler, [True] * 5 + [False, False, True, False, False]) == [1024] * 10
    with pytest.raises(LossScaleError, match="a loss scale of 1024"):
        scaler.update(False)


FLAGS = st.lists(st.booleans(), max_size=60)


@given(FLAGS, st.integers(1, 5), st.integers(1, 4), st.integers(0, 60))
def test_a_scaler_goes_on_from_its_state_as_if_nothing_had_happened(
    finite: list[bool], window: int, hysteresis: int, cut: int
) -> None:
    def scaler() -> LossScaler:
        return LossScaler(initial=64, window=window, hysteresis=hysteresis, minimum=0.5, max_skips=1000)

    first, second = scaler(), scaler()
    begun = scales(first, finite[:cut])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    whole = scales(scaler(), finite)
    assert begun + scales(second, finite[cut:]) == whole
    assert all(scale >= 0.5 and scale in (2.0**e for e in range(-1, 80)) for scale in whole)


@given(FLAGS, st.integers(1, 5), st.integers(1, 4))
def test_scales_are_those_of_deepspeed(finite: list[bool], window: int, hysteresis: int) -> None:
    """DeepSpeed 0.19.8, runtime/fp16/loss_scaler.py, DynamicLossScaler.update_scale, without consecutive_hysteresis."""
    scale, left, last_overflow, expected = 2.0**6, hysteresis, -1, []
    for step, is_finite in enumerate(finite):
        if not is_finite:
            if hysteresis == 1 or left == 1:
                scale = max(scale / 2, 1.0)
            else:
                left -= 1
            last_overflow = step
        elif (step - last_overflow) % window == 0:
            left, scale = hysteresis, scale * 2
        expected.append(scale)
    ours = LossScaler(initial=2.0**6, window=window, hysteresis=hysteresis, max_skips=1000)
    assert scales(ours, finite) == expected


def test_a_scaler_names_what_is_wrong() -> None:
    bad: list[dict[str, Any]] = [
        {"initial": 0.5},
        {"window": 0},
        {"hysteresis": 0},
        {"minimum": 0.0},
        {"minimum": float("nan")},
        {"max_skips": 0},
    ]
    for arguments in bad:
        name = "initial" if arguments.get("minimum") != 0.0 and "minimum" in arguments else next(iter(arguments))
        with pytest.raises(ValueError, match=f"{name} is out of range"):
            LossScaler(**arguments)
    with pytest.raises(KeyError, match="scale"):
        LossScaler().load_state_dict({"_finite_steps": 0})


def test_a_loss_is_scaled_in_fp32() -> None:
    loss = torch.tensor(3.0, dtype=FP16, requires_grad=True)
    scaled = LossScaler(initial=2.0**15).scale_loss(loss)
    assert scaled.dtype == FP32
    assert scaled == 3 * 2.0**15  # in fp16: infinity
    scaled.backward()
    assert loss.grad == 2.0**15


def builds_on_meta(stage: int) -> None:
    usual = gpt().state_dict()
    torch.manual_seed(0)
    with torch.device("meta"):
        model = gpt()
    torch.manual_seed(0)
    state = Zero(model, stage=stage, dtypes=Precision(BF16)).full_state()
    assert dist.get_rank() > 0 or all(torch.equal(state[name], value) for name, value in usual.items())


@STAGES
def test_a_model_built_on_the_meta_device_gets_the_same_masters(stage: int) -> None:
    harness.run_ranks(2, builds_on_meta, stage)


def replicated(stage: int) -> None:
    """Two shard groups of two ranks, and of one rank: the sum goes over all four, in fp32."""
    rank = dist.get_rank()
    for size in (2, 1):
        shard_groups = [dist.new_group(list(range(first, first + size))) for first in range(0, 4, size)]
        replica_groups = [dist.new_group(list(range(first, 4, size))) for first in range(size)]
        groups = {"group": shard_groups[rank // size], "replicas": replica_groups[rank % size]}
        model, hand = nn.Linear(5, 3), ByHand(nn.Linear(5, 3), Precision(BF16), torch.optim.SGD, lr=0.5)
        hand.master.load_state_dict({name: torch.ones_like(p) / 3 for name, p in model.state_dict().items()})
        hand.publish()
        model.load_state_dict(hand.master.state_dict())
        zero = Zero(model, stage=stage, dtypes=Precision(BF16), **groups)
        optimizer = zero.optimizer(torch.optim.SGD, lr=0.5)
        batches = random_batches(1, 2, 5)[0]
        loss: Callable[[nn.Module, Tensor], Tensor] = lambda m, x: m(x).float().square().mean()  # noqa: E731
        loss(model, batches[rank]).backward()
        hand.backward(loss, batches)
        optimizer.step()
        hand.step()
        with zero.gathered():
            for name, p in model.named_parameters():
                torch.testing.assert_close(p.float(), dict(hand.master.named_parameters())[name], rtol=2**-7, atol=0)


@STAGES
def test_replicas_average_in_fp32(stage: int) -> None:
    harness.run_ranks(4, replicated, stage)
