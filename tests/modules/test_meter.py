"""meter.py: what lives, as Python and as the allocator see it."""

from __future__ import annotations

import pytest
import torch

from minizero.meter import MemoryMark, allocated_bytes, live_storages

pytestmark = pytest.mark.ch01


def test_memory_counts_storages_once_and_gradients_too() -> None:
    mark = MemoryMark(torch.device("cpu"))
    weight = torch.nn.Parameter(torch.zeros(1000))
    views = [weight.detach()[:10], weight.view(10, 100), torch.empty(50, device="meta")]
    assert mark.tensors() == 4000
    weight.square().sum().backward()  # a gradient that no Python object has been made for
    assert mark.tensors() == 8000
    weight.grad = None
    weight.untyped_storage().resize_(0)
    assert mark.tensors() == 0
    del views


def test_storages_are_known_by_their_address_and_gone_when_nobody_can_reach_them() -> None:
    tensor = torch.zeros(1000)
    address = tensor.data_ptr()
    assert live_storages()[address] == 4000
    del tensor
    assert live_storages().get(address) != 4000


def test_the_allocator_sees_what_python_does_not_and_gets_it_back() -> None:
    if allocated_bytes(torch.device("cpu")) is None:
        pytest.skip("no glibc of 2.33 or newer")
    mark = MemoryMark(torch.device("cpu"))
    block = bytearray(10**6)  # no tensor
    assert 1.0e6 <= mark.allocated() < 1.2e6
    assert mark.tensors() == 0
    del block
    assert mark.allocated() < 0.2e6


def test_where_no_allocator_can_be_asked_the_answer_is_minus_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert allocated_bytes(torch.device("cpu")) is None
    assert MemoryMark(torch.device("cpu")).allocated() == -1
