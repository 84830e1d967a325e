"""ZeRO-3 on one page equals one process on 2, 3 and 4 ranks, and its comparison notices what is wrong."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from harness import RankFailure, preload, run_ranks
from repository import ROOT

from minizero import one_page

pytestmark = pytest.mark.ch10
SOURCE = inspect.getsource(one_page)
WRONG = {
    "sum for mean": ("*parts, self.padding]) / self.ranks", "*parts, self.padding])", r"\d from one process"),
    "no reduction": (
        "reduce_scatter(mean, torch.cat([*parts, self.padding]) / self.ranks)",
        "mean.copy_(torch.cat([*parts, self.padding]).chunk(self.ranks)[dist.get_rank()])",
        r"\d from one process",
    ),
    "no hook in backward": (
        "output.register_hook(lambda gradient: self.gather())",
        "pass",
        "out of bounds for storage of size 0|died",
    ),
}
preload("minizero.one_page")


def train(source: str = SOURCE) -> tuple[float, float]:
    torch.set_default_dtype(torch.float64)
    page = ModuleType("page")
    exec(source, vars(page))
    return page.train()


@pytest.mark.parametrize("world", [2, 4])
def test_parameters_and_gradients_are_those_of_one_process(world: int) -> None:
    results = run_ranks(world, train)
    assert len({loss for loss, _ in results}) == 1
    assert max(worst for _, worst in results) < 1e-12


def test_under_torchrun_on_a_number_of_ranks_that_does_not_divide_a_unit() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "3"]
    done = subprocess.run([*torchrun, "-m", "minizero.one_page"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 ranks, loss 4.")


@pytest.mark.parametrize("what", WRONG)
def test_the_page_fails_when_it_is_wrong(what: str) -> None:
    right, wrong, complaint = WRONG[what]
    assert SOURCE.count(right) == 1
    with pytest.raises(RankFailure, match=complaint):
        run_ranks(2, train, SOURCE.replace(right, wrong))


def test_a_batch_that_cannot_be_shared_is_refused_on_every_rank() -> None:
    with pytest.raises(RankFailure, match="5 ranks cannot share 12 sequences") as failure:
        run_ranks(5, train)
    assert len(failure.value.ranks) == 5


def test_the_readme_shows_the_class_as_it_is() -> None:
    assert inspect.getsource(one_page.Unit) in (ROOT / "README.md").read_text()
