"""What stays in memory: faults F28, F29 and F30 of public bug reports."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import sys
import time
import weakref
from typing import Any

import harness
import pytest
import reference
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import minizero
from minizero.memory import gathered_bytes, model_states

pytestmark = pytest.mark.ch15
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


class Mallinfo2(ctypes.Structure):
    """glibc's own count, over all its arenas."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


HAS_MALLINFO2 = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallinfo2")
needs_mallinfo2 = pytest.mark.skipif(not HAS_MALLINFO2, reason="needs glibc 2.33 or newer to count live bytes")


def live_bytes() -> int:
    """Bytes that malloc has handed out and not got back: every CPU tensor, autograd's included.

    A thread of gloo can hold the buffers of a collective for a moment after its end, so the least of some looks counts.
    """
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo2
    looks = []
    for _ in range(8):
        info = mallinfo2()
        looks.append(int(info.uordblks + info.hblkhd))
        time.sleep(0.005)
    return min(looks)


def storages() -> dict[int, int]:
    """Storage -> bytes, of all tensors that Python knows."""
    found = {}
    for item in gc.get_objects():
        if issubclass(type(item), Tensor):
            with torch._C.DisableTorchFunctionSubclass():  # for a placeholder's own view of itself
                if not item.is_meta:
                    found[item.untyped_storage()._cdata] = item.untyped_storage().nbytes()
    return found


def gathered(zero: minizero.Zero) -> int:
    """Bytes of full parameters that are here now."""
    return sum(flat.full.untyped_storage().nbytes() for unit in zero.units for flat in unit.flats)


# ---- F28: peak above theory --------------------------------------------------------------------------------------

LAYERS, WIDTH, BATCH, WORLD = 8, 768, 192, 4
UNIT = WIDTH * WIDTH * 4  # bytes of one layer's weights: 2.25 MiB
ACTIVATION = BATCH * WIDTH * 4  # a quarter of it
NOISE = UNIT / 6  # connections, and the records that c10d keeps of its last collectives


class Chain(nn.Module):
    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return x


class Meter:
    """Notes (bytes above `base`, bytes of gathered weights) after each layer's forward, and when backward enters it."""

    def __init__(self, zero: minizero.Zero, base: int) -> None:
        self.zero, self.base = zero, base
        self.forward: dict[int, tuple[int, int]] = {}
        self.backward: dict[int, tuple[int, int]] = {}
        for i, layer in enumerate(zero.model.layers):  # hooks of zero were there first, and run first
            layer.register_forward_hook(lambda module, args, output, i=i: self._after_forward(i, output))

    def now(self) -> tuple[int, int]:
        for unit in self.zero.units:
            for work in unit._works:
                work.wait()
        return live_bytes() - self.base, gathered(self.zero)

    def _after_forward(self, i: int, output: Tensor) -> None:
        self.forward.setdefault(i, self.now())
        if output.requires_grad:
            output.register_hook(lambda gradient: self.backward.setdefault(i, self.now()) and None)


def assert_bytes(found: float, wanted: float, what: str) -> None:
    assert abs(found - wanted) < NOISE, (
        f"{what}: {found / UNIT:.2f} units of weights live, {wanted / UNIT:.2f} in theory"
    )


def settle() -> int:
    """Live bytes once everything that is made once in a process has been made (scratch memory too), by a first run."""
    zero = minizero.Zero(Chain(), stage=3)
    optimizer = zero.optimizer(minizero.AdamW)
    zero.model(torch.zeros(BATCH, WIDTH)).square().mean().backward()
    optimizer.step()
    del zero, optimizer
    gc.collect()
    return live_bytes()


def memory_of_stage_3(prefetch: int) -> None:
    x = torch.ones(BATCH, WIDTH)
    base = settle()
    zero = minizero.Zero(Chain(), stage=3, prefetch=prefetch)
    shards = LAYERS * UNIT // WORLD
    gc.collect()
    assert_bytes(live_bytes() - base, shards, "after sharding")
    assert set(storages().values()).isdisjoint({UNIT}), "a full weight is alive"
    meter = Meter(zero, base)
    loss = zero.model(x).square().mean()
    for i in range(LAYERS):
        ahead = min(prefetch, LAYERS - 1 - i)
        assert meter.forward[i][1] == ahead * UNIT, f"gathered after the forward of layer {i}"
        assert_bytes(meter.forward[i][0], shards + ahead * UNIT + (i + 1) * ACTIVATION, f"after forward {i}")
    assert gathered(zero) == 0
    loss.backward()
    for i in range(LAYERS):
        full = 1 + min(prefetch, i)
        assert meter.backward[i][1] == full * UNIT <= gathered_bytes([UNIT // 4] * LAYERS, WORLD, 4, prefetch)
        # One gradient is in flight, as it was sent and as it is received; those before it are shards, and the buffers
        # of the last one may be kept for the next. The gradient of the output is here, and what the layers below read.
        gradients = 2 * UNIT + (LAYERS - 2 - i) * UNIT / WORLD if i < LAYERS - 1 else 0
        least = shards + full * UNIT + gradients + (i + 1) * ACTIVATION
        spare = 2 * UNIT if i < LAYERS - 2 else 0
        what = f"when backward enters layer {i}: {meter.backward[i][0] / UNIT:.2f} units of weights live"
        assert least - NOISE < meter.backward[i][0] < least + spare + NOISE, f"{what}, {least / UNIT:.2f} in theory"
    assert gathered(zero) == 0
    del loss
    gc.collect()
    assert_bytes(live_bytes() - base, 2 * shards, "after backward")
    zero.optimizer(minizero.AdamW).step()
    states = model_states(LAYERS * UNIT // 4, WORLD, 3, "fp32")
    gc.collect()
    assert_bytes(live_bytes() - base, states.parameters + states.gradients, "after the step, its optimizer gone")


def memory_of_stages_1_and_2(stage: int) -> None:
    x = torch.ones(BATCH, WIDTH)
    base = settle()
    zero = minizero.Zero(Chain(), stage=stage)
    optimizer = zero.optimizer(minizero.AdamW)
    for _ in range(2):
        optimizer.zero_grad()
        zero.model(x).square().mean().backward()
        full = [torch.Tensor.grad.__get__(leaf) for unit in zero.units for flat in unit.flats for leaf in flat.leaves]
        assert all(gradient is None for gradient in full)
        optimizer.step()
    zero.model(x).square().mean().backward()
    states = model_states(LAYERS * UNIT // 4, WORLD, stage, "fp32")
    gc.collect()
    # At stage 1 the gradient of step 2 is still a shard in the slices: nobody called zero_grad().
    shard_too = states.gradients / WORLD if stage == 1 else 0
    assert_bytes(live_bytes() - base, states.total + shard_too, f"model states of stage {stage}")
    if stage == 1:
        zero.clip_grad_norm(1.0)
        assert_bytes(live_bytes() - base, states.total - states.gradients * (1 - 1 / WORLD), "reduced")
    optimizer.zero_grad()
    zero.model(x).square().mean().backward()
    gc.collect()
    assert_bytes(live_bytes() - base, states.total, f"model states of stage {stage}")


def memory_of_eval() -> None:
    """Passes without a backward leave nothing: under no_grad, with a graph that is dropped, and by one layer alone."""
    x = torch.ones(BATCH, WIDTH)
    base = settle()
    zero = minizero.Zero(Chain(), stage=3)
    shards = LAYERS * UNIT // WORLD
    with torch.no_grad():
        zero.model(x)
    assert_bytes(live_bytes() - base, shards, "after no_grad")
    with torch.inference_mode():
        zero.model(x)
    assert_bytes(live_bytes() - base, shards, "after inference_mode")
    zero.model(x)
    zero.model.layers[3](x)
    assert_bytes(live_bytes() - base, shards, "after dropping the graph")
    with zero.gathered():
        zero.model(x)
    zero.full_state()
    gc.collect()
    assert_bytes(live_bytes() - base, shards, "after gathered() and full_state()")
    del zero
    gc.collect()
    memory_with_recomputation()


def memory_with_recomputation() -> None:
    """Activation checkpointing must not keep weights either: neither after forward nor after recomputing."""
    x = torch.ones(BATCH, WIDTH, requires_grad=True)
    base = live_bytes()
    zero = minizero.Zero(Chain(recomputes=True), stage=3, prefetch=0)
    shards = LAYERS * UNIT // WORLD
    meter = Meter(zero, base)
    loss = zero.model(x).square().mean()
    for i in range(LAYERS):
        assert meter.forward[i][1] == 0
        assert_bytes(meter.forward[i][0], shards + (i + 1) * ACTIVATION, f"after forward {i}")
    loss.backward()
    for i in range(LAYERS):
        assert meter.backward[i][1] == UNIT
    assert gathered(zero) == 0
    del loss
    x.grad = None
    assert_bytes(live_bytes() - base, 2 * shards, "after backward")


@needs_mallinfo2
@pytest.mark.parametrize("prefetch", [0, 1])
def test_F28_stage_3_holds_shards_activations_and_the_units_in_flight(prefetch: int) -> None:
    harness.run_ranks(WORLD, memory_of_stage_3, prefetch)


@needs_mallinfo2
@pytest.mark.parametrize("stage", [1, 2])
def test_F28_stages_1_and_2_hold_the_model_states_of_theory(stage: int) -> None:
    harness.run_ranks(WORLD, memory_of_stages_1_and_2, stage)


@needs_mallinfo2
def test_F28_passes_without_backward_and_recomputation_leave_nothing() -> None:
    harness.run_ranks(WORLD, memory_of_eval)


# ---- F29: leak over steps ----------------------------------------------------------------------------------------


def hooks_of(model: nn.Module) -> int:
    """Hooks on modules and parameters, of every kind."""
    owners: list[Any] = [*model.modules(), *model.parameters()]
    count = 0
    for owner in owners:
        with torch._C.DisableTorchFunctionSubclass():
            names = [name for name in dir(owner) if name.endswith("_hooks") and not name.startswith("__")]
            values = [getattr(owner, name, None) for name in names]
        count += sum(len(value) for value in values if isinstance(value, dict))
    return count


def census(zero: minizero.Zero) -> dict[str, int]:
    gc.collect()
    found = storages()
    leaves = sum(len(leaf._post_accumulate_grad_hooks or ()) for u in zero.units for f in u.flats for leaf in f.leaves)
    return {
        "tensors": sum(issubclass(type(item), Tensor) for item in gc.get_objects()),
        "storages": len(found),
        "storage bytes": sum(found.values()),
        "hooks": hooks_of(zero.model),
        "leaf hooks": leaves,
        "threads": len(os.listdir("/proc/self/task")),
        "open files": len(os.listdir("/proc/self/fd")),
    }


def small_gpt(width: int = 48) -> minizero.GPT:
    torch.manual_seed(0)
    return minizero.GPT(minizero.GPTConfig(vocab_size=61, context=16, layers=2, heads=2, width=width))


def token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens[:, :-1], tokens[:, 1:])


def many_steps(stage: int) -> None:
    zero = minizero.Zero(small_gpt(width=256), stage=stage)
    optimizer = zero.optimizer(minizero.AdamW, lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    counts, live = {}, {}
    for step in range(1, 51):
        token_loss(zero.model, torch.randint(61, (2, 17), generator=generator)).backward()
        zero.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            zero.model.eval()
            with torch.no_grad():
                token_loss(zero.model, torch.randint(61, (2, 17), generator=generator))
            zero.model.train()
            zero.full_state()
            with zero.gathered():
                token_loss(zero.model, torch.randint(61, (2, 17), generator=generator))
            counts[step], live[step] = census(zero), live_bytes() if HAS_MALLINFO2 else 0
    assert counts[10] == counts[50]
    one_unit = zero.units[1].flats[0].layout.numel * 4
    assert one_unit > 3_000_000  # c10d's records of collectives, a kilobyte each, still grow: under a megabyte here
    assert live[50] - live[10] < one_unit / 2, f"live bytes at steps {live}"


def deletion(stage: int) -> None:
    zero = minizero.Zero(small_gpt(), stage=stage)
    optimizer = zero.optimizer(minizero.AdamW, lr=1e-3)
    tokens = torch.arange(34).view(2, 17)
    token_loss(zero.model, tokens).backward()
    optimizer.step()
    # unwrap() gives the plain model back: no hook, no placeholder, no mark, and it trains on by itself.
    plain = small_gpt()
    model = zero.unwrap()
    state = dict(model.state_dict())
    assert hooks_of(model) == hooks_of(plain) == 0
    assert set(vars(model)) == set(vars(plain))
    for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert type(p) is nn.Parameter
        assert (set(vars(p)), p.shape, p.requires_grad, p.is_leaf) == (set(vars(q)), q.shape, True, True), name
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    copy.deepcopy(model).load_state_dict(state, strict=True)
    expected = small_gpt()
    expected.load_state_dict(state)
    for either in (model, expected):
        either.zero_grad()
        token_loss(either, tokens).backward()
        torch.optim.SGD(either.parameters(), lr=0.1).step()
    assert all(torch.equal(v, expected.state_dict()[n]) for n, v in model.state_dict().items())
    dies = weakref.ref(model)
    zero_dies = weakref.ref(zero)
    del model, zero, optimizer, state, p, either
    gc.collect()
    assert dies() is None
    assert zero_dies() is None
    # Without unwrap() everything goes as well, and the storages with it.
    before = storages()
    zero = minizero.Zero(small_gpt(), stage=stage)
    optimizer = zero.optimizer(minizero.AdamW, lr=1e-3)
    token_loss(zero.model, tokens).backward()
    optimizer.step()
    dies, zero_dies = weakref.ref(zero.model), weakref.ref(zero)
    del zero, optimizer
    gc.collect()
    assert dies() is None
    assert zero_dies() is None
    assert sum(storages().values()) == sum(before.values())


def rebuilding(stage: int) -> None:
    """A notebook shards a new model again and again: threads, sockets and process groups must not pile up."""

    def resources() -> dict[str, int]:
        gc.collect()
        groups = torch.distributed.distributed_c10d._world.pg_map
        return {
            "threads": len(os.listdir("/proc/self/task")),
            "open files": len(os.listdir("/proc/self/fd")),
            "groups": len(groups),
        }

    counts = []
    for _ in range(4):
        zero = minizero.Zero(small_gpt(), stage=stage)
        token_loss(zero.model, torch.arange(34).view(2, 17)).backward()
        zero.unwrap()
        del zero
        counts.append(resources())
    assert counts[1] == counts[3], counts


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads and files in /proc")
@STAGES
def test_F29_nothing_grows_over_steps(stage: int) -> None:
    harness.run_ranks(2, many_steps, stage)


@STAGES
def test_F29_model_and_zero_can_be_deleted_with_and_without_unwrap(stage: int) -> None:
    harness.run_ranks(2, deletion, stage)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads and files in /proc")
@STAGES
def test_F29_sharding_again_and_again_leaves_no_threads_sockets_or_groups(stage: int) -> None:
    harness.run_ranks(2, rebuilding, stage)


# ---- F30: state left behind after an exception -------------------------------------------------------------------


class Fails(torch.autograd.Function):
    """Passes everything on, and raises in backward when told so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Fragile) -> Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.layer.fail_if("backward")
        return gradient, None


class Fragile(nn.Module):
    when = ""  # "forward", "nested" or "backward"
    error: type[BaseException] = RuntimeError

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def fail_if(self, moment: str) -> None:
        if self.when == moment:
            raise self.error(f"out of memory, say, in {moment}")

    def forward(self, x: Tensor) -> Tensor:
        self.fail_if("forward")
        x = self.first(x).tanh()
        self.fail_if("nested")
        return Fails.apply(self.second(x), self)


class FragileChain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Fragile() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x


def failing_attempt(pair: reference.Pair, batch: list[Tensor], when: str, error: type[BaseException]) -> None:
    """One good backward, which counts, and then one attempt that raises in layer 2, which does not."""
    layer = pair.model.layers[2]
    pair.backward(batch)
    layer.when, layer.error = when, error
    with pytest.raises(error, match="out of memory"):
        pair.model(batch[dist.get_rank()]).square().mean().backward()
    layer.when = ""
    if when == "backward":  # some of its gradients were there already: as ever in torch, start afresh
        pair.optimizer.zero_grad()
        pair.reference_optimizer.zero_grad()
        pair.backward(batch)


FAILURES: list[tuple[str, type[BaseException]]] = [
    ("nested", RuntimeError),
    ("backward", RuntimeError),
    ("nested", KeyboardInterrupt),  # no Exception: torch does not run the hooks that always run
]


def raise_in_layer(stage: int) -> None:
    pair = reference.Pair(lambda: FragileChain().double(), stage)
    batches = iter(reference.random_batches(20, 3, 4, dtype=torch.float64))
    for when, error in [*FAILURES, ("forward", RuntimeError), ("forward", torch.OutOfMemoryError)]:
        batch = next(batches)
        failing_attempt(pair, batch, when, error)
        if stage == 3 and error is not KeyboardInterrupt:
            reference.check_clean(pair.zero)
        for grad in (True, False):  # an eval pass between, which sees the right weights
            with torch.set_grad_enabled(grad):
                torch.testing.assert_close(pair.model(batch[0]), pair.reference(batch[0]), rtol=1e-9, atol=1e-12)
        pair.step()
        pair.check()
        pair.backward(next(batches))
        if stage > 1:
            pair.check_gradients()
        pair.step()
        pair.check()


def step_after_failure(stage: int) -> None:
    """The failure is followed at once by each of the verbs, with no forward in between that could tidy up."""
    for when, error in FAILURES:
        pair = reference.Pair(lambda: FragileChain().double(), stage)
        batches = iter(reference.random_batches(20, 3, 4, dtype=torch.float64))
        for verb in ("step", "clip", "state", "gathered", "load", "zero_grad", "unwrap"):
            batch = next(batches)
            failing_attempt(pair, batch, when, error)
            if verb == "clip":
                norm = nn.utils.clip_grad_norm_(pair.reference.parameters(), 0.1)
                assert pair.zero.clip_grad_norm(0.1) == pytest.approx(norm.item(), rel=1e-12)
            elif verb == "state":
                pair.zero.full_state()
            elif verb == "gathered":
                with pair.zero.gathered():
                    reference.check_values(dict(pair.model.named_parameters()), pair.reference)
            elif verb == "load":
                pair.zero.load_full_state({n: 2 * v for n, v in pair.reference.state_dict().items()})
                with torch.no_grad():
                    for p in pair.reference.parameters():
                        p.mul_(2)
            elif verb == "zero_grad":
                pair.optimizer.zero_grad()
                pair.reference_optimizer.zero_grad()
                pair.backward(batch)
            elif verb == "unwrap":
                reference.check_values(dict(pair.zero.unwrap().named_parameters()), pair.reference)
                continue
            pair.step()
            torch.testing.assert_close(pair.model(batch[0]), pair.reference(batch[0]), rtol=1e-9, atol=1e-12)
            pair.check()


def raise_in_gathered(stage: int) -> None:
    """Documented: nothing is written; stage 3 forgets the change, 1 and 2 keep it on the rank that made it."""
    pair = reference.Pair(lambda: FragileChain().double(), stage)
    (batch, again) = reference.random_batches(2, 3, 4, dtype=torch.float64)
    with pytest.raises(ZeroDivisionError), pair.zero.gathered(), torch.no_grad():
        pair.model.layers[1].first.weight.fill_(2.0)
        raise ZeroDivisionError
    if stage == 3:
        reference.check_clean(pair.zero)
    else:
        with torch.no_grad():
            pair.reference.layers[1].first.weight.fill_(2.0)
    for batches in (batch, again):
        pair.backward(batches)
        pair.step()
        pair.check()
    # Nested contexts: the inner one's end, by an error too, does not end the outer one.
    with pair.zero.gathered(), torch.no_grad():
        with pytest.raises(ZeroDivisionError), pair.zero.gathered():
            raise ZeroDivisionError
        pair.model.stem.weight.fill_(3.0)
        pair.reference.stem.weight.fill_(3.0)
    pair.check()


@STAGES
def test_F30_training_goes_on_after_a_layer_raised(stage: int) -> None:
    harness.run_ranks(2, raise_in_layer, stage)


@STAGES
def test_F30_every_verb_works_right_after_a_layer_raised(stage: int) -> None:
    harness.run_ranks(2, step_after_failure, stage)


@STAGES
def test_F30_an_error_inside_gathered_releases_and_writes_nothing(stage: int) -> None:
    harness.run_ranks(2, raise_in_gathered, stage)
