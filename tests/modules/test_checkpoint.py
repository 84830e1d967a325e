"""checkpoint/: files, manifest, what is saved, what is loaded, what is exported."""

from __future__ import annotations

import json
import os
import random
import re
import tempfile
import threading
import time
import warnings
from collections import Counter, OrderedDict
from io import BytesIO
from pathlib import Path
from typing import Any

import harness
import numpy
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from harness import RankFailure, run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import minizero
from minizero import checkpoint
from minizero.checkpoint import files, manifest, one_file, save_load
from minizero.checkpoint.files import decode, encode
from minizero.checkpoint.manifest import CheckpointError, sources, span
from minizero.offload import offload_optimizer
from minizero.precision import Precision
from minizero.sharding import Layout

pytestmark = pytest.mark.ch25
harness.preload("minizero.checkpoint.save_load", "minizero.offload.step", "minizero.precision", "hypothesis")
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


# ---- files.py


def some_tensors() -> dict[str, Tensor]:
    return {
        "odd": torch.arange(3, dtype=torch.uint8),
        "half": torch.randn(3, 1).bfloat16(),
        "wide": torch.randn(2, 3, dtype=torch.float64),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0),
        "turned": torch.randn(3, 2).t(),
        "yes": torch.tensor([True, False]),
        "count": torch.tensor(7),
    }


def test_the_library_reads_what_is_written_by_hand(tmp_path: Path) -> None:
    tensors = some_tensors()
    size, crc = files.write_tensors(tmp_path / "x.safetensors", tensors, {"format": "pt", "ψ": "1"})
    assert size == (tmp_path / "x.safetensors").stat().st_size
    assert crc == files.checksum(tmp_path / "x.safetensors")
    read = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[n], tensors[n]) and read[n].dtype == tensors[n].dtype for n in tensors)
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "ψ": "1"}
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_a_tensor_that_was_written_can_still_be_resized() -> None:
    tensor = torch.ones(4)
    assert b"".join(files.pieces_of(tensor)) == tensor.numpy().tobytes() == b"\0\0\x80?" * 4
    stage3 = torch.ones(4)
    list(files.pieces_of(stage3))
    stage3.untyped_storage().resize_(0)


def test_a_dtype_without_a_name_in_the_format_is_refused_by_the_name_of_its_tensor(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'phase' is torch.complex128"):
        files.write_tensors(tmp_path / "x", {"phase": torch.zeros(1, dtype=torch.complex128)}, {})
    assert os.listdir(tmp_path) == []


def test_a_file_that_cannot_be_finished_was_never_there(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    with pytest.raises(ZeroDivisionError), files.durable(tmp_path / "old") as file:
        file.write(b"half of the new")
        _ = 1 / 0
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("old", "old")]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(Path, "replace", lambda a, b: (events.append(f"{a.name} -> {b.name}"), replace(a, b))[1])
    with files.durable(tmp_path / "x") as file:
        file.write(b"x")
    assert events == [f"{tmp_path}/x.partial", "x.partial -> x", str(tmp_path)]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner)
    ),
    max_leaves=20,
)


@given(VALUES)
@settings(deadline=None)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    back = decode(json.loads(json.dumps(encode(value, "x", {}))), {})
    assert back == value
    assert repr(back) == repr(value)


def test_tensors_and_what_schedulers_hold_come_back_too() -> None:
    value = {1: torch.ones(2), "1": torch.zeros(1), "m": Counter({3: 2}), "o": OrderedDict(a=float("inf"))}
    value |= {"b": b"\0x", "f": BytesIO(b"y")}
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(value, "x", tensors))
    back = decode(json.loads(text), tensors)
    assert torch.equal(back[1], torch.ones(2))
    assert torch.equal(back["1"], torch.zeros(1))
    assert back["m"][3] == 2
    assert isinstance(back["m"], Counter)
    assert back["o"] == {"a": float("inf")}
    assert back["b"] == b"\0x"
    assert back["f"].read() == b"y"


NOT_PLAIN = [{1, 2}, object(), bytearray(b"x"), torch.Size([1]), numpy.float64(1), torch.float32, len]


@pytest.mark.parametrize("value", NOT_PLAIN)
def test_what_would_need_pickle_is_refused_with_its_path(value: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"extra/a/1 is of type {type(value).__name__}")):
        encode({"a": [0, value]}, "extra", {})


# ---- manifest.py


@given(
    st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=5),
    st.integers(1, 7),
    st.integers(1, 7),
)
@settings(deadline=None)
def test_every_element_is_read_from_where_it_was_saved(shapes: list[list[int]], old: int, new: int) -> None:
    saved, here = (Layout(tuple(map(torch.Size, shapes)), world) for world in (old, new))
    flat = torch.arange(saved.numel)
    shards = nn.functional.pad(flat, (0, saved.padded_numel - saved.numel), value=-1).view(old, -1)
    for index in range(len(shapes)):
        parts = [shard[saved.slice_of(index, rank)] for rank, shard in enumerate(shards)]
        together = []
        for rank in range(new):
            wanted = span(here, index, rank)
            assert len(wanted) == here.slice_of(index, rank).stop - here.slice_of(index, rank).start
            got = torch.full([len(wanted)], -2)
            read = 0
            for source, part, target in sources(saved, index, wanted):
                got[target] = parts[source][part]
                read += part.stop - part.start
            assert read == len(wanted)
            together.append(got)
        assert torch.equal(torch.cat(together), flat[saved.offsets[index] : saved.offsets[index + 1]])


@pytest.mark.parametrize("tag", ["", "..", "../x", "a/b", "/a", ".hidden", "a\n", "x.partial", "a" * 101, "a\0"])
def test_a_tag_leads_nowhere_else(tag: str) -> None:
    with pytest.raises(ValueError, match="tag"):
        manifest.check_tag(tag)


# ---- a model with everything in it


class Everything(nn.Module):
    """Frozen, tied and unused parameters, buffers, dropout, a scalar, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.5)) for _ in range(2)
        )
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(self.frozen(x))
        return nn.functional.cross_entropy(self.head(x) * self.scale, tokens)


def start(stage: int, cls: Any = minizero.AdamW, seed: int = 0, **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    model = Everything()
    zero = minizero.Zero(model, stage=stage)
    groups = [
        {"params": [p for p in model.parameters() if p.requires_grad and p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]},
    ]
    optimizer = zero.optimizer(cls, groups, **({"lr": 0.05} | options))
    for generator in (torch.manual_seed, random.seed, numpy.random.seed):
        generator(100 * seed + dist.get_rank())
    return model, zero, optimizer


def train(model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.randint(7, (4,))) * (1 + random.random() + numpy.random.rand())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def everything_of(zero: Any, optimizer: Any) -> dict[str, Any]:
    """All values of this rank, as a flat dict of tensors and numbers."""
    found: dict[str, Any] = {f"buffer {n}": b.clone() for n, b in zero.model.named_buffers()}
    for name, piece in [(n, p) for u in zero.units for f in u.flats for n, p in zip(f.names, f.slices, strict=True)]:
        found[name] = piece.detach().clone()
        found[f"{name} grad"] = None if piece.grad is None else piece.grad.clone()
        if optimizer is not None:
            found |= {f"{name} {k}": v.clone() for k, v in optimizer.state.get(piece, {}).items()}
    for number, group in enumerate(optimizer.param_groups if optimizer is not None else []):
        found |= {f"group {number} {key}": value for key, value in group.items() if key != "params"}
    return found


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]) if isinstance(a[key], Tensor) else a[key] == b[key], key


# ---- saving and loading


def save_and_load(stage: int, folder: Path) -> None:
    model, zero, optimizer = start(stage)
    train(model, optimizer, 2)
    optimizer.param_groups[1]["lr"] = 0.01
    saved = everything_of(zero, optimizer)
    checkpoint.save(folder, "two", zero, optimizer, step=2, extra={"rank": dist.get_rank(), "t": torch.ones(2)})
    assert_same(everything_of(zero, optimizer), saved)
    then = train(model, optimizer, 2), everything_of(zero, optimizer), zero.full_state()

    model, zero, optimizer = start(stage, seed=1)
    groups = optimizer.param_groups[1]
    loaded = checkpoint.load(folder, zero, optimizer)
    assert (loaded.tag, loaded.step, loaded.extra["rank"]) == ("two", 2, dist.get_rank())
    assert torch.equal(loaded.extra["t"], torch.ones(2))
    assert optimizer.param_groups[1] is groups
    assert str(folder) not in Path("/proc/self/maps").read_text()  # nothing of what was loaded is still a file's
    assert_same(everything_of(zero, optimizer), saved)
    again = train(model, optimizer, 2), everything_of(zero, optimizer), zero.full_state()
    assert again[0] == then[0]
    assert_same(again[1], then[1])
    assert_same(again[2], then[2])
    # and into an optimizer that has taken steps, a model in the middle of a backward that failed
    model(torch.randint(7, (4,)))
    checkpoint.load(folder, zero, optimizer)
    assert_same(everything_of(zero, optimizer), saved)
    assert train(model, optimizer, 2) == then[0]


@STAGES
def test_what_is_loaded_is_what_was_saved_and_goes_on_the_same(stage: int, tmp_path: Path) -> None:
    run_ranks(2, save_and_load, stage, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["latest", "two"]
    assert (tmp_path / "latest").read_text() == "two\n"
    assert sorted(os.listdir(tmp_path / "two")) == ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]


OPTIMIZERS = {
    "minizero": (minizero.Adam, {"fused": False}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "SGD without states": (torch.optim.SGD, {}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "NAdam": (torch.optim.NAdam, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "Rprop": (torch.optim.Rprop, {}),
    "lr as a tensor": (torch.optim.Adam, {"lr": torch.tensor(0.05), "foreach": False}),
}


def every_optimizer(folder: Path) -> None:
    for name, (cls, options) in OPTIMIZERS.items():
        model, zero, optimizer = start(3, cls, **options)
        train(model, optimizer, 2)
        tag = name.replace(" ", "_")
        checkpoint.save(folder, tag, zero, optimizer, step=2)
        then = train(model, optimizer, 2)
        model, zero, optimizer = start(3, cls, seed=1, **options)
        assert checkpoint.load(folder, zero, optimizer).tag == tag
        assert train(model, optimizer, 2) == then, name


def test_every_elementwise_optimizer_goes_on_the_same(tmp_path: Path) -> None:
    run_ranks(2, every_optimizer, tmp_path)


def schedule(optimizer: Any, kind: str) -> Any:
    s = torch.optim.lr_scheduler
    return {
        "steps": lambda: s.MultiStepLR(optimizer, [1, 1, 3]),
        "one cycle": lambda: s.OneCycleLR(optimizer, 0.1, total_steps=9),
        "warm-up": lambda: s.SequentialLR(
            optimizer, [s.LinearLR(optimizer, 0.1, total_iters=2), s.CosineAnnealingLR(optimizer, 5)], [2]
        ),
        "plateau": lambda: s.ReduceLROnPlateau(optimizer, patience=0),
    }[kind]()


def rates(optimizer: Any, scheduler: Any, steps: int) -> list[list[float]]:
    found = []
    for _ in range(steps):
        scheduler.step(*([1.0] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
        found.append([float(group["lr"]) for group in optimizer.param_groups])
    return found


def every_scheduler(folder: Path) -> None:
    for kind in ("steps", "one cycle", "warm-up", "plateau"):
        model, zero, optimizer = start(2)
        train(model, optimizer, 1)
        scheduler = schedule(optimizer, kind)
        rates(optimizer, scheduler, 2)
        checkpoint.save(folder, kind.replace(" ", "-"), zero, optimizer, step=2, extra=scheduler.state_dict())
        then = rates(optimizer, scheduler, 4)
        _, zero, optimizer = start(2, seed=1)
        scheduler = schedule(optimizer, kind)
        scheduler.load_state_dict(checkpoint.load(folder, zero, optimizer).extra)
        assert rates(optimizer, scheduler, 4) == then, kind


@pytest.mark.filterwarnings("ignore")
def test_schedulers_go_on_the_same(tmp_path: Path) -> None:
    run_ranks(2, every_scheduler, tmp_path)


def without_optimizer(folder: Path) -> None:
    model, zero, optimizer = start(3)
    train(model, optimizer, 1)
    state, random_state = zero.full_state(), torch.get_rng_state()
    checkpoint.save(folder, "all", zero, optimizer, step=1)
    checkpoint.save(folder, "weights", zero, step=1)
    for tag in ("all", "weights"):
        _, zero, optimizer = start(1, seed=1)
        before = torch.get_rng_state()
        checkpoint.load(folder, zero, tag=tag)
        assert_same(zero.full_state(), state)
        assert torch.equal(torch.get_rng_state(), before)
        assert not torch.equal(before, random_state)
        assert not optimizer.state
    with pytest.raises(CheckpointError, match="saved without an optimizer"):
        checkpoint.load(folder, zero, optimizer)


def test_parameters_alone_can_be_loaded_and_saved(tmp_path: Path) -> None:
    run_ranks(2, without_optimizer, tmp_path)


def other_groups(folder: Path) -> None:
    model, zero, optimizer = start(3)
    train(model, optimizer, 1)
    checkpoint.save(folder, "x", zero, optimizer, step=1)
    before = zero.full_state()

    def refuse(optimizer: Any, message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load(folder, zero, optimizer)
        assert_same(zero.full_state(), before)

    refuse(zero.optimizer(minizero.AdamW), "the optimizer has 1 parameter groups, the checkpoint 2")
    groups = [{"params": ["unused", "scale"]}, {"params": ["embedding.weight"]}]
    refuse(zero.optimizer(minizero.AdamW, groups), r"group 0: 'blocks.0.0.weight' is in it in the checkpoint only")
    _, other, optimizer = start(3, torch.optim.SGD)
    with pytest.raises(CheckpointError, match="group 0: option 'betas' is in the checkpoint only"):
        checkpoint.load(folder, other, optimizer)
    with pytest.raises(CheckpointError, match="holds tensors that are no slices of this Zero"):
        checkpoint.save(folder, "y", zero, optimizer, step=1)


def test_an_optimizer_with_other_groups_is_refused_by_what_differs(tmp_path: Path) -> None:
    run_ranks(2, other_groups, tmp_path)


def other_models(folder: Path) -> None:
    zero = minizero.Zero(nn.Linear(3, 2))
    checkpoint.save(folder, "x", zero, step=0)
    for model, message in {
        nn.Linear(4, 2): r"'weight' was saved as float32 \(2, 3\), here it is float32 \(2, 4\)",
        nn.Linear(3, 2).double(): r"'weight' was saved as float32 \(2, 3\), here it is float64",
        nn.Linear(3, 2, bias=False): r"'bias' is not in the model",
        nn.Sequential(nn.Linear(3, 2)): r"'0.bias' is not in the checkpoint",
    }.items():
        zero = minizero.Zero(model)
        before = zero.full_state()
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load(folder, zero)
        assert_same(zero.full_state(), before)
    norm = nn.BatchNorm1d(3)
    checkpoint.save(folder, "norm", minizero.Zero(norm), step=0)
    norm = nn.BatchNorm1d(3)
    norm.running_mean = None
    with pytest.raises(
        CheckpointError, match=r"'buffer/running_mean' is torch.float32 \(3,\) in the file, and not there"
    ):
        checkpoint.load(folder, minizero.Zero(norm))


def test_another_model_is_refused_by_the_name_of_what_differs(tmp_path: Path) -> None:
    run_ranks(2, other_models, tmp_path)


def refused_saves(folder: Path) -> None:
    model, zero, optimizer = start(1)
    rank = dist.get_rank()
    train(model, optimizer, 1)
    model(torch.randint(7, (4,))).backward()
    with pytest.raises(CheckpointError, match="before the gradients of a backward are reduced"):
        checkpoint.save(folder, "x", zero, optimizer, step=1)
    optimizer.zero_grad()
    with zero.gathered(), pytest.raises(CheckpointError, match=r"inside gathered\(\)"):
        checkpoint.save(folder, "x", zero, optimizer, step=1)
    with pytest.raises(CheckpointError, match="rank 1: TypeError: rest/extra is of type object"):
        checkpoint.save(folder, "x", zero, optimizer, step=1, extra=object() if rank else None)
    with pytest.raises(CheckpointError, match=r"tag '\.\./x' must be"):
        checkpoint.save(folder, "../x", zero, optimizer, step=1)
    with pytest.raises(CheckpointError, match="keep must be at least 1, got 0"):
        checkpoint.save(folder, "x", zero, optimizer, step=1, keep=0)
    state = optimizer.state[next(iter(optimizer.state))]
    state["row"] = torch.ones(2, 2)
    with pytest.raises(CheckpointError, match=r"state 'row' of parameter 'embedding.weight' is not element-wise"):
        checkpoint.save(folder, "x", zero, optimizer, step=1)
    del state["row"]
    assert not folder.exists()
    checkpoint.save(folder, "x", zero, optimizer, step=1)
    with pytest.raises(CheckpointError, match="x is the latest checkpoint"):
        checkpoint.save(folder, "x", zero, optimizer, step=1)
    # every rank must see the folder that rank 0 has made
    mine = folder if rank == 0 else folder / "elsewhere"
    with pytest.raises(CheckpointError, match=r"rank 1: FileNotFoundError: .*elsewhere/y.partial"):
        checkpoint.save(mine, "y", zero, optimizer, step=1)
    checkpoint.load(folder, zero, optimizer)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*: no file named latest"):
        checkpoint.load(folder / "nothing", zero, optimizer)
    with pytest.raises(CheckpointError, match="z is no folder"):
        checkpoint.load(folder, zero, optimizer, tag="z")


def test_what_cannot_be_saved_is_refused_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, refused_saves, tmp_path / "new")


def half_full_window(stage: int, folder: Path) -> None:
    """Gradients of an accumulation that is under way are saved; stage 1 reduces them first."""
    model, zero, optimizer = start(stage)
    train(model, optimizer, 1)

    def micro_step() -> None:
        (model(torch.randint(7, (4,))) / 2).backward()
        zero.reduce()

    micro_step()
    checkpoint.save(folder, "x", zero, optimizer, step=1)
    micro_step()
    optimizer.step()
    then = everything_of(zero, optimizer)
    model, zero, optimizer = start(stage, seed=1)
    checkpoint.load(folder, zero, optimizer)
    micro_step()
    optimizer.step()
    assert_same(everything_of(zero, optimizer), then)


@STAGES
def test_a_half_full_window_is_saved(stage: int, tmp_path: Path) -> None:
    run_ranks(2, half_full_window, stage, tmp_path)


def keep_two(folder: Path) -> None:
    model, zero, optimizer = start(3)
    (folder / "mine").mkdir(parents=True, exist_ok=True)
    for step in range(4):
        train(model, optimizer, 1)
        checkpoint.save(folder, f"step-{step}", zero, optimizer, step=step, keep=2)
    checkpoint.save(folder, "step-2", zero, optimizer, step=9, keep=2)  # an older one is written anew
    assert checkpoint.load(folder, zero, optimizer).step == 9
    assert checkpoint.load(folder, zero, optimizer, tag="step-3").step == 3


def test_only_the_newest_are_kept_and_nothing_else_is_touched(tmp_path: Path) -> None:
    run_ranks(2, keep_two, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["latest", "mine", "step-2", "step-3"]
    assert (tmp_path / "latest").read_text() == "step-2\nstep-3\n"


def replicas(folder: Path) -> None:
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    twins = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 1))
    zero = minizero.Zero(model, group=pairs[rank // 2], replicas=twins[rank % 2])
    optimizer = zero.optimizer(minizero.AdamW, lr=0.1)
    torch.manual_seed(rank)

    def go() -> Tensor:
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return torch.cat([p.detach().clone() for _, p in zero.named_slices()])

    go()
    checkpoint.save(folder, "x", zero, optimizer, step=1, extra=rank)
    then = go()
    assert checkpoint.load(folder, zero, optimizer).extra == rank
    assert torch.equal(go(), then)
    checkpoint.export(folder / "whole", zero)
    if rank == 0:
        whole = safetensors.torch.load_file(folder / "whole")
    state = zero.full_state()
    if rank == 0:
        assert_same(whole, state)


def test_replicas_save_each_shard_once_and_their_own_random_numbers(tmp_path: Path) -> None:
    run_ranks(4, replicas, tmp_path)
    sizes = [(tmp_path / "x" / manifest.file_of(i)).stat().st_size for i in range(4)]
    assert min(sizes[:2]) > max(sizes[2:])


# ---- in the background


def slow_disk(folder: Path) -> None:
    write, order = files.write_tensors, []

    def slowly(*args: Any) -> Any:
        time.sleep(0.5)
        order.append("written")
        return write(*args)

    from minizero.checkpoint import snapshot

    snapshot.write_tensors = slowly
    model, zero, optimizer = start(3)
    with checkpoint.AsyncSaver(folder, keep=2) as saver:
        train(model, optimizer, 1)
        saver.save("one", zero, optimizer, step=1)
        saved = everything_of(zero, optimizer)
        order.append("returned")
        train(model, optimizer, 2)
        assert order == ["returned"]
        saver.save("two", zero, optimizer, step=2)  # waits for the first
        assert order == ["returned", "written"]
        assert (folder / "latest").read_text() == "one\n"
    assert (folder / "latest").read_text() == "two\none\n"
    assert threading.active_count() == 1
    model, zero, optimizer = start(3, seed=1)
    checkpoint.load(folder, zero, optimizer, tag="one")
    assert_same(everything_of(zero, optimizer), saved)


def test_a_background_save_holds_the_values_of_its_moment_and_the_next_one_waits(tmp_path: Path) -> None:
    run_ranks(2, slow_disk, tmp_path)


def failing_disk(folder: Path) -> None:
    from minizero.checkpoint import snapshot

    write = snapshot.write_tensors

    def fail(*args: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device", "the disk of rank 1")
        return write(*args)

    model, zero, optimizer = start(3)
    saver = checkpoint.AsyncSaver(folder)
    saver.save("one", zero, optimizer, step=1)
    saver.wait()
    snapshot.write_tensors = fail
    message = "could not write checkpoint .*two: rank 1: OSError: .*No space left on device"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        saver.save("two", zero, optimizer, step=2)
        train(model, optimizer, 1)
        with pytest.raises(CheckpointError, match=message):
            saver.save("three", zero, optimizer, step=3)
    assert [re.match(message, str(w.message)) is not None for w in warned] == [True]
    snapshot.write_tensors = write
    assert checkpoint.load(folder, zero, optimizer).tag == "one"
    saver.save("three", zero, optimizer, step=3)
    saver.wait()
    saver.wait()
    assert checkpoint.load(folder, zero, optimizer).tag == "three"


def test_an_error_in_the_background_is_raised_by_the_next_call_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, failing_disk, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["latest", "one", "three"]


AT_EXIT = """
import sys, torch, minizero
from minizero import checkpoint
from minizero.checkpoint import snapshot
import tempfile
import time
import warnings
write = snapshot.write_tensors
snapshot.write_tensors = lambda *a: (time.sleep(0.5), write(*a))[1]
minizero.init_distributed()
zero = minizero.Zero(torch.nn.Linear(3, 2))
checkpoint.AsyncSaver(sys.argv[1]).save("x", zero, step=1)
"""


def test_an_interpreter_that_ends_waits_for_the_save(tmp_path: Path) -> None:
    import subprocess
    import sys

    subprocess.run([sys.executable, "-c", AT_EXIT, tmp_path], timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert (tmp_path / "latest").read_text() == "x\n"


# ---- export


def export_everything(stage: int, path: Path) -> None:
    model, zero, optimizer = start(stage)
    train(model, optimizer, 2)
    largest, plain = [], save_load.gather_to_first
    save_load.gather_to_first = lambda *a: (largest.append(plain(*a)), largest[-1])[1]
    checkpoint.export(path, zero)
    state = zero.full_state()
    if dist.get_rank() == 0:
        exported = safetensors.torch.load_file(path)
        assert_same(exported, state)
        Everything().load_state_dict(exported, strict=True)
        units = [flat.layout.padded_numel for unit in zero.units for flat in unit.flats]
        assert [whole.numel() for whole in largest] == units
    checkpoint.export(path, zero, torch.bfloat16)
    if dist.get_rank() == 0:
        half = safetensors.torch.load_file(path)
        assert half["scale"].shape == ()
        for name, value in state.items():
            assert torch.equal(half[name], value.bfloat16() if value.is_floating_point() else value)
    train(model, optimizer, 1)  # nothing is left gathered or unresizable
    with pytest.raises(CheckpointError, match=r"rank 0: FileNotFoundError: .*nowhere"):
        checkpoint.export(path.parent / "nowhere" / "x", zero)


@STAGES
def test_an_export_is_the_plain_state_dict_and_rank_0_gets_a_unit_at_a_time(stage: int, tmp_path: Path) -> None:
    run_ranks(2, export_everything, stage, tmp_path / "whole.safetensors")
    assert os.listdir(tmp_path) == ["whole.safetensors"]


def full_disk(path: Path) -> None:
    zero = minizero.Zero(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    checkpoint.export(path, zero)
    before = path.read_bytes()
    plain = one_file.pieces_of

    def fail(tensor: Tensor) -> Any:
        raise OSError(28, "No space left on device")

    one_file.pieces_of = fail
    with pytest.raises(CheckpointError, match=r"rank 0: OSError: .*No space left on device"):
        checkpoint.export(path, zero)
    one_file.pieces_of = plain
    assert path.read_bytes() == before
    dist.barrier()


def test_an_export_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    run_ranks(2, full_disk, tmp_path / "whole.safetensors")
    assert os.listdir(tmp_path) == ["whole.safetensors"]


def a_peer_that_is_gone(folder: Path) -> None:
    zero = minizero.Zero(nn.Linear(3, 2))
    checkpoint.save(folder, "x", zero, step=1)
    if dist.get_rank() == 1:
        os._exit(1)
    checkpoint.save(folder, "y", zero, step=2)


def test_a_rank_that_is_gone_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, a_peer_that_is_gone, tmp_path, timeout=30)
    assert "rank 0 could not save 'y'" in str(failure.value)
    assert (tmp_path / "latest").read_text() == "x\n"


# ---- with what other chapters keep elsewhere


def elsewhere(stage: int, folder: Path) -> None:
    """bf16 with fp32 masters; states in host memory, in files, on the device: saved by one, loaded by the others."""

    def begin(where: str, seed: int) -> tuple[Any, Any, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
        model[2].bias.requires_grad_(False)
        zero = minizero.Zero(model, units=[model[0]], stage=stage, dtypes=Precision(torch.bfloat16))
        if where == "device":
            return model, zero, zero.optimizer(torch.optim.AdamW, lr=0.1)
        directory = tempfile.mkdtemp() if where == "file" else None
        return model, zero, offload_optimizer(zero, torch.optim.AdamW, lr=0.1, directory=directory)

    def go(model: nn.Module, zero: Any, optimizer: Any) -> dict[str, Any]:
        for seed in range(2):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)).bfloat16()
            model(x).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return everything_of(zero, optimizer)

    places = ("device", "host", "file")
    for saver in places:
        one = begin(saver, 0)
        go(*one)
        checkpoint.save(folder / "c", saver, one[1], one[2], step=2)
        saved, then = everything_of(one[1], one[2]), go(*one)
        for loader in places:
            other = begin(loader, 1)
            checkpoint.load(folder / "c", other[1], other[2])
            assert_same(everything_of(other[1], other[2]), saved)
            if loader == "file":
                for piece, places_ in other[2].offload._places.items():
                    for name, place in places_.items():
                        assert other[2].state[piece][name].data_ptr() == place.data_ptr()
            assert_same(go(*other), then)
        checkpoint.export(folder / "whole", one[1])
        state = one[1].full_state()
        if dist.get_rank() == 0:
            assert_same(safetensors.torch.load_file(folder / "whole"), state)
            assert state["0.weight"].dtype == torch.float32


@STAGES
def test_low_precision_and_offload_are_interchangeable(stage: int, tmp_path: Path) -> None:
    run_ranks(2, elsewhere, stage, tmp_path)
