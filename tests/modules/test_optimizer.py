"""optimizer.py: the global norm, clipping and groups. (Adam against torch's: test_faults_training, F26.)"""

import math

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import minizero
from minizero.optimizer import Adam, clip_grad_norm, global_norm, slice_groups
from minizero.sharding import FlatParameters, holders_of

pytestmark = pytest.mark.ch14


def _norms(everything: list[list[float]], p: float) -> float:
    mine = [torch.tensor(everything[dist.get_rank()]), torch.empty(0)]
    return global_norm(mine, p).item()


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 3.0, math.inf])
def test_global_norm_is_the_norm_of_the_whole(p: float) -> None:
    everything = [[3.0, -1.0], [], [4.0]]  # rank 1 owns nothing
    whole = torch.tensor([3.0, -1.0, 4.0], dtype=torch.float64)
    expected = torch.linalg.vector_norm(whole, p).item()
    assert run_ranks(3, _norms, everything, p) == pytest.approx([expected] * 3, rel=1e-12)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_global_norm_keeps_what_is_not_finite(p: float, bad: float) -> None:
    for norm in run_ranks(2, _norms, [[1.0], [bad]], p):
        assert not math.isfinite(norm)


def _clip(gradient: float, max_norm: float) -> tuple[float, float]:
    piece = nn.Parameter(torch.zeros(1))
    piece.grad = torch.tensor([gradient])
    return clip_grad_norm([piece], max_norm), piece.grad.item()


def test_clipping_scales_down_and_never_up() -> None:
    assert run_ranks(1, _clip, 5.0, 1.0)[0] == (5.0, pytest.approx(1.0, rel=1e-6))
    assert run_ranks(1, _clip, 0.5, 1.0)[0] == (0.5, 0.5)


@pytest.mark.parametrize(("max_norm", "norm_type"), [(0, 2), (-1, 2), (math.nan, 2), (1, 0), (1, math.nan)])
def test_clipping_names_a_bad_argument(max_norm: float, norm_type: float) -> None:
    name = "max_norm" if not max_norm > 0 else "norm_type"
    with pytest.raises(ValueError, match=f"{name} must be positive"):
        clip_grad_norm([], max_norm, norm_type)


@given(st.integers(1, 5), st.booleans())
def test_groups_follow_names_parameters_and_placeholders(world: int, by_name: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[1].bias.requires_grad_(False)
    owned = [entry for entry in holders_of(model) if entry[0].requires_grad]
    flat = FlatParameters(owned, world - 1, world, aliased=False)
    flat.show(flat.placeholders)
    wanted = ["1.weight", "0.bias"]
    groups = [{"params": [wanted[0]] if by_name else [model[1].weight], "lr": 0.5}, {"params": [flat.leaves[1]]}]
    built = slice_groups([flat], groups)
    assert built[0]["params"][0] is flat.slices[flat.names.index("1.weight")]
    assert built[0]["lr"] == 0.5
    assert built[1]["params"][0] is flat.slices[1]
    assert slice_groups([flat])[0]["params"] == flat.slices
    with pytest.raises(KeyError, match=r"'1\.bias' is not a trained parameter"):
        slice_groups([flat], [{"params": ["1.bias"]}])
    with pytest.raises(KeyError, match=r"of shape \(1,\) is not a trained parameter"):
        slice_groups([flat], [{"params": [model[1].bias]}])


def test_step_runs_a_closure() -> None:
    p = nn.Parameter(torch.ones(1))
    optimizer = Adam([p], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 1.0
    assert p.item() == pytest.approx(0.9)


def _no_closure() -> None:
    model = nn.Linear(2, 1)
    zero = minizero.Zero(model)
    optimizer = zero.optimizer(minizero.AdamW)
    with pytest.raises(TypeError, match=r"step\(\) takes no closure here"):
        optimizer.step(lambda: 0.0)
    with zero.gathered(), pytest.raises(RuntimeError, match="inside gathered"):
        optimizer.step()


def test_sharded_step_takes_no_closure_and_not_inside_gathered() -> None:
    run_ranks(1, _no_closure)


def _state_of_another_world() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    zeros = [minizero.Zero(nn.Linear(3, 2), group=group) for group in (None, None, alone)]
    first, second, other = (zero.optimizer(minizero.AdamW) for zero in zeros)
    zeros[0].model(torch.ones(1, 3)).sum().backward()
    first.step()
    with pytest.raises(ValueError, match=r"'exp_avg' of parameter 0 has \d elements.* another number of ranks"):
        other.load_state_dict(first.state_dict())
    assert not other.state  # refused before anything was changed
    second.load_state_dict(first.state_dict())
    for ours, theirs in zip(first.state.values(), second.state.values(), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_state_of_another_number_of_ranks_is_refused() -> None:
    run_ranks(2, _state_of_another_world)
