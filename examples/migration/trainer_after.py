"""A small GPT-2 by Lockstep: lockstep train trainer_after.py --strategy ddp --devices 2."""

from pydoc_data.topics import topics

import datasets
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import lockstep


def data() -> tuple[datasets.Dataset, datasets.Dataset]:
    text = "".join(topics[name] for name in sorted(topics)).encode()[:57600]
    blocks = datasets.Dataset.from_dict({"labels": [list(text[i : i + 64]) for i in range(0, len(text), 64)]})
    return blocks.select(range(768)), blocks.select(range(768, 896))


def collate(samples: list[dict[str, list[int]]]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {"input_ids": labels, "labels": labels, "num_items_in_batch": 1}, labels


def model() -> GPT2LMHeadModel:
    sizes = {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, use_cache=False, **sizes, **dropout)
    )


def sampler(epoch: int) -> torch.Tensor:
    """The order of the Trainer, so that the same numbers are printed; leave it out."""
    return torch.randperm(768, generator=torch.Generator().manual_seed(42 + epoch))


def job() -> lockstep.Job:
    train_data, eval_data = data()
    return lockstep.Job(
        model=model, loss=lambda outputs, labels: (outputs.loss, labels.numel()), collate=collate,
        train_data=train_data, eval_data=eval_data, batch_size=32, accumulate=2, epochs=2, clip_norm=1.0, order=sampler,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.003, weight_decay=0.0),
    )
