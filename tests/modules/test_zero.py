"""zero/: the stages against one process, and each promise of the docstrings."""

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from reference import Pair, check_clean, train_like_one_process
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import minizero
from minizero.sharding import ShardedParameter
from minizero.zero.plan import default_units, plan_units

pytestmark = pytest.mark.ch15
CONFIG = {"vocab_size": 16, "context": 8, "layers": 3, "width": 8, "heads": 2}


def _gpt(tied: bool = False) -> nn.Module:
    return minizero.GPT(minizero.GPTConfig(**CONFIG, tied=tied)).double()


def _tokens(steps: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randint(16, (2, 9), generator=generator) for _ in range(dist.get_world_size())] for _ in range(steps)
    ]


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens[:, :-1], tokens[:, 1:])


def _recomputed(reentrant: bool, inside: bool):
    """A loss whose blocks are checkpointed, around the unit's hooks or inside them."""

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        originals = [block.forward for block in model.blocks]
        try:
            for block in model.blocks if inside else ():
                block.forward = lambda x, f=block.forward: checkpoint(f, x, use_reentrant=reentrant)
            if inside:
                return _loss(model, tokens)
            calls, model.blocks = model.blocks, nn.ModuleList()
            model.blocks.extend(_Checkpointed(block, reentrant) for block in calls)
            return _loss(model, tokens)
        finally:
            if not inside:
                model.blocks = calls
            for block, forward in zip(model.blocks, originals, strict=True):
                block.forward = forward

    return loss


class _Checkpointed(nn.Module):
    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


def _train(stage: int) -> None:
    sgd = {"optimizer": torch.optim.SGD, "options": {"lr": 0.5}, "loss_of": _loss}
    train_like_one_process(_gpt, _tokens(3), stage, **sgd)
    train_like_one_process(_gpt, _tokens(3), stage, clip=0.05, **sgd)
    train_like_one_process(lambda: _gpt(tied=True), _tokens(2), stage, **sgd)
    train_like_one_process(_gpt, _tokens(2), stage, units=lambda model: [], **sgd)  # the root unit alone
    for inside in (True, False):
        for reentrant in (True, False):
            sgd["loss_of"] = _recomputed(reentrant, inside)
            train_like_one_process(_gpt, _tokens(2), stage, **sgd)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_stage_trains_like_one_process(stage: int, world: int) -> None:
    run_ranks(world, _train, stage, timeout=120)


def _fp32(stage: int) -> tuple[float, float]:
    """How far from one process, and how far that is from itself if each batch comes in parts, from the last on."""
    models = []
    for _ in range(3):
        torch.manual_seed(0)
        models.append(minizero.GPT(minizero.GPTConfig(**CONFIG)))
    model, reference, other = models
    zero = minizero.Zero(model, stage=stage)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (reference, other)]
    optimizers.append(zero.optimizer(minizero.AdamW, lr=1e-3))
    for batch in _tokens(20):
        _loss(model, batch[dist.get_rank()]).backward()
        _loss(reference, torch.cat(batch)).backward()
        for part in torch.cat(batch).flip(0).split(1):
            (_loss(other, part) / (2 * len(batch))).backward()
        for o in optimizers:
            o.step()
            o.zero_grad()
    state = zero.full_state()
    if dist.get_rank() > 0:
        return 0.0, 0.0
    norm = sum(p.detach().double().square().sum() for p in reference.parameters())

    def from_reference(found: dict[str, Tensor]) -> float:
        squares = sum((found[n] - p).double().square().sum() for n, p in reference.named_parameters())
        return float((squares / norm).sqrt())

    return from_reference(state), from_reference(dict(other.named_parameters()))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_20_steps_of_fp32_adamw_differ_by_rounding(stage: int) -> None:
    found, itself = run_ranks(2, _fp32, stage)[0]
    limit = max(3 * itself, 20 * torch.finfo(torch.float32).eps)
    assert found <= limit < 1e-3


def _micro_batches(stage: int) -> None:
    pair = Pair(_gpt, stage, optimizer=torch.optim.SGD, options={"lr": 0.5}, loss_of=_loss)
    for first, second in [_tokens(2), _tokens(2)]:
        pair.backward(first)
        pair.backward(second)
        pair.check_gradients()
        pair.step()
        pair.check()
    pair.backward(_tokens(1)[0])
    pair.zero.zero_grad()  # all of them, those on their way as well
    pair.reference.zero_grad()
    pair.backward(_tokens(2)[1])
    pair.check_gradients()
    pair.model.zero_grad()  # the habit of plain torch does the same
    assert all(piece.grad is None for _, piece in pair.zero.named_slices())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_add_up_until_they_are_zeroed(stage: int) -> None:
    run_ranks(2, _micro_batches, stage)


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x)


def test_default_units_are_the_elements_of_outermost_lists() -> None:
    block, pair = _Experts(), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model = nn.ModuleDict({"a": nn.ModuleList([block, nn.Identity(), pair]), "b": nn.Sequential(nn.ReLU())})
    # not the block's experts, nothing without parameters, and instead of a list that cannot run its elements
    assert default_units(model) == [block, *pair]


def test_parameters_belong_to_the_innermost_unit_around_all_their_holders() -> None:
    model = nn.ModuleDict({"x": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "y": nn.Linear(2, 2)})
    model["y"].weight = model["x"][1].weight  # used in two units: only the root is whole in both
    plans = plan_units(model, [model["x"], model["x"][0], model["y"]])
    names = {plan.name: [places[0].full_name for _, places in plan.parameters] for plan in plans}
    assert names == {"root": ["x.1.weight"], "x": ["x.1.bias"], "x.0": ["x.0.weight", "x.0.bias"], "y": ["y.bias"]}


REFUSED = [
    (lambda m: minizero.Zero(m, stage=0), ValueError, r"stage must be 1, 2 or 3, got 0 .*Replicated"),
    (lambda m: minizero.Zero(m, stage="3"), ValueError, "stage must be 1, 2 or 3, got '3'"),
    (lambda m: minizero.Zero(m, prefetch=-1), ValueError, "prefetch must be 0 or more units, got -1"),
    (lambda m: minizero.Zero(m, [nn.Linear(1, 1)]), ValueError, "a Linear is not a module inside the model"),
    (lambda m: minizero.Zero(m, [m["list"]]), ValueError, r"'list' \(ModuleList\) has no forward"),
    (lambda m: minizero.Zero(nn.ReLU()), ValueError, "no parameters to shard"),
    (lambda m: (minizero.Replicated(m), minizero.Zero(m)), ValueError, r"'list\.0\.weight' is held by a Replicated"),
    (lambda m: minizero.Zero(nn.LazyLinear(2)), TypeError, "parameter 'weight' is lazy"),
]


def _refuse_all() -> None:
    for make, error, text in REFUSED:
        model = nn.ModuleDict({"list": nn.ModuleList([nn.Linear(2, 2)])})
        with pytest.raises(error, match=text):
            make(model)


def test_bad_arguments_are_named() -> None:
    run_ranks(1, _refuse_all)


def _models_differ() -> None:
    model = nn.Linear(2, 3 + dist.get_rank())
    with pytest.raises(ValueError, match=r"rank 0 has .*'weight': \(3, 2\).* rank 1 has .*'weight': \(4, 2\)"):
        minizero.Zero(model)
    assert not any(isinstance(p, ShardedParameter) for p in model.parameters())  # nothing was changed
    with pytest.raises(ValueError, match=r"rank 0 has stage 2, rank 1 has stage 3"):
        minizero.Zero(nn.Linear(2, 2), stage=2 + dist.get_rank())


def test_ranks_with_different_models_are_told_before_anything_happens() -> None:
    run_ranks(2, _models_differ)


def _unwrap(stage: int) -> None:
    pair = train_like_one_process(_gpt, _tokens(2), stage, loss_of=_loss)
    plain = pair.zero.unwrap()
    assert plain is pair.model
    assert "zero_grad" not in vars(plain)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in plain.modules())
    for (name, p), q in zip(plain.named_parameters(), pair.reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12, msg=name)
    batch = _tokens(1)[0][0]
    _loss(plain, batch).backward()  # plain torch again: gradients are on the parameters
    _loss(pair.reference, batch).backward()
    torch.testing.assert_close(plain.head.weight.grad, pair.reference.head.weight.grad, rtol=1e-9, atol=1e-12)
    plain.zero_grad()
    again = minizero.Zero(plain, stage=4 - stage)
    check_clean(again)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_unwrap_gives_the_plain_model_back(stage: int) -> None:
    run_ranks(2, _unwrap, stage)


def _penalty(stage: int) -> None:
    """A loss that reads parameters and never runs the model."""
    torch.manual_seed(0)
    model, reference = nn.Linear(3, 2), nn.Linear(3, 2)
    zero = minizero.Zero(model, stage=stage)
    optimizer = zero.optimizer(torch.optim.SGD, lr=0.5)
    reference.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(reference.parameters(), lr=0.5)
    for m, o in ((model, optimizer), (reference, plain)):
        sum(p.square().sum() for p in m.parameters()).backward()
        o.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_loss_of_parameters_alone_is_reduced(stage: int) -> None:
    run_ranks(2, _penalty, stage)


def _inference() -> None:
    pair = Pair(_gpt, 3, loss_of=_loss, optimizer=torch.optim.SGD, options={"lr": 0.5})
    tokens = _tokens(1)[0][0][:, :8]
    with torch.inference_mode():
        torch.testing.assert_close(pair.model(tokens), pair.reference(tokens), rtol=0, atol=1e-12)
    check_clean(pair.zero)
    pair.backward(_tokens(1)[0])
    pair.step()
    pair.check()


def test_inference_mode_then_training() -> None:
    run_ranks(2, _inference)


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")


def _spoiled(stage: int) -> None:
    pair = Pair(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), stage, units=list)
    x = torch.ones(2, 3)
    with pytest.raises(ArithmeticError):
        pair.model[1](_Breaks.apply(pair.model[0](x))).sum().backward()
    for verb in (pair.optimizer.step, lambda: pair.zero.clip_grad_norm(1.0)):
        with pytest.raises(RuntimeError, match=r"the last backward raised .* call zero_grad\(\) first"):
            verb()
    pair.optimizer.zero_grad()
    pair.check()
    pair.backward([x, 2 * x])
    pair.step()
    pair.check()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_backward_that_raised_must_be_zeroed(stage: int) -> None:
    run_ranks(2, _spoiled, stage)
