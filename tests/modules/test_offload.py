"""offload/: bit for bit the training without, in other memory, of the size predicted."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import preload, run_ranks
from reference import mean_square, random_batches
from torch import Tensor, nn

import minizero
from minizero.accumulation import no_sync
from minizero.memory import model_states, padding
from minizero.offload import (
    Courier,
    MappedFile,
    bus_bytes,
    disk_bytes,
    offload_optimizer,
    offloaded_states,
    probe_states,
    room_for,
)
from minizero.precision import Precision

pytestmark = pytest.mark.ch24
preload("minizero.offload.step")
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
PLACES = [(1, 3), (2, 1), (2, 2), (3, 1), (3, 3)]  # ranks, stage
OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (minizero.AdamW, {"lr": 0.1}),
    (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    (torch.optim.Adam, {"lr": 0.1, "fused": True}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Rprop, {}),
]


class Body(nn.Module):
    """Blocks of odd sizes, a weight of one element and one that is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.full((5,), 0.5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x * self.scale + self.frozen


Make = Callable[..., torch.optim.Optimizer]


BF16 = Precision(torch.bfloat16)


def build(stage: int, dtypes: Precision | None = None) -> minizero.Zero:
    torch.manual_seed(0)
    return minizero.Zero(Body(), stage=stage, dtypes=dtypes)


def train(zero: minizero.Zero, optimizer: torch.optim.Optimizer, steps: int = 3, micro: int = 1, seed: int = 1) -> None:
    """Steps of `micro` backwards; in every other step all but the last leave their gradients where they are."""
    batches = iter(random_batches(steps * micro, 4, 5, seed=seed))
    for step in range(steps):
        for number in range(1, micro + 1):
            with no_sync(zero) if step % 2 and number < micro else nullcontext():
                mean_square(zero.model, next(batches)[dist.get_rank()]).backward()
        zero.clip_grad_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()


def assert_same(zero: minizero.Zero, optimizer: Any, other: minizero.Zero, other_optimizer: Any) -> None:
    """Bit for bit: weights, masters, states."""
    state, wanted = zero.full_state(), other.full_state()
    assert state.keys() == wanted.keys()
    assert [name for name in state if not torch.equal(state[name], wanted[name])] == []
    for (name, piece), (_, twin) in zip(zero.named_slices(), other.named_slices(), strict=True):
        assert torch.equal(piece, twin), name
        mine, theirs = optimizer.state[piece], other_optimizer.state[twin]
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            same = torch.equal(mine[key], value) if isinstance(value, Tensor) else mine[key] == value
            assert same, f"{key} of {name}"


def mapped_addresses(path: Path) -> list[range]:
    """Where the file is in this process's memory, as the kernel sees it."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            start, end = line.split()[0].split("-")
            found.append(range(int(start, 16), int(end, 16)))
    return found


def assert_in_file(optimizer: Any, path: Path) -> None:
    """Masters, and every state as large as its slice, lie in the file."""
    places, count = mapped_addresses(path), 0
    for group in optimizer.param_groups:
        for piece in group["params"]:
            values = [piece, *(v for v in optimizer.state[piece].values() if isinstance(v, Tensor) and v.dim() == 1)]
            for value in values:
                assert piece.numel() == 0 or any(value.data_ptr() in place for place in places)
                count += value.numel()
    assert count > 0


# ---- the same training


def _bitwise(stage: int, folder: str, optimizers: list[Any]) -> None:
    for index, (cls, options) in enumerate(optimizers):
        dtypes = BF16 if index % 3 == 0 else None
        plain = build(stage, dtypes)
        optimizer = plain.optimizer(cls, **options)
        train(plain, optimizer, micro=1 + 2 * (index % 2))
        for directory in (None, folder):
            offloaded = build(stage, dtypes)
            other = offload_optimizer(offloaded, cls, directory=directory, **options)
            train(offloaded, other, micro=1 + 2 * (index % 2))
            assert_same(offloaded, other, plain, optimizer)
            if directory is not None:
                assert_in_file(other, Path(directory) / f"rank{dist.get_rank()}.offload")
            other.offload.close()


@pytest.mark.parametrize(
    ("world", "stage", "optimizers"),
    [(2, 3, OPTIMIZERS), *((world, stage, OPTIMIZERS[:1] + OPTIMIZERS[4:6]) for world, stage in PLACES)],
)
def test_any_elementwise_optimizer_trains_bit_for_bit_as_without(
    world: int, stage: int, optimizers: list[Any], tmp_path: Path
) -> None:
    run_ranks(world, _bitwise, stage, str(tmp_path), optimizers)


def _groups(stage: int, folder: str) -> None:
    """F24: interleaved groups, a generator among them, a scheduler, hooks of the user's, one per step."""
    results = []
    for directory in ("none", None, folder):
        zero, calls = build(stage), []
        names = [name for name, _ in zero.named_slices()]
        groups = [
            {"params": (name for name in names if "bias" not in name), "lr": 0.05, "betas": (0.8, 0.9)},
            {"params": [name for name in names if "bias" in name], "weight_decay": 0.0},
        ]
        if directory == "none":
            optimizer = zero.optimizer(torch.optim.AdamW, groups, lr=0.1)
        else:
            optimizer = offload_optimizer(zero, torch.optim.AdamW, groups, lr=0.1, directory=directory)
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for seed in range(3):
            train(zero, optimizer, steps=1, seed=seed)
            scheduler.step()
        assert calls == ["before", "after"] * 3
        assert [len(group["params"]) for group in optimizer.param_groups] == [7, 6]
        assert [group["lr"] for group in optimizer.param_groups] == [0.05 / 8, 0.1 / 8]
        results.append((zero, optimizer))
    for zero, optimizer in results[1:]:
        assert_same(zero, optimizer, *results[0])


@STAGES
def test_f24_groups_schedulers_and_hooks_see_one_step(stage: int, tmp_path: Path) -> None:
    run_ranks(2, _groups, stage, str(tmp_path))


def _resumed(stage: int, folder: str) -> None:
    plain = build(stage)
    optimizer = plain.optimizer(torch.optim.AdamW, lr=0.1)
    train(plain, optimizer, steps=2)
    weights, states = plain.full_state(), copy.deepcopy(optimizer.state_dict())
    train(plain, optimizer, steps=2, seed=2)
    for directory in (None, folder):
        zero = build(stage)
        other = offload_optimizer(zero, torch.optim.AdamW, directory=directory, lr=0.1)
        train(zero, other, steps=1, seed=3)  # something to forget
        zero.load_full_state(weights)
        other.load_state_dict(copy.deepcopy(states))  # torch takes the tensors as they are
        if directory:
            assert_in_file(other, Path(folder) / f"rank{dist.get_rank()}.offload")
        train(zero, other, steps=2, seed=2)
        assert_same(zero, other, plain, optimizer)
        wrong = copy.deepcopy(states)
        wrong["state"][0]["exp_avg"] = torch.zeros(1000)
        with pytest.raises(ValueError, match="saved with other units"):
            other.load_state_dict(wrong)


@STAGES
def test_a_loaded_state_goes_into_the_file_and_goes_on_from_there(stage: int, tmp_path: Path) -> None:
    run_ranks(2, _resumed, stage, str(tmp_path))


def _surgery(stage: int, folder: str) -> None:
    """F23, F45: what rank 0 writes inside gathered() reaches all masters, or the next step would bring the old back."""
    names = ["blocks.1.0.weight", "blocks.1.2.weight"]  # rank 0 owns the first, rank 1 the most of the second
    for directory in (None, folder):
        zero = build(stage)
        optimizer = offload_optimizer(zero, torch.optim.SGD, directory=directory, lr=0.0)
        with zero.gathered(), torch.no_grad():
            if dist.get_rank() == 0:
                for name in names:
                    zero.model.get_parameter(name).fill_(2.0)
        train(zero, optimizer, steps=1)
        state = zero.full_state()
        assert dist.get_rank() > 0 or all((state[name] == 2.0).all() for name in names)
        plain = zero.unwrap()
        assert all((plain.get_parameter(name) == 2.0).all() for name in names)
        optimizer.offload.close()


@STAGES
def test_f23_f45_changed_weights_reach_the_masters(stage: int, tmp_path: Path) -> None:
    run_ranks(2, _surgery, stage, str(tmp_path))


def _in_place(stage: int, folder: str) -> None:
    """F45: stages 1 and 2 hand out the live parameters; what is done to them in place has to last."""
    for dtypes in (None, BF16):
        plain = build(stage, dtypes)
        optimizer = plain.optimizer(torch.optim.SGD, lr=0.1)
        offloaded = [build(stage, dtypes), build(stage, dtypes)]
        others = [
            offload_optimizer(zero, torch.optim.SGD, directory=directory, lr=0.1)
            for zero, directory in zip(offloaded, (None, folder), strict=True)
        ]
        others[0].offload.use(Slow())
        for seed in range(3):
            for zero, o in zip((plain, *offloaded), (optimizer, *others), strict=True):
                train(zero, o, steps=1, seed=seed)
                with torch.no_grad():
                    zero.model.blocks[seed][2].weight.clamp_(-0.1, 0.1)
        for zero, o in zip((plain, *offloaded), (optimizer, *others), strict=True):
            train(zero, o, steps=1)
        for zero, o in zip(offloaded, others, strict=True):
            assert_same(zero, o, plain, optimizer)
        others[1].offload.close()


@pytest.mark.parametrize("stage", [1, 2])
def test_f45_live_parameters_may_be_changed_in_place(stage: int, tmp_path: Path) -> None:
    run_ranks(2, _in_place, stage, str(tmp_path))


# ---- memory

WIDTH, LAYERS = 512, 8


def anonymous_bytes() -> int:
    """Memory of this process that has no file behind it."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Anonymous:"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _memory(stage: int, dtypes: Precision | None, folder: str) -> dict[str, tuple[int, int]]:
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD: what is freed goes back to the system at once
    x, found = torch.randn(4, WIDTH), {}

    def now() -> tuple[int, int]:
        """The least of some looks: gloo's threads free what they sent when they come to it."""
        gc.collect()
        looks = []
        for _ in range(5):
            dist.barrier()
            time.sleep(0.02)
            ctypes.CDLL(None).malloc_trim(0)
            looks.append((anonymous_bytes(), resident_bytes()))
        return min(looks)

    def measure(how: str) -> tuple[int, int]:
        """Anonymous and resident bytes between the second backward and the step, on top of what was there before."""
        before = now()
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        zero = minizero.Zero(model, list(model), stage=stage, dtypes=dtypes)
        if how == "plain":
            optimizer = zero.optimizer(torch.optim.AdamW, foreach=False)
        else:
            directory = folder if how == "disk" else None
            optimizer = offload_optimizer(zero, torch.optim.AdamW, directory=directory, foreach=False)
        mean_square(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        mean_square(model, x).backward()
        after = now()
        return after[0] - before[0], after[1] - before[1]

    measure("plain")  # what is made once, on first use, is not to be counted
    for how in ("plain", "host", "disk"):
        found[how] = measure(how)
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux 4.14 to tell pages with a file")
@pytest.mark.parametrize(("stage", "dtypes"), [(1, None), (2, BF16), (3, None), (3, BF16)])
def test_resident_memory_falls_by_what_theory_says(stage: int, dtypes: Precision | None, tmp_path: Path) -> None:
    params, world, weight = LAYERS * WIDTH * WIDTH, 2, 2 if dtypes else 4
    kind = "mixed-fp32-gradients" if dtypes and stage < 3 else "fp32"  # stage 3 keeps the masters alone: 16, not 18
    plain = model_states(params, world, stage, kind).total
    host = offloaded_states(params, world, stage, weight)
    disk = offloaded_states(params, world, stage, weight, on_disk=True)
    assert disk.disk == disk_bytes(params, world) == 12 * params // world
    assert host.host - disk.host == disk.disk
    for found in run_ranks(world, _memory, stage, dtypes, str(tmp_path)):
        for how, wanted in {"plain": plain, "host": host.device + host.host, "disk": disk.device + disk.host}.items():
            assert found[how][0] == pytest.approx(wanted, abs=0.03 * plain), (how, found)
        # With the pages of the file, which the kernel may take away at any time, as without: they were released.
        assert found["disk"][1] == pytest.approx(found["disk"][0], abs=0.03 * plain), found


def test_the_formulas_count_what_they_say() -> None:
    assert bus_bytes(100, 1, gradient=2) == 400  # ZeRO-Offload's 4M
    assert bus_bytes(101, 4, micro_batches=3) == 26 * (3 * 4 + 2)
    assert disk_bytes(101, 4) == 26 * 12
    at_16, at_fp32 = offloaded_states(100, 4, 3), offloaded_states(100, 4, 1, weight=4, on_disk=True)
    assert (at_16.device, at_16.host, at_16.disk) == (50, 400, 0)
    assert (at_fp32.device, at_fp32.host, at_fp32.disk) == (800, 0, 300)


def _exact_size(folder: str) -> None:
    zero = build(3)
    optimizer = offload_optimizer(zero, torch.optim.AdamW, directory=folder)
    sizes = [flat.layout.numel for unit in zero.units for flat in unit.flats if flat.requires_grad]
    params, count = sum(sizes) + padding(sizes, 2), sum(piece.numel() for _, piece in zero.named_slices())
    size = (Path(folder) / f"rank{dist.get_rank()}.offload").stat().st_size
    least = 4 * params // 2 + 8 * count
    # a page for the header, and where each tensor begins anew
    assert least <= size <= least + 4096 + 64 * (len(sizes) + 2 * len(list(zero.named_slices())))
    optimizer.offload.close()


def test_the_file_has_the_size_of_masters_and_states(tmp_path: Path) -> None:
    run_ranks(2, _exact_size, str(tmp_path))


# ---- which states there are


class Late(torch.optim.Optimizer):
    """Keeps a running mean, and from its second step on another; counts its steps in the group if asked to."""

    def __init__(self, params: Any, counts: bool = False, late: bool = False) -> None:
        super().__init__(params, {"counts": counts, "late": late, "step": 0})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["step"] += group["counts"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["mean"] = (
                    state["mean"] * 0.5 + p.grad if "mean" in state else p.grad.clone()
                )  # a new one each time
                if group["late"] and "steps" in state:
                    state["other"] = torch.zeros_like(p)
                state["steps"] = state.get("steps", 0) + 1
                p.sub_(state["mean"], alpha=0.1)


def test_states_are_found_by_a_step_on_small_parameters() -> None:
    for cls, options in OPTIMIZERS:
        p = nn.Parameter(torch.ones(11))
        optimizer = cls([p], **options)
        found = probe_states(optimizer)[p]
        p.grad = torch.ones(11)
        optimizer.step()
        real = {n: v.dtype for n, v in optimizer.state[p].items() if isinstance(v, Tensor) and v.shape == p.shape}
        assert found == real, cls


def _foreign(folder: str) -> None:
    with pytest.raises(TypeError, match="not known to treat every element by itself"):
        offload_optimizer(build(3), Late, directory=folder)
    with pytest.raises(TypeError, match="changes its param groups"):
        offload_optimizer(build(3), Late, directory=folder, elementwise=True, counts=True)
    with pytest.raises(ValueError, match="learning rate"):
        offload_optimizer(build(3), torch.optim.AdamW, directory=folder, lr=-1.0)
    with pytest.raises(KeyError, match="nobody"):
        offload_optimizer(build(3), torch.optim.AdamW, [{"params": ["nobody"]}], directory=folder)
    assert os.listdir(folder) == []  # nothing was begun
    zero, plain = build(3), build(3)
    optimizer = offload_optimizer(zero, Late, directory=folder, elementwise=True)
    reference = plain.optimizer(Late, elementwise=True)
    for some, o in ((zero, optimizer), (plain, reference)):
        train(some, o)
    assert_same(zero, optimizer, plain, reference)
    assert_in_file(optimizer, Path(folder) / f"rank{dist.get_rank()}.offload")
    optimizer.offload.close()
    zero = build(3)
    optimizer = offload_optimizer(zero, Late, directory=folder, elementwise=True, late=True)
    train(zero, optimizer, steps=1)
    with pytest.raises(TypeError, match="'other' later than in its first step"):
        train(zero, optimizer, steps=1)


def test_an_optimizer_of_ones_own_is_taken_or_told_why_not(tmp_path: Path) -> None:
    run_ranks(1, _foreign, str(tmp_path))


# ---- the file


def test_a_mapped_tensor_is_a_tensor_with_zeros_in_a_file(tmp_path: Path) -> None:
    sizes = [(3, torch.float32), (0, torch.float32), (5, torch.bfloat16), (1, torch.float64)]
    file = MappedFile(tmp_path / "a" / "b", sum(room_for(*each) for each in sizes))
    tensors = [file.tensor(*each) for each in sizes]
    for tensor, (numel, dtype) in zip(tensors, sizes, strict=True):
        assert (tensor.numel(), tensor.dtype) == (numel, dtype)
        assert not tensor.any()
        tensor.fill_(numel)
    file.release()
    assert all((tensor == tensor.numel()).all() for tensor in tensors)  # and no one wrote into another
    file.close()
    file.close()
    assert not file.path.exists()
    assert tensors[2].sum() == 25  # still there for who holds it


# ---- the way between a GPU and the host, with a stream that does its copies as late as it may


class Slow(Courier):
    """Makes its copies as late as it may: when somebody waits for them, or gives the GPU something to do."""

    def __init__(self) -> None:
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.most = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.copies.append((target.fill_(torch.nan), source))
        self.most = max(self.most, len(self.copies))

    def wait(self) -> None:
        for target, source in self.copies:
            target.copy_(source)
        self.copies.clear()

    join = wait


def _slow(stage: int, folder: str) -> None:
    for cls, micro, dtypes in ((torch.optim.AdamW, 1, None), (torch.optim.SGD, 3, BF16)):
        plain = build(stage, dtypes)
        optimizer = plain.optimizer(cls, lr=0.1)
        train(plain, optimizer, micro=micro)
        for directory in (None, folder):
            zero = build(stage, dtypes)
            other = offload_optimizer(zero, cls, directory=directory, lr=0.1)
            slow = Slow()
            other.offload.use(slow)
            train(zero, other, micro=micro)
            assert_same(zero, other, plain, optimizer)
            assert slow.most > 1 or stage == 1  # gradients were on their way while backward went on
            other.offload.close()


@STAGES
def test_f27_copies_that_come_late_are_waited_for(stage: int, tmp_path: Path) -> None:
    run_ranks(2, _slow, stage, str(tmp_path))
