"""GPT: the maths, the initial weights, and their independence of where and when a weight gets its memory."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minizero.models import GPT, Block, GPTConfig

pytestmark = pytest.mark.ch31
TINY = GPTConfig(vocab_size=11, context=6, layers=2, width=8, heads=2)
TINY_TIED = GPTConfig(vocab_size=11, context=6, layers=2, width=8, heads=2, tied=True)


def build(config: GPTConfig, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(config)


def tokens_of(config: GPTConfig, batch: int = 3, length: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(config.vocab_size, (batch, length or config.context), generator=generator)


def by_hand(model: GPT, tokens: Tensor) -> Tensor:
    """The logits from GPT-2's formulas, one position's attention at a time, from the weights alone."""
    w = dict(model.named_parameters(remove_duplicate=False))
    C, H = model.config.width, model.config.heads

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt() * w[name + ".weight"] + w[name + ".bias"]
        )

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[name + ".weight"].T + w[name + ".bias"]

    x = torch.stack([w["token_embedding.weight"][row] for row in tokens])
    x = x + w["position_embedding.weight"][: tokens.shape[1]]
    for i in range(model.config.layers):
        at = f"blocks.{i}"
        q, k, v = linear(norm(x, f"{at}.attention_norm"), f"{at}.attention.qkv").split(C, dim=-1)
        y = torch.zeros_like(x)
        for t in range(tokens.shape[1]):
            for part in torch.arange(C).split(C // H):
                scores = (k[:, : t + 1, part] @ q[:, t, part, None]) / math.sqrt(C // H)
                y[:, t, part] = (scores.softmax(dim=1) * v[:, : t + 1, part]).sum(dim=1)
        x = x + linear(y, f"{at}.attention.projection")
        hidden = linear(norm(x, f"{at}.mlp_norm"), f"{at}.mlp.expand")
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        x = x + linear(hidden, f"{at}.mlp.projection")
    return norm(x, "final_norm") @ w["head.weight"].T


@pytest.mark.parametrize("config", [TINY, TINY_TIED])
def test_logits_and_loss_follow_the_formulas(config: GPTConfig) -> None:
    model = build(config).double()
    for parameter in model.parameters():  # bias 0 and gain 1 would hide a forgotten term
        parameter.data += 0.3 * torch.randn_like(parameter)
    tokens = tokens_of(config, length=5)
    expected = by_hand(model, tokens)
    torch.testing.assert_close(model(tokens), expected, rtol=1e-12, atol=1e-12)
    targets = tokens.roll(-1, dims=1)
    chosen = expected.log_softmax(-1).gather(-1, targets[..., None])
    loss = model(tokens, targets)
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, -chosen.mean(), rtol=1e-12, atol=0.0)


def test_loss_of_a_16_bit_model_is_computed_in_fp32() -> None:
    model = build(TINY).bfloat16()
    tokens = tokens_of(TINY)
    loss = model(tokens, tokens)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten()))


def test_parameter_counts() -> None:
    def count(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    with torch.device("meta"):
        model = GPT(GPTConfig())
    C = 384
    assert {count(block) for block in model.blocks} == {12 * C**2 + 13 * C}
    assert count(model) == 10_868_736
    assert count(build(TINY)) - count(build(TINY_TIED)) == 11 * 8


def test_initial_weights_are_those_of_gpt2() -> None:
    config = GPTConfig(layers=4, width=192, heads=4)
    model = build(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert torch.equal(parameter, torch.zeros_like(parameter)), name
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            std = 0.02 / math.sqrt(2 * 4) if "projection" in name else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
    loss = model(tokens_of(config), tokens_of(config).roll(1, dims=1)).item()
    assert loss == pytest.approx(math.log(256), rel=0.05)  # nothing is preferred yet


def materialise(model: nn.Module) -> None:
    """Give a meta model its weights, one module at a time, as an engine does. A shared weight stays shared."""
    real: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in real:
                real[parameter] = nn.Parameter(torch.full_like(parameter, math.nan, device="cpu"))
            setattr(module, name, real[parameter])
        if list(module.parameters(recurse=False)):
            module.reset_parameters()


@pytest.mark.parametrize("config", [TINY, TINY_TIED])
def test_f39_meta_construction_gives_the_same_weights_bitwise(config: GPTConfig) -> None:
    expected = build(config, seed=7)
    with torch.device("meta"):
        model = GPT(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not list(model.buffers())
    torch.manual_seed(7)
    materialise(model)
    state = model.state_dict()
    assert list(state) == list(expected.state_dict())
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    after = torch.rand(())  # and as many random numbers were drawn
    build(config, seed=7)
    assert torch.equal(torch.rand(()), after)


def test_tied_weight_is_one_parameter_with_both_gradients() -> None:
    tied, untied = build(TINY_TIED), build(TINY)
    assert tied.head.weight is tied.token_embedding.weight
    untied.load_state_dict(tied.state_dict())
    tokens = tokens_of(TINY)
    for model in (tied, untied):
        model(tokens, tokens.roll(-1, dims=1)).backward()
    expected = untied.token_embedding.weight.grad + untied.head.weight.grad
    torch.testing.assert_close(tied.token_embedding.weight.grad, expected, rtol=1e-5, atol=1e-7)


def test_dropout_acts_in_training_only() -> None:
    model = build(GPTConfig(vocab_size=11, context=6, layers=2, width=8, heads=2, dropout=0.5))
    plain = build(TINY)
    tokens = tokens_of(TINY)
    assert torch.equal(model.eval()(tokens), plain(tokens))
    block, x = model.train().blocks[0], torch.randn(2, 6, 8)
    assert not torch.equal(block(x), block(x))
    torch.manual_seed(0)
    dropped = sum((block.mlp(x) == 0).float().mean().item() for _ in range(100)) / 100
    assert dropped == pytest.approx(0.5, abs=0.03)  # half of what a layer adds to the stream is dropped


def test_generate_samples_from_the_softmax_and_crops_to_the_context() -> None:
    model = build(TINY)
    model.head.weight.data *= 30  # fresh logits are all alike: make the temperature matter
    prompt = tokens_of(TINY, batch=2, length=9)  # longer than the context of 6
    produced = model.generate(prompt, 20, temperature=0.7, generator=torch.Generator().manual_seed(3))
    generator, expected = torch.Generator().manual_seed(3), prompt
    for _ in range(20):
        probabilities = (model(expected[:, -6:])[:, -1] / 0.7).softmax(-1)
        expected = torch.cat([expected, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    assert produced.shape == (2, 29)
    assert torch.equal(produced, expected)
    greedy = model.generate(prompt, 1, temperature=0.0)
    assert torch.equal(greedy[:, -1], model(prompt[:, -6:])[:, -1].argmax(-1))
    assert torch.equal(model.generate(prompt, 0), prompt)


def test_it_learns() -> None:
    model = build(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start = torch.arange(11)[:, None]
    sequence = (start + 2 * torch.arange(7)) % 11  # (11, 7): counts by two
    for _ in range(60):
        loss = model(sequence[:, :-1], sequence[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1
    assert model.generate(torch.tensor([[1]]), 5, temperature=0.0).tolist() == [[1, 3, 5, 7, 9, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "GPTConfig.layers must be a positive integer, got 0"),
        ({"width": 8.0}, "GPTConfig.width must be a positive integer, got 8.0"),
        ({"vocab_size": -1}, "GPTConfig.vocab_size"),
        ({"context": True}, "GPTConfig.context"),
        ({"heads": 5}, "GPTConfig.heads must divide width: 5 heads, width 384"),
        ({"dropout": 1.0}, "GPTConfig.dropout must be at least 0 and below 1, got 1.0"),
        ({"dropout": math.nan}, "GPTConfig.dropout"),
    ],
)
def test_bad_sizes_are_refused_by_name(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**change)


def test_bad_input_is_refused() -> None:
    model, tokens = build(TINY), tokens_of(TINY)
    with pytest.raises(ValueError, match=r"1 <= T <= 6, got \(3, 7\)"):
        model(tokens_of(TINY, length=7))
    with pytest.raises(ValueError, match=r"got \(6,\)"):
        model(tokens[0])
    with pytest.raises(ValueError, match=r"targets \(3, 5\) must have the shape of tokens \(3, 6\)"):
        model(tokens, tokens[:, :5])
    for bad in ({"steps": -1}, {"steps": 1, "temperature": -0.1}, {"steps": 1, "temperature": math.nan}):
        with pytest.raises(ValueError, match="must not be negative"):
            model.generate(tokens, **bad)


def test_block_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    block, x = Block(TINY), torch.randn(1, 6, 8)
    changed = x.clone()
    changed[:, 4:] += 1
    assert torch.equal(block(x)[:, :4], block(changed)[:, :4])
    assert not torch.equal(block(x)[:, 4:], block(changed)[:, 4:])
