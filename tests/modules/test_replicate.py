"""Stage 0 against one process: gradients, parameters, bytes and the order of messages."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankFailure, run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import minizero
from minizero.replicate import Replicated, average_gradients, make_buckets

pytestmark = pytest.mark.ch02
CONFIG = minizero.GPTConfig(vocab_size=32, context=8, layers=2, width=16, heads=2)


def small_gpt(tied: bool = False) -> minizero.GPT:
    torch.manual_seed(0)
    config = minizero.GPTConfig(vocab_size=32, context=8, layers=2, width=16, heads=2, tied=tied)
    return minizero.GPT(config).double()


def batches(step: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets of every rank, the same list on all."""
    generator = torch.Generator().manual_seed(step)
    draws = [torch.randint(32, (2, 9), generator=generator) for _ in range(dist.get_world_size())]
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in draws]


def assert_means(
    model: nn.Module, plain: nn.Module, losses: Callable[[nn.Module], Sequence[Tensor]], tol: float
) -> None:
    """Every gradient of `model` is what one process gets for the mean of the ranks' losses, zero where it gets None."""
    values = losses(plain)
    (torch.stack(list(values)).sum() / len(values)).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if p.requires_grad:
            expected = torch.zeros_like(q) if q.grad is None else q.grad.to_dense()
            assert p.grad is not None, name
            torch.testing.assert_close(p.grad, expected, rtol=tol, atol=tol, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert p.grad is None, name


# ---- training equals one process -----------------------------------------------------------------------------------


def train_gpt(tied: bool, bucket_bytes: int, overlap: bool) -> list[Tensor]:
    model, plain = small_gpt(tied), small_gpt(tied)
    if dist.get_rank():
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1)  # rank 0's values must win
    Replicated(model, bucket_bytes=bucket_bytes, overlap=overlap)
    optimizer, reference = torch.optim.SGD(model.parameters(), 0.5), torch.optim.SGD(plain.parameters(), 0.5)
    for step in range(3):
        everyone = batches(step)
        model(*everyone[dist.get_rank()]).backward()
        torch.stack([plain(x, y) for x, y in everyone]).mean().backward()
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p - q).norm() <= 1e-12 * q.norm(), name
        assert not torch.equal(p, dict(small_gpt(tied).named_parameters())[name]), f"{name} did not move"
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(("world", "tied"), [(2, False), (3, True), (4, False)])
def test_float64_sgd_equals_one_process_and_overlap_changes_no_bit(world: int, tied: bool) -> None:
    overlapped = run_ranks(world, train_gpt, tied, 4096, True)
    in_one_go = run_ranks(world, train_gpt, tied, 4096, False)
    for rank in range(world):
        assert all(map(torch.equal, overlapped[0], overlapped[rank]))
        assert all(map(torch.equal, overlapped[rank], in_one_go[rank]))


@pytest.mark.parametrize("bucket_bytes", [1, 2**30])
def test_any_bucket_size_gives_the_same(bucket_bytes: int) -> None:
    run_ranks(2, train_gpt, False, bucket_bytes, True)


def clipped_adamw() -> None:
    model, plain = small_gpt(), small_gpt()
    Replicated(model, bucket_bytes=4096)
    pairs = [(m, torch.optim.AdamW(m.parameters(), 1e-2, weight_decay=0.1)) for m in (model, plain)]
    for step in range(3):
        everyone = batches(step)
        model(*everyone[dist.get_rank()]).backward()
        torch.stack([plain(x, y) for x, y in everyone]).mean().backward()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m, _ in pairs]
        assert norms[0] > 0.5
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-12, atol=0)
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10)


def test_torch_optimizers_and_clipping_work_unchanged() -> None:
    run_ranks(2, clipped_adamw)


def naive_and_bucketed() -> None:
    naive, bucketed = small_gpt(), small_gpt()
    Replicated(bucketed, bucket_bytes=4096)
    for model in (naive, bucketed):
        model(*batches()[dist.get_rank()]).backward()
    average_gradients(naive)
    for p, q in zip(naive.parameters(), bucketed.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    naive.final_norm.weight.grad = None  # as if this rank had not used it
    average_gradients(naive)
    assert torch.equal(naive.final_norm.weight.grad, torch.zeros_like(naive.final_norm.weight))


def test_the_naive_function_gives_the_same_gradients() -> None:
    run_ranks(2, naive_and_bucketed)  # with two ranks a sum has one order only: every bit is equal


# ---- the wire ------------------------------------------------------------------------------------------------------


def count_messages(bucket_bytes: int, overlap: bool) -> tuple[int, int, int]:
    model = small_gpt()
    controller = Replicated(model, bucket_bytes=bucket_bytes, overlap=overlap)
    sent_before: list[int] = []
    with minizero.Ledger() as ledger:
        loss = model(*batches()[dist.get_rank()])
        # one of the last gradients of backward: with overlap most buckets are on their way by then
        model.blocks[0].attention_norm.bias.register_post_accumulate_grad_hook(
            lambda _: sent_before.append(ledger.calls["all_reduce"])
        )
        loss.backward()
    assert set(ledger.sent) == {"all_reduce"}
    assert ledger.calls["all_reduce"] == len(controller.buckets)
    return ledger.total, len(controller.buckets), sent_before[0]


@pytest.mark.parametrize("world", [2, 4])
def test_a_step_sends_two_psi_whatever_the_buckets(world: int) -> None:
    psi_bytes = sum(p.numel() * 8 for p in small_gpt().parameters())
    for bucket_bytes, overlap in ((1, True), (8192, True), (2**30, True), (8192, False)):
        for total, buckets, early in run_ranks(world, count_messages, bucket_bytes, overlap):
            assert total == 2 * psi_bytes * (world - 1) / world
            if bucket_bytes == 2**30 or not overlap:
                assert early == 0, "sent before backward had ended"
            else:
                assert buckets // 2 < early < buckets


def naive_bytes() -> int:
    model = small_gpt()
    model(*batches()[dist.get_rank()]).backward()
    with minizero.Ledger() as ledger:
        average_gradients(model)
    assert ledger.calls["all_reduce"] == len(list(model.parameters()))
    return ledger.total


def test_the_naive_function_sends_as_much() -> None:
    psi_bytes = sum(p.numel() * 8 for p in small_gpt().parameters())
    assert run_ranks(2, naive_bytes) == [psi_bytes, psi_bytes]


def test_buckets_go_backwards_by_dtype_and_size() -> None:
    single = {name: nn.Parameter(torch.zeros(n)) for name, n in (("a", 2), ("b", 2), ("huge", 9), ("c", 1))}
    named = [
        *single.items(),
        ("half", nn.Parameter(torch.zeros(4, dtype=torch.float16))),
        ("d", nn.Parameter(torch.zeros(3))),
    ]
    buckets = make_buckets(named, bucket_bytes=16)
    assert [[name for name, _ in b.members] for b in buckets] == [["d", "c"], ["half"], ["huge"], ["b", "a"]]
    assert [b.nbytes for b in buckets] == [16, 8, 36, 16]


# ---- kinds of parameters -------------------------------------------------------------------------------------------


class Kinds(nn.Module):
    """A tied pair, two dtypes, a frozen, a 0-dim, a transposed, a complex and an empty parameter, and three buffers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.middle = nn.Linear(4, 4, dtype=torch.float64)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.scale = nn.Parameter(torch.randn(()))
        self.turned = nn.Parameter(torch.randn(3, 4).t())
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0))
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("count", torch.randint(99, ()))
        self.register_buffer("mask", torch.rand(2, 3) > 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.middle(self.embedding(tokens).double()).float()
        h = self.frozen(h) * self.scale + self.mean + (h @ self.turned).sum(-1, keepdim=True)
        return self.head((h * self.phase).real + self.empty.sum()).square().mean()


def train_kinds(overlap: bool) -> list[Tensor]:
    rank = dist.get_rank()
    model, plain = Kinds(seed=rank), Kinds(seed=0)
    Replicated(model, bucket_bytes=64, overlap=overlap)
    for (name, mine), right in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, right), name
    assert model.head.weight is model.embedding.weight
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(7, (5,), generator=generator) for _ in range(dist.get_world_size())]
    model(tokens[rank]).backward()
    assert_means(model, plain, lambda m: [m(t) for t in tokens], tol=2e-6)
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("overlap", [True, False])
def test_tied_frozen_complex_and_mixed_dtypes(overlap: bool) -> None:
    results = run_ranks(2, train_kinds, overlap)
    assert all(map(torch.equal, *results))


def sparse_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 3, sparse=True, dtype=torch.float64), nn.Linear(3, 1, dtype=torch.float64))
    plain = copy.deepcopy(model)
    Replicated(model)
    tokens = [torch.tensor([1, 1, 4]), torch.tensor([4, 8])]
    for _ in range(2):  # the second backward adds a sparse gradient to a dense one
        model(tokens[dist.get_rank()]).square().sum().backward()
        assert_means(model, plain, lambda m: [m(t).square().sum() for t in tokens], tol=1e-12)
    assert not model[0].weight.grad.is_sparse
    naive = copy.deepcopy(plain)
    naive(tokens[dist.get_rank()]).square().sum().backward()
    average_gradients(naive)
    torch.testing.assert_close(naive[0].weight.grad, model[0].weight.grad / 2)


def test_sparse_gradients_become_dense() -> None:
    run_ranks(2, sparse_gradients)


# ---- graphs that differ --------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Three linear maps, of which a call uses those named, in that order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleDict({name: nn.Linear(3, 3, dtype=torch.float64) for name in "abc"})

    def forward(self, x: Tensor, names: str) -> Tensor:
        for name in names:
            x = torch.tanh(self.parts[name](x))
        return x.square().sum()


def branch_out(paths: list[str], bucket_bytes: int) -> None:
    model, plain = Branches(), Branches()
    Replicated(model, bucket_bytes=bucket_bytes)
    x = torch.arange(1.0, 4.0, dtype=torch.float64)
    for round_ in range(2):  # without zero_grad between: gradients add up
        here = [path[round_:] or path for path in paths]
        model(x, here[dist.get_rank()]).backward()
        assert_means(model, plain, lambda m, here=here: [m(x, path) for path in here], tol=1e-12)


@pytest.mark.parametrize("bucket_bytes", [1, 10_000])
@pytest.mark.parametrize("paths", [["a", "abc"], ["ab", "ba"], ["cab", "b"], ["ca", "ac"], ["aa", "aba"]])
def test_unused_parameters_and_other_orders(paths: list[str], bucket_bytes: int) -> None:
    """F12, F13: unused on one rank counts as zero there, unused on all gives zeros, on every rank alike."""
    run_ranks(2, branch_out, paths, bucket_bytes)


def several_backwards() -> None:
    rank = dist.get_rank()
    model, plain = small_gpt(), small_gpt()
    Replicated(model, bucket_bytes=4096)
    first, second = batches(0), batches(1)

    def both(m: nn.Module) -> list[Tensor]:
        return [m(*a) + m(*b) for a, b in zip(first, second, strict=True)]

    both(model)[rank].backward()  # two forwards, one backward
    assert_means(model, plain, both, tol=1e-12)
    a, b = model(*first[rank]), model(*second[rank])  # two forwards, two backwards, added to what is there
    a.backward(retain_graph=True)
    b.backward()
    assert_means(model, plain, both, tol=1e-12)
    a.backward()  # the retained graph again
    assert_means(model, plain, lambda m: [m(*batch) for batch in first], tol=1e-12)
    model.zero_grad(set_to_none=False)
    plain.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters())
    model(*second[rank]).backward()
    assert_means(model, plain, lambda m: [m(*batch) for batch in second], tol=1e-12)


def test_several_backwards_add_up() -> None:
    """F10."""
    run_ranks(2, several_backwards)


def fail_then_recover(new_forward: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model, plain = Branches(), Branches()
    controller = Replicated(model, bucket_bytes=150)  # the second bucket: b.weight and a.bias
    x = torch.arange(1.0, 4.0, dtype=torch.float64)
    fails = True

    def explode(gradient: Tensor) -> None:
        if fails:
            raise ZeroDivisionError("in the middle of backward")

    h = torch.tanh(model.parts["a"](x * (rank + 1)))
    h.register_hook(explode)
    loss = torch.tanh(model.parts["c"](model.parts["b"](h))).square().sum()
    with pytest.raises(ZeroDivisionError) as failure:
        loss.backward(retain_graph=True)
    assert controller._launched == 1, "one bucket must be on its way, or the test shows nothing"
    assert model.parts["b"].weight.grad is not None, "one gradient must be waiting for the rest of its bucket"
    fails = False
    if new_forward:  # no zero_grad: what the failed backward left is forgotten
        for _ in range(2):
            model(x * (rank + 1), "abc").backward()
        total = 2
    else:
        model.zero_grad()
        loss.backward()
        total = 1

    def losses(m: nn.Module) -> list[Tensor]:
        if new_forward:
            return [total * m(x * (r + 1), "abc") for r in range(world)]
        parts = m.parts
        return [
            torch.tanh(parts["c"](parts["b"](torch.tanh(parts["a"](x * (r + 1)))))).square().sum() for r in range(world)
        ]

    assert_means(model, plain, losses, tol=1e-12)
    assert failure.type is ZeroDivisionError


@pytest.mark.parametrize("new_forward", [True, False])
def test_a_backward_that_raised_leaves_nothing_behind(new_forward: bool) -> None:
    run_ranks(2, fail_then_recover, new_forward)


class Recomputed(nn.Module):
    """A block used twice, each use under reentrant checkpointing, then a head, under it too if `whole`."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.whole = whole
        self.block = nn.Linear(3, 3, dtype=torch.float64)
        self.other = nn.Linear(3, 3, dtype=torch.float64)
        self.head = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        def used_twice(h: Tensor) -> Tensor:
            return torch.tanh(self.block(h))

        x = checkpoint(used_twice, x, use_reentrant=True)
        x = checkpoint(lambda h: torch.tanh(self.other(h)), x, use_reentrant=True)
        x = checkpoint(used_twice, x, use_reentrant=True)
        return (checkpoint(self.head, x, use_reentrant=True) if self.whole else self.head(x)).square().sum()


def recompute(whole: bool, bucket_bytes: int) -> None:
    model, plain = Recomputed(whole), Recomputed(whole)
    Replicated(model, bucket_bytes=bucket_bytes)
    for step in range(2):
        xs = [torch.full((3,), r + step + 1.0, dtype=torch.float64, requires_grad=True) for r in range(2)]
        model(xs[dist.get_rank()]).backward()
        assert_means(model, plain, lambda m, xs=xs: [m(x) for x in xs], tol=1e-12)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("bucket_bytes", [1, 10_000])
def test_reentrant_checkpointing(whole: bool, bucket_bytes: int) -> None:
    """F09: the block's gradient comes in two parts, the second after its bucket has left."""
    run_ranks(2, recompute, whole, bucket_bytes)


def gradients_on_the_side() -> None:
    """torch.autograd.grad() on one rank alone (a saliency map, say) must not talk to the others."""
    model = small_gpt()
    Replicated(model, bucket_bytes=4096)
    with minizero.Ledger() as ledger:
        if dist.get_rank() == 0:
            logits = model(batches()[0][0])
            torch.autograd.grad(logits.sum(), model.final_norm.weight)
    assert ledger.total == 0
    assert all(p.grad is None for p in model.parameters())
    model(*batches()[dist.get_rank()]).backward()
    assert_means(model, small_gpt(), lambda m: [m(*batch) for batch in batches()], tol=1e-12)


def test_autograd_grad_is_left_alone() -> None:
    run_ranks(2, gradients_on_the_side)


def subgroups() -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank, pair = dist.get_rank(), dist.get_rank() // 2
    model, plain = Branches(), Branches()
    with torch.no_grad():
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            p += rank  # ranks 2 and 3 take over rank 2's values
            q += 2 * pair
    Replicated(model, group=pairs[pair])
    xs = [torch.full((3,), r + 1.0, dtype=torch.float64) / 10 for r in range(4)]
    model(xs[rank], "abc").backward()
    assert_means(model, plain, lambda m: [m(x, "abc") for x in xs[2 * pair : 2 * pair + 2]], tol=1e-12)


def test_groups_average_apart() -> None:
    run_ranks(4, subgroups)


# ---- errors before damage ------------------------------------------------------------------------------------------


def refuse(model: nn.Module, message: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=message):
        Replicated(model, **options)


def refusals() -> None:
    refuse(small_gpt(), "bucket_bytes must be at least 1, got 0", bucket_bytes=0)
    refuse(nn.ReLU(), "no parameter that requires a gradient")
    refuse(nn.Linear(2, 2).requires_grad_(False), "no parameter that requires a gradient")
    with torch.device("meta"):
        refuse(nn.Linear(2, 2), "'weight' has no values")
    refuse(nn.Sequential(nn.LazyLinear(2)), "'0.weight' has no values")
    for stage in (1, 2, 3):
        sharded = small_gpt()
        minizero.Zero(sharded, stage=stage)
        refuse(sharded, "'token_embedding.weight' is replicated or sharded already")
    twice = small_gpt()
    Replicated(twice.blocks[1])
    refuse(twice, "'blocks.1.attention_norm.weight' is replicated or sharded already")


def test_what_cannot_be_replicated_is_refused_by_name() -> None:
    run_ranks(1, refusals)


def different_models(kind: str) -> None:
    first = dist.get_rank() == 0
    if kind == "shape":
        refuse(nn.Linear(3, 2 if first else 4), r"rank 0 has 'weight': \(2, 3\).*rank 1 has 'weight': \(4, 3\)")
    elif kind == "missing":
        refuse(nn.Linear(3, 2, bias=first), "rank 0 has 'bias'.*rank 1 has None")
    elif kind == "frozen":
        model = nn.Linear(3, 2)
        model.bias.requires_grad_(first)
        refuse(model, "rank 0 has 'bias'.*requires_grad=True, rank 1 has 'bias'.*requires_grad=False")
    elif kind == "buffer":
        refuse(
            nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(3, affine=False) if first else nn.ReLU()), "rank 1 has None"
        )
    else:
        refuse(nn.Linear(3, 2), "bucket_bytes=64.*bucket_bytes=65", bucket_bytes=64 if first else 65)


@pytest.mark.parametrize("kind", ["shape", "missing", "frozen", "buffer", "bucket_bytes"])
def test_ranks_with_different_models_all_raise(kind: str) -> None:
    run_ranks(2, different_models, kind)


def change_afterwards() -> None:
    def frozen(model: nn.Module) -> None:
        model.parts["b"].bias.requires_grad_(False)

    def replaced(model: nn.Module) -> None:
        model.parts["b"].weight = nn.Parameter(torch.zeros(3, 3, dtype=torch.float64))

    def added(model: nn.Module) -> None:
        model.extra = nn.Parameter(torch.zeros(1))

    changes = {frozen: "parts.b.bias", replaced: "parts.b.weight", added: "extra", nn.Module.float: "parts.a.bias"}
    for change, name in changes.items():
        model = Branches()
        Replicated(model)
        change(model)
        with pytest.raises(RuntimeError, match=f"parameter '{name}' was added, removed, replaced, cast, frozen"):
            model(torch.ones(3, dtype=torch.float64), "a")


def test_changing_the_model_afterwards_is_refused() -> None:
    run_ranks(1, change_afterwards)


def copies() -> None:
    model = Branches()
    Replicated(model)
    x = torch.ones(3, dtype=torch.float64)
    copied = copy.deepcopy(model)  # a moving average of the weights, say
    with minizero.Ledger() as ledger:
        copied(x, "abc").backward()
    assert ledger.total == 0
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(TypeError, match=r"save model\.state_dict"):
        pickle.dumps(model)
    Replicated(copied)


def test_a_deep_copy_is_a_plain_model_and_pickle_is_refused() -> None:
    run_ranks(1, copies)


def forget_the_model() -> None:
    model = small_gpt()
    replicated = Replicated(model)
    model(*batches()[0]).backward()
    remains = [weakref.ref(thing) for thing in (replicated, *model.parameters(), *(p.grad for p in model.parameters()))]
    del model, replicated
    gc.collect()
    assert [thing() for thing in remains if thing() is not None] == []


def test_a_model_that_nobody_holds_leaves_memory_with_its_gradients() -> None:
    run_ranks(1, forget_the_model)


def the_model_alone_is_held() -> None:
    model = small_gpt()
    Replicated(model)  # nobody keeps it, and gradients are averaged all the same
    gc.collect()
    with minizero.Ledger() as ledger:
        model(*batches()[0]).backward()
    assert ledger.total > 0


def test_the_model_keeps_its_replication_alive() -> None:
    run_ranks(2, the_model_alone_is_held)


def leave_one_alone() -> None:
    model = small_gpt()
    Replicated(model, bucket_bytes=4096)
    if dist.get_rank() == 0:
        model(*batches()[0]).backward()


def test_a_missing_rank_is_an_error_that_names_the_gradients() -> None:
    with pytest.raises(RankFailure, match=r"could not average the gradients of 'head\.weight' to"):
        run_ranks(2, leave_one_alone, timeout=20.0, group_timeout=1.0)
