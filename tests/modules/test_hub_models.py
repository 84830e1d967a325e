"""Models that nobody here wrote: GPT-2, Llama, ViT, T5 of transformers (random weights, no download), and LoRA of peft.

They bring tied weights, weights used by other modules than their own, outputs that are dictionaries with attributes,
frozen parameters and caches. Float64 and SGD: three steps on two ranks must equal one process to 1e-12.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import harness
import pytest
import reference
import torch
import torch.distributed as dist
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"

import transformers

import minizero

pytestmark = pytest.mark.ch15
harness.preload("peft", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
Units = Callable[[nn.Module], Iterable[nn.Module]]


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=32, n_embd=32, n_layer=3, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config).double()


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return transformers.LlamaForCausalLM(config).double()


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=48,
        image_size=8,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.ViTForImageClassification(config).double()


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=61,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config).double()


def lora() -> nn.Module:
    """Low-rank adapters on GPT-2: almost everything is frozen, and a few small matrices in each block are trained."""
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(gpt2(), config).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:  # zero at first, which would hide a wrong gradient of lora_A
                p.normal_()
    return model


def of_class(*names: str) -> Units:
    return lambda model: [module for module in model.modules() if type(module).__name__ in names]


TOKENS = torch.randint(61, (3, 2, 2, 9), generator=torch.Generator().manual_seed(1))  # step, rank, batch, time


def token_batches() -> list[list[dict[str, Tensor]]]:
    return [[{"input_ids": t, "labels": t} for t in step] for step in TOKENS]


def translation_batches() -> list[list[dict[str, Tensor]]]:
    return [[{"input_ids": t, "labels": t.flip(1)} for t in step] for step in TOKENS]


def image_batches() -> list[list[dict[str, Tensor]]]:
    pixels = torch.randn(3, 2, 4, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [[{"pixel_values": x, "labels": torch.arange(4) % 5} for x in step] for step in pixels]


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


# name -> build, batches, explicit units (finer or coarser than the default)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Units]] = {
    "gpt2": (gpt2, token_batches, of_class("GPT2Attention", "GPT2MLP", "Embedding")),
    "llama": (llama, token_batches, of_class("LlamaMLP", "LlamaAttention", "LlamaRMSNorm")),
    "vit": (vit, image_batches, of_class("ViTLayer", "ViTEmbeddings")),
    "t5": (t5, translation_batches, of_class("T5Block", "T5Stack")),
    "lora": (lora, token_batches, of_class("GPT2Block", "Linear")),
}


def train(name: str, stage: int, checkpointing: bool) -> None:
    build, batches, explicit = MODELS[name]
    for units in (None, explicit):
        pair = reference.Pair(
            build, stage, units=units, optimizer=torch.optim.SGD, options={"lr": 0.1}, loss_of=loss_of
        )
        if checkpointing:
            pair.model.gradient_checkpointing_enable()
            pair.model.train()
        assert len(pair.zero.units) > 3
        start = {n: p.detach().clone() for n, p in pair.reference.named_parameters()}
        for per_rank in batches():
            pair.backward(per_rank)
            pair.step()
            pair.check()
        equal_to_1e_12(pair, start)
        if name != "vit":
            same_tokens(pair)
            generate_in_step(pair)


def equal_to_1e_12(pair: reference.Pair, start: dict[str, Tensor]) -> None:
    state, wanted = pair.zero.full_state(), pair.reference.state_dict()
    if dist.get_rank() == 0:
        assert set(state) == set(wanted)
        for name, value in wanted.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)
        pair.reference.load_state_dict(state, strict=True)
    for name, p in pair.reference.named_parameters():
        assert p.requires_grad != torch.equal(p, start[name]), f"{name} stood still, or moved though it is frozen"


def same_tokens(pair: reference.Pair) -> None:
    """Generating, with a cache and another length on each rank, gives the tokens of the plain model."""
    prompt = TOKENS[0, dist.get_rank(), :, :4]
    options = {"max_new_tokens": 4 + 3 * dist.get_rank(), "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    pair.model.eval()
    pair.reference.eval()
    wanted = pair.reference.generate(input_ids=prompt, **options)
    with pair.zero.gathered():
        found = pair.model.generate(input_ids=prompt, **options)
    assert found.tolist() == wanted.tolist()
    assert found.shape[1] >= options["max_new_tokens"]
    reference.check_clean(pair.zero)


def generate_in_step(pair: reference.Pair) -> None:
    """Ranks that generate equally long may do it unit by unit, if the root's forward is what generate() calls."""
    prompt = TOKENS[0, dist.get_rank(), :, :4]
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    if type(pair.model).__name__ in ("GPT2LMHeadModel", "LlamaForCausalLM"):
        found = pair.model.generate(input_ids=prompt, **options)
        assert found.tolist() == pair.reference.generate(input_ids=prompt, **options).tolist()
    elif pair.zero.stage == 3:  # T5 calls its encoder, peft the model inside it, and the root's weights are not there
        with pytest.raises(minizero.ShardedAccessError, match=r"shared\.weight|wte\.weight"):
            pair.model.generate(input_ids=prompt, **options)
    reference.check_clean(pair.zero)


def train_all(stage: int) -> None:
    """All in one start: importing transformers takes longer than everything else here."""
    for name in MODELS:
        train(name, stage, checkpointing=False)
        if stage == 3 and name in ("gpt2", "llama"):
            train(name, stage, checkpointing=True)


@STAGES
def test_models_of_transformers_and_peft_train_and_generate_like_one_process(stage: int) -> None:
    harness.run_ranks(2, train_all, stage, timeout=240.0)
