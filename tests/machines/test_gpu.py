"""What only a GPU can show: NCCL, streams, the allocator. One rank is enough; skipped without a CUDA device."""

import pytest
import torch
from harness import run_ranks
from torch import Tensor, nn

import minizero
from minizero.offload import offload_optimizer, offloaded_states

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WIDTH, LAYERS = 1024, 8


def _blocks() -> tuple[nn.Module, minizero.Zero, Tensor]:
    device = minizero.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).to(device)
    return model, minizero.Zero(model, list(model)), torch.randn(4, WIDTH, device=device)


def _memory() -> None:
    unit = 4 * WIDTH * WIDTH
    model, zero, x = _blocks()
    torch.cuda.synchronize()
    base, seen = torch.cuda.memory_allocated(), []
    for block in model:
        block.register_forward_hook(lambda *_: seen.append(torch.cuda.memory_allocated() - base))
    loss = model(x).square().mean()
    assert max(seen) < 2.5 * unit, f"after a unit's forward at most it and the next are whole: {seen}, unit {unit}"
    assert torch.cuda.memory_allocated() - base < 0.5 * unit
    loss.backward()
    gradients = LAYERS * unit
    assert torch.cuda.memory_allocated() - base < gradients + 0.5 * unit
    assert all(u.state == "SHARDED" for u in zero.units)


@pytest.mark.ch12
def test_memory_is_freed_between_units() -> None:
    run_ranks(1, _memory, start_group=False)


def _bf16() -> tuple[list[float], list[float]]:
    losses: list[list[float]] = []
    for sharded in (True, False):
        device = minizero.init_distributed()
        torch.manual_seed(0)
        model = minizero.GPT(minizero.GPTConfig(layers=2, width=64, heads=2)).to(device)
        if sharded:
            optimizer = minizero.Zero(model).optimizer(minizero.AdamW, lr=1e-3)
        else:
            optimizer = minizero.AdamW(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(1)
        losses.append([])
        for _ in range(5):
            tokens = torch.randint(256, (4, 65), generator=generator).to(device)
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    return losses[0], losses[1]


@pytest.mark.ch21
def test_bf16_autocast_trains_like_the_plain_model() -> None:
    sharded, plain = run_ranks(1, _bf16, start_group=False)[0]
    assert sharded == pytest.approx(plain, rel=1e-3)
    assert sharded[-1] < sharded[0]


def _exact() -> None:
    model, zero, x = _blocks()
    optimizer = zero.optimizer(torch.optim.SGD, lr=0.1)
    torch.manual_seed(0)
    reference = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).to(x.device)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        for m, o in ((model, optimizer), (reference, plain)):
            m(x).square().mean().backward()
            o.step()
            o.zero_grad()
    state = zero.full_state()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(state[name], value.cpu(), rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.ch15
def test_nccl_trains_like_the_plain_model() -> None:
    run_ranks(1, _exact, start_group=False)


def _offloaded() -> None:
    """Two micro-batches a step and a clipped norm, masters and moments on the host; only weights stay on the device."""
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    model, zero, x = _blocks()
    optimizer = offload_optimizer(zero, torch.optim.AdamW, lr=0.1)
    params = LAYERS * WIDTH * WIDTH
    for _ in range(3):
        for factor in (1.0, 2.0):
            (factor * model(x)).square().mean().backward()
        assert all(piece.grad.is_pinned() for _, piece in zero.named_slices())
        held = torch.cuda.memory_allocated() - base - x.nbytes
        assert held < 1.1 * offloaded_states(params, 1, 3, weight=4).device
        zero.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.ch24
def test_offload_leaves_only_weights_on_the_device() -> None:
    run_ranks(1, _offloaded, start_group=False)


def _offloaded_like_plain() -> None:
    model, zero, x = _blocks()
    optimizer = offload_optimizer(zero, torch.optim.SGD, lr=0.1)
    torch.manual_seed(0)
    reference = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).to(x.device)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        for m, o in ((model, optimizer), (reference, plain)):
            for factor in (1.0, 2.0, 3.0):  # F27: none of them may overwrite another
                (factor * m(x)).square().mean().backward()
            o.step()
            o.zero_grad()
    state = zero.full_state()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(state[name], value.cpu(), rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.ch24
def test_f27_offload_on_a_gpu_trains_like_the_plain_model() -> None:
    run_ranks(1, _offloaded_like_plain, start_group=False)
