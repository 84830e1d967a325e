"""roll_call.py: ranks that are about to do different things learn it, all of them."""

import pytest
import torch.distributed as dist
from harness import run_ranks

from minizero.collectives import RollCall, TorchTransport, companion

pytestmark = pytest.mark.ch04


def _disagree(same: bool) -> None:
    roll_call = RollCall(["a", "b"], TorchTransport())
    check = roll_call.call(0 if same else dist.get_rank())
    if same:
        check()
        return
    with pytest.raises(RuntimeError, match=r"different units \(rank 0: 'a', rank 1: 'b'\)"):
        check()


@pytest.mark.parametrize("same", [True, False])
def test_roll_call_names_the_units_on_both_ranks(same: bool) -> None:
    run_ranks(2, _disagree, same)


def _ask_for_companions() -> None:
    assert companion(None, "save") is companion(dist.group.WORLD, "save")
    assert companion(None, "save") not in [companion(None, "roll call"), dist.group.WORLD]


def test_each_purpose_has_one_companion_of_a_group() -> None:
    run_ranks(2, _ask_for_companions)
