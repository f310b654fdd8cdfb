"""Families of Hugging Face models, from configuration only, in shards: single-device results."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Job

from harness import parity  # isort: skip
from zoo import labels, sgd  # isort: skip

WORDS = 23
SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
    "head_dim": 4,
    "num_key_value_heads": 2,
    **dict.fromkeys(
        ("dropout", "attention_dropout", "hidden_dropout", "activation_dropout", "layerdrop"), 0.0
    ),
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "classifier_dropout": 0.0,
}
OWN: dict[str, dict[str, Any]] = {
    "GPT2": {
        "n_embd": 8,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 16,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "OPT": {"word_embed_proj_dim": 8, "ffn_dim": 16},
    "Bloom": {"n_layer": 2, "n_head": 2},
    "DistilBert": {
        "dim": 8,
        "n_layers": 2,
        "n_heads": 2,
        "hidden_dim": 16,
        "seq_classif_dropout": 0.0,
    },
    "Electra": {"embedding_size": 8, "summary_last_dropout": 0.0},
    "Albert": {"embedding_size": 8, "classifier_dropout_prob": 0.0},
    "T5": {
        "d_model": 8,
        "d_kv": 4,
        "d_ff": 16,
        "num_layers": 2,
        "num_heads": 2,
        "dropout_rate": 0.0,
    },
    "Bart": {
        "d_model": 8,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "forced_eos_token_id": None,
    },
}
FAMILIES = {
    **dict.fromkeys(
        ("GPT2", "Llama", "Mistral", "Qwen2", "OPT", "GPTNeoX", "Bloom", "Phi", "Qwen3"), "causal"
    ),
    **dict.fromkeys(("Bert", "Roberta", "DistilBert", "Electra", "Albert"), "classes"),
    **dict.fromkeys(("T5", "Bart"), "pairs"),
}
ENDINGS = {
    "causal": "ForCausalLM",
    "classes": "ForSequenceClassification",
    "pairs": "ForConditionalGeneration",
}


def built(family: str) -> nn.Module:
    settings = {**SMALL, **OWN.get(family, {})}
    kind = FAMILIES[family]
    more = (
        {"num_labels": 3}
        if kind == "classes"
        else {"decoder_start_token_id": 0}
        if kind == "pairs"
        else {}
    )
    config = getattr(transformers, f"{family}Config")(**settings, **more)
    model: nn.Module = getattr(
        transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}{ENDINGS[kind]}"
    )(config)
    return model


def on_tokens(outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    loss = nn.functional.cross_entropy(
        outputs.logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )
    return loss, targets.numel()


def on_classes(outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return nn.functional.cross_entropy(outputs.logits, targets, reduction="sum"), len(targets)


def as_inputs(
    samples: list[Any], names: tuple[str, ...]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    tokens, targets = (torch.stack(of) for of in zip(*samples, strict=True))
    return dict.fromkeys(names, tokens), targets


def job_of(family: str) -> Job:
    kind = FAMILIES[family]
    tokens = torch.randint(3, WORDS, (21, 6), generator=torch.Generator().manual_seed(8))
    return Job(
        model=functools.partial(built, family),
        loss=on_classes if kind == "classes" else on_tokens,
        optimizer=sgd,
        train_data=TensorDataset(
            tokens, labels(21, 3) if kind == "classes" else (tokens * 3 + 1) % WORDS
        ),
        batch_size=8,
        epochs=1,
        collate=functools.partial(
            as_inputs,
            names=("input_ids", "decoder_input_ids") if kind == "pairs" else ("input_ids",),
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_in_shards_ends_where_one_device_does(family: str) -> None:
    # In two micro-batches backward begins with total / n, as it does under fsdp, so that what these
    # models compute in float32 rounds alike.
    found = parity(job_of(family), "fsdp", devices="2xcpu", against_settings={"accumulate": 2})
    assert found.worst < 1e-10
