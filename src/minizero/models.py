"""Chapter 31, run and check: the model that is trained, a small GPT that has never heard of ranks.

One idea: parallelism stays outside the model. Nothing here knows about shards, process groups or devices, so the
same class trains in one process, under `minizero.Zero`, under torch's DDP and FSDP2, and under DeepSpeed.

It is a GPT-2 with the usual simplifications (pre-layer-norm blocks, learned positions, GELU; Radford et al. 2019). Each
module that owns parameters fills them in its own `reset_parameters()`, and each is built in the order in which
`model.modules()` walks. So a model built under `torch.device("meta")`, which has shapes but no memory, can be given
its weights later, one module at a time, and receives bit for bit the weights it would have had.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INITIAL_STD = 0.02  # GPT-2's standard deviation of fresh weights


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT. The default has 10.9 million parameters and trains on two CPU cores.

    Attributes:
        vocab_size: different tokens; 256 when tokens are bytes.
        context: longest sequence T, in tokens.
        layers: transformer blocks.
        width: channels C of the residual stream; every head gets `width // heads` of them.
        heads: attention heads per block.
        tied: let the output layer share the token embedding's weight.
        dropout: probability of dropping an activation in training, in [0, 1).

    Raises:
        ValueError: naming the field, if a size is not a positive integer, if `heads` does not divide `width`, or if
            `dropout` lies outside [0, 1).
    """

    vocab_size: int = 256
    context: int = 64
    layers: int = 6
    width: int = 384
    heads: int = 6
    tied: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "layers", "width", "heads"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"GPTConfig.{name} must be a positive integer, got {value!r}")
        if self.width % self.heads != 0:
            raise ValueError(f"GPTConfig.heads must divide width: {self.heads} heads, width {self.width}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"GPTConfig.dropout must be at least 0 and below 1, got {self.dropout!r}")


def residual_std(config: GPTConfig) -> float:
    """Initial std of the layers that write to the residual stream: 0.02 / sqrt(2 · layers).

    Each block adds two of them; with this factor their sum starts out no larger in deep models than in shallow
    ones (GPT-2, section 2.3).
    """
    return INITIAL_STD / math.sqrt(2 * config.layers)


class Linear(nn.Linear):
    """`torch.nn.Linear` with GPT-2's initial values: weights from N(0, std²), bias zero."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True, std: float = INITIAL_STD) -> None:
        self.std = std  # set first: the constructor of nn.Linear calls reset_parameters
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        """Draw the weight again and clear the bias."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """`torch.nn.Embedding` with GPT-2's initial values: N(0, 0.02²)."""

    def reset_parameters(self) -> None:
        """Draw the table again."""
        nn.init.normal_(self.weight, std=INITIAL_STD)


class TiedHead(nn.Module):
    """Output layer without a weight of its own: it scores a token by the embedding of that token.

    One Parameter, held by two modules (Press and Wolf 2017).
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight  # (vocab, C)

    def reset_parameters(self) -> None:
        """Leave the weight alone: the embedding fills it, and filling it twice would change it."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to logits, (B, T, vocab)."""
        return F.linear(x, self.weight)


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = Linear(config.width, 3 * config.width)
        self.projection = Linear(config.width, config.width, std=residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C); position t reads positions 0 to t."""
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.heads, C // self.heads)  # (B, T, 3, nh, hs)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # three of (B, nh, T, hs), views of one buffer
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)  # (B, nh, T, hs)
        y = self.projection(y.transpose(1, 2).reshape(B, T, C))  # heads side by side again: (B, T, C)
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    """Two linear layers with a GELU between them, applied to each position alone."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.expand = Linear(config.width, 4 * config.width)
        self.projection = Linear(4 * config.width, config.width, std=residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C), 4C wide in between."""
        x = self.projection(F.gelu(self.expand(x)))  # (B, T, C) -> (B, T, 4C) -> (B, T, C)
        return F.dropout(x, self.dropout, self.training)


class Block(nn.Module):
    """Pre-layer-norm transformer block: what ZeRO-3 gathers and frees as one unit. 12C² + 13C parameters."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C): what attention and then the MLP read is normalised, what they add to is not."""
        x = x + self.attention(self.attention_norm(x))  # (B, T, C)
        x = x + self.mlp(self.mlp_norm(x))  # (B, T, C)
        return x


class GPT(nn.Module):
    """Token and position embeddings, `config.layers` blocks in `self.blocks`, a final norm and an output layer.

    Building it draws the weights from torch's default generator: `torch.manual_seed` before it makes them repeatable.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        # Built in the order of `modules()`: see the note on the meta device at the top.
        self.token_embedding = Embedding(config.vocab_size, config.width)
        self.position_embedding = Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width)
        self.head: nn.Module
        if config.tied:
            self.head = TiedHead(self.token_embedding)
        else:
            self.head = Linear(config.width, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Predict the next token at each position.

        Args:
            tokens: (B, T) int64 with T at most `config.context`.
            targets: (B, T) int64, the token that follows each of `tokens`.

        Returns:
            Without targets the logits, (B, T, vocab). With targets a scalar: the mean cross-entropy in nats.

        Raises:
            ValueError: if tokens are not (B, T), T is 0 or exceeds the context, or targets have another shape.
        """
        if tokens.dim() != 2 or not 1 <= tokens.shape[1] <= self.config.context:
            raise ValueError(f"tokens must be (B, T) with 1 <= T <= {self.config.context}, got {tuple(tokens.shape)}")
        if targets is not None and targets.shape != tokens.shape:
            raise ValueError(f"targets {tuple(targets.shape)} must have the shape of tokens {tuple(tokens.shape)}")
        positions = torch.arange(tokens.shape[1], device=tokens.device)  # (T,)
        x = self.token_embedding(tokens) + self.position_embedding(positions)  # (B, T, C)
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.final_norm(x))  # (B, T, vocab)
        if targets is None:
            return logits
        # 16-bit logits are too coarse for a log-sum-exp: use fp32 at least, and leave float64 alone.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, steps: int, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Continue each sequence by `steps` tokens, each predicted from at most `config.context` tokens before it.

        Runs `steps` forwards whatever it samples, so ranks that hold one sharded model stay in step. Call `eval()`
        first on a model with dropout.

        Args:
            tokens: (B, T) int64, T at least 1 and as long as you like.
            steps: tokens to append.
            temperature: divides the logits; 0 takes the likeliest token.
            generator: source of randomness, on the device of `tokens`; seed it alike on all ranks.

        Returns:
            (B, T + steps) int64.

        Raises:
            ValueError: if `steps` or `temperature` is negative, or `tokens` is not (B, T).
        """
        if steps < 0 or not temperature >= 0.0:
            raise ValueError(f"steps and temperature must not be negative, got {steps} and {temperature}")
        for _ in range(steps):
            logits = self(tokens[:, -self.config.context :])[:, -1]  # (B, vocab)
            if temperature == 0.0:
                following = logits.argmax(dim=-1, keepdim=True)  # (B, 1)
            else:
                probabilities = F.softmax(logits.float() / temperature, dim=-1)
                following = torch.multinomial(probabilities, num_samples=1, generator=generator)  # (B, 1)
            tokens = torch.cat([tokens, following], dim=1)
        return tokens
