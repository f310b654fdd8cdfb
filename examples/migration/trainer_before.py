"""A small GPT-2 by the Trainer of transformers: torchrun --nproc-per-node 2 trainer_before.py."""

from pydoc_data.topics import topics

import datasets
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


def data() -> tuple[datasets.Dataset, datasets.Dataset]:
    text = "".join(topics[name] for name in sorted(topics)).encode()[:57600]
    blocks = datasets.Dataset.from_dict({"labels": [list(text[i : i + 64]) for i in range(0, len(text), 64)]})
    return blocks.select(range(768)), blocks.select(range(768, 896))


def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {"input_ids": labels, "labels": labels}


def model() -> GPT2LMHeadModel:
    sizes = {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, use_cache=False, **sizes, **dropout)
    )


if __name__ == "__main__":
    set_seed(0)
    train_data, eval_data = data()
    settings = TrainingArguments(
        output_dir="run",
        num_train_epochs=2,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=32,
        gradient_accumulation_steps=2,
        learning_rate=0.003,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        logging_strategy="epoch",
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model=model(), args=settings, train_dataset=train_data, eval_dataset=eval_data, data_collator=collate
    )
    trainer.train()
    if trainer.is_world_process_zero():
        last = {name: value for log in trainer.state.log_history for name, value in log.items()}
        print(f"loss {last['loss']:.5f}  eval_loss {last['eval_loss']:.5f}")
