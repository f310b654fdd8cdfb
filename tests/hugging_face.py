"""Small models of Hugging Face, from configuration only, and sequences for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, GPT2Config, GPT2LMHeadModel, T5Config
from transformers import T5ForConditionalGeneration as T5

from zoo import labels

WORDS = 23
LENGTHS = torch.randint(2, 9, (25,), generator=torch.Generator().manual_seed(7))


def gpt2() -> nn.Module:
    """Its output layer is tied to its embedding."""
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS,
            n_positions=8,
            n_embd=8,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )
    model.loss_type = "ForCausalLM"  # what it takes anyway, after a warning
    return model


def bert_config(**more: Any) -> BertConfig:
    return BertConfig(
        vocab_size=WORDS,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **more,
    )


def t5() -> nn.Module:
    """Encoder, decoder and output layer share one embedding."""
    return T5(
        T5Config(
            vocab_size=WORDS,
            d_model=8,
            d_kv=4,
            d_ff=16,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )


def sequences() -> list[tuple[Tensor, int]]:
    """25 sequences of 2 to 8 tokens, each with a class."""
    made = torch.Generator().manual_seed(8)
    tokens = [torch.randint(1, WORDS, (int(length),), generator=made) for length in LENGTHS]
    return list(zip(tokens, labels(25, 3).tolist(), strict=True))
