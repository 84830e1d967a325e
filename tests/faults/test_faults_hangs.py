"""Ranks that wait for one another: faults F31, F32 and F33 of public bug reports."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness
import pytest
import reference
import torch
import torch.distributed as dist
from repository import ROOT
from test_faults_memory import LAYERS, UNIT, Chain, live_bytes, needs_mallinfo2
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

import minizero
from minizero.data import Batches

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def say(word: str) -> None:
    """Tell the other ranks without a collective."""
    dist.distributed_c10d._get_default_store().set(word, "said")


def hear(word: str) -> None:
    dist.distributed_c10d._get_default_store().wait([word], timedelta(seconds=60))


# ---- F31: an exception on one rank -------------------------------------------------------------------------------


class FailsOnRank1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for i, layer in enumerate(self.layers):
            if (dist.get_rank(), self.calls, i) == (1, 2, 1):
                raise ArithmeticError("layer 1 broke in step 2")
            x = layer(x)
        return x


def fails_at_step_2(stage: int) -> None:
    zero = minizero.Zero(FailsOnRank1(), stage=stage)
    optimizer = zero.optimizer(torch.optim.SGD, lr=0.1)
    for _ in range(3):
        zero.model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.ch35
@STAGES
def test_F31_under_the_harness_the_failing_rank_speaks_first(stage: int) -> None:
    """One collective may wait for 300 s: ending within the 120 s of the run means that nobody waited for it."""
    with pytest.raises(harness.RankFailure) as failure:
        harness.run_ranks(3, fails_at_step_2, stage, timeout=120.0, group_timeout=300.0)
    first, *others = str(failure.value).split("--- rank ")[1:]
    assert first.startswith("1 ---\nTraceback")
    assert "ArithmeticError: layer 1 broke in step 2" in first
    assert failure.value.ranks[0] == 1
    assert sorted(failure.value.ranks) == [0, 1, 2]
    assert not any("no answer" in other or "ArithmeticError" in other for other in others)


SCRIPT = """
    import torch
    import torch.distributed as dist
    import minizero
    from test_faults_hangs import fails_at_step_2

    minizero.init_distributed(timeout=600.0)
    fails_at_step_2(3)
"""


@pytest.mark.ch35
def test_F31_under_torchrun_the_run_ends_with_the_failing_ranks_traceback(tmp_path: Path) -> None:
    """As above, with collectives that may wait for 600 s and a run that must end in 120."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(script)]
    folders = [ROOT / "tests", ROOT / "tests" / "faults", *filter(None, [os.environ.get("PYTHONPATH")])]
    path = os.pathsep.join(map(str, folders))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode != 0
    errors = [line for line in run.stderr.splitlines() if "Error: " in line]
    assert errors[0].endswith("ArithmeticError: layer 1 broke in step 2"), run.stderr
    assert errors[0].startswith("[rank1]")


# ---- F32: different numbers of batches ---------------------------------------------------------------------------


def seven_samples(stage: int) -> None:
    """Seven samples, two a rank and step: `Batches` gives every rank one step an epoch, and drops three samples."""
    world = dist.get_world_size()
    tokens = torch.arange(7 * 4 + 1)
    loaders = [Batches(tokens, context=4, batch=2, rank=r, world=world, seed=5) for r in range(world)]
    assert [len(loader) for loader in loaders] == [1] * world

    def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0].double() / 29) - batch[1].double() / 29).square().mean()

    pair = reference.Pair(lambda: chain().double(), stage, loss_of=loss_of)
    shown = []
    for epoch in range(4):
        batches = [loader.at(epoch) for loader in loaders]  # an epoch has one step
        seen = torch.cat([inputs[:, 0] // 4 for inputs, _ in batches]).tolist()
        assert len(set(seen)) == len(seen) == 4, "a sample was shown twice in an epoch"
        shown.append(seen)
        pair.backward(batches)
        pair.step()
        pair.check()
    assert len({tuple(seen) for seen in shown}) > 1, "every epoch dropped the same samples"


def one_step_more(stage: int) -> None:
    """A split by hand gives rank 0 a batch more: an error within the timeout that names the unit, not a wait."""
    zero = minizero.Zero(chain(), stage=stage)
    optimizer = zero.optimizer(torch.optim.SGD, lr=0.1)
    samples = torch.arange(7 * 4.0).view(7, 4)[dist.get_rank() :: 2]  # 4 samples and 3
    for batch in samples.split(3)[: 2 if dist.get_rank() == 0 else 1]:
        if batch.shape[0] == 1:
            with pytest.raises(RuntimeError, match=r"rank 0 could not (gather|reduce) unit 'root'"):
                zero.model(batch).sum().backward()
                optimizer.step()
            say("done")
            return
        zero.model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    hear("done")


@pytest.mark.ch31
@STAGES
def test_F32_the_loader_gives_every_rank_the_same_number_of_steps(stage: int) -> None:
    harness.run_ranks(2, seven_samples, stage)


def not_the_last_barrier(fn: Callable[..., None], *arguments: Any) -> None:
    """After a timeout the group is broken: leave before the harness's closing barrier."""
    fn(*arguments)
    raise Finished


class Finished(Exception):
    """Every assertion of a rank function held."""


def all_finished(world: int, fn: Callable[..., None], *arguments: Any, **options: Any) -> None:
    with pytest.raises(harness.RankFailure) as failure:
        harness.run_ranks(world, not_the_last_barrier, fn, *arguments, **options)
    text = str(failure.value)
    assert text.count("test_faults_hangs.Finished") == world, text


@pytest.mark.ch12
@STAGES
def test_F32_a_step_more_on_one_rank_is_an_error_that_names_the_unit(stage: int) -> None:
    all_finished(2, one_step_more, stage, group_timeout=2.0)


# ---- F33: a collective on rank 0 only ----------------------------------------------------------------------------


def use(zero: minizero.Zero) -> None:
    with zero.gathered():
        pass


def on_rank_0_only(stage: int) -> None:
    """Each call has a model and a group of its own: the group is broken afterwards."""
    plain = {name: torch.zeros_like(value) for name, value in chain().state_dict().items()}
    calls: dict[str, Callable[[minizero.Zero, torch.optim.Optimizer], Any]] = {
        "full_state": lambda zero, _: zero.full_state(),
        "clip_grad_norm": lambda zero, _: zero.clip_grad_norm(1.0),
        "gathered": lambda zero, _: use(zero),
        "load_full_state": lambda zero, _: zero.load_full_state(plain),
        "unwrap": lambda zero, _: zero.unwrap(),
        "step": lambda _, optimizer: optimizer.step(),
        "forward": lambda zero, _: zero.model(torch.ones(2, 4)),
    }
    alone = {"full_state", "forward"} if stage < 3 else {"step"}  # what this stage does without the others
    for name, call in calls.items():
        group = dist.new_group([0, 1], timeout=timedelta(seconds=1.5))
        zero, optimizer = prepare(stage, group)
        if dist.get_rank() == 1:
            hear(f"tried {name}")
        elif name in alone:
            call(zero, optimizer)
            say(f"tried {name}")
        else:
            with pytest.raises(RuntimeError, match=r"[Aa]ll ranks"):
                call(zero, optimizer)
            say(f"tried {name}")
        if name in ("full_state", "forward") and name in alone:  # and then the run goes on
            optimizer.step()
            optimizer.zero_grad()
            zero.model(torch.ones(2, 4)).sum().backward()
            assert zero.clip_grad_norm(1e9) > 0


def prepare(stage: int, group: ProcessGroup) -> tuple[minizero.Zero, torch.optim.Optimizer]:
    zero = minizero.Zero(chain(), stage=stage, group=group)
    optimizer = zero.optimizer(torch.optim.SGD, lr=0.1)
    zero.model(torch.ones(2, 4)).sum().backward()
    return zero, optimizer


class Peak(TorchDispatchMode):
    """Most live bytes seen after any operation."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.bytes = max(self.bytes, live_bytes())
        return result


def full_state_on_all() -> None:
    torch.manual_seed(0)
    model = Chain()
    values = {name: value.clone() for name, value in model.state_dict().items()} if dist.get_rank() == 0 else {}
    zero = minizero.Zero(model, stage=3)
    zero.full_state()  # makes what is made once: connections, scratch memory
    before = live_bytes()
    with Peak() as peak:
        state = zero.full_state()
    extra = (peak.bytes - before) / UNIT
    if dist.get_rank() == 0:
        assert state.keys() == values.keys()
        assert all(torch.equal(state[name], values[name]) for name in values)
        assert LAYERS - 0.5 < extra < LAYERS + 2.5
    else:
        assert state == {}
        assert 0.9 < extra < 2.5, f"{extra:.1f} units"  # one unit, and gloo's second copy while it gathers


@pytest.mark.ch15
@STAGES
def test_F33_a_call_on_one_rank_only_says_that_all_must_take_part(stage: int) -> None:
    harness.run_ranks(2, on_rank_0_only, stage)


@pytest.mark.ch15
@needs_mallinfo2
def test_F33_full_state_needs_one_unit_on_the_ranks_that_get_nothing() -> None:
    harness.run_ranks(2, full_state_on_all)
