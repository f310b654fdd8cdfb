"""A small GPT-2 of Hugging Face, from its configuration, on Python's own language reference, byte
by byte.

lockstep train examples/huggingface.py --strategy ddp --devices 2

Nothing is downloaded. The model computes its own loss and returns an output object:
``total_and_count`` reads both. The short way is ``loss=lockstep.model_loss``, without
``num_items_in_batch``; with it, sums are the same to the last bits.
"""

from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn

import lockstep

LONGEST = 128
"""Bytes of a paragraph; what is longer is cut off there."""


def paragraphs(held_out: bool) -> list[torch.Tensor]:
    """Paragraphs of the reference as bytes (time,), of many lengths; every tenth is for
    evaluation.
    """
    texts = sorted({part.strip() for text in topics.values() for part in text.split("\n\n")})
    chosen = [text.encode()[:LONGEST] for i, text in enumerate(texts) if (i % 10 == 0) == held_out]
    return [torch.tensor(list(text)) for text in chosen if len(text) > 1]


def padded(samples: list[torch.Tensor]) -> tuple[dict[str, Any], torch.Tensor]:
    """Inputs by the names of the model's arguments, and labels: (batch, time), -100 where there is
    no byte.

    ``num_items_in_batch`` is what Hugging Face divides the sum of the loss by. Left out, the loss
    is a mean over the labels of a share, NaN where a share has none; with 1 it is the sum, which is
    what has to be added up.
    """
    pad = nn.utils.rnn.pad_sequence
    labels = pad(samples, batch_first=True, padding_value=-100)
    mask = (labels != -100).long()
    return {
        "input_ids": labels * mask,
        "attention_mask": mask,
        "labels": labels,
        "num_items_in_batch": 1,
    }, labels


def total_and_count(outputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's own loss. It predicts each byte from those before, so the first label of each
    row isn't counted.
    """
    return outputs.loss, (labels[:, 1:] != -100).sum()


def accuracy(outputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many bytes are predicted right, of how many."""
    return (outputs.logits[:, :-1].argmax(dim=-1) == labels[:, 1:]).sum(), (
        labels[:, 1:] != -100
    ).sum()


def gpt2(width: int, layers: int, dropout: float) -> nn.Module:
    """A language model over bytes, its output layer tied to its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256,
        n_positions=LONGEST,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,  # else the keys and values for generating are among the outputs
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what it takes anyway, after a warning
    return model


def job(lr: float = 0.003, width: int = 64, layers: int = 2, dropout: float = 0.0) -> lockstep.Job:
    """The job; its parameters are given as `--set width=128`."""
    return lockstep.Job(
        model=lambda: gpt2(width, layers, dropout),
        loss=total_and_count,
        optimizer=lambda params: torch.optim.AdamW(params, lr=lr),
        train_data=lambda: paragraphs(held_out=False),
        eval_data=lambda: paragraphs(held_out=True),
        collate=padded,
        batch_size=32,
        epochs=2,
        clip_norm=1.0,
        metrics={"accuracy": accuracy},
    )
