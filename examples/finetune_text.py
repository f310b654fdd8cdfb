"""Fine-tuning a pretrained causal language model of transformers on a set of texts of ``datasets``.

lockstep train examples/finetune_text.py --set pretrained=FOLDER --strategy ddp --devices 2
--precision bf16

FOLDER is what ``save_pretrained`` writes, of model and tokenizer. The texts are those of a file of
JSON lines (``--set texts=FILE.jsonl``, each with a ``text``), else Python's own language reference.
They are read at once or as a stream (``--set streaming=true``), and padded, or packed in windows
without padding (``--set packed=true``). With ``--set lora=8`` low-rank adapters of PEFT are trained
in place of the weights, and checkpoints and weights of the run have these alone. At the end its
folder has ``pretrained/``, which ``from_pretrained`` (with adapters, PEFT's) reads.
"""

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import datasets
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

import lockstep

IGNORED = -100
"""In place of a label that isn't predicted: padding."""


def texts_of(file: str | None) -> tuple[datasets.Dataset, datasets.Dataset]:
    """The texts to train on, and every tenth for evaluation, in a column ``text``."""
    if file:
        every = datasets.load_dataset("json", data_files=file, split="train").select_columns("text")
    else:
        parts = sorted({part.strip() for text in topics.values() for part in text.split("\n\n")})
        every = datasets.Dataset.from_dict({"text": [part for part in parts if len(part) > 40]})
    held_out = set(range(0, len(every), 10))
    return every.select([i for i in range(len(every)) if i not in held_out]), every.select(
        sorted(held_out)
    )


class Tokens:
    """Turns texts into batches of tokens.

    Args:
        folder: of the tokenizer.
        context: the longest text, in tokens; with ``packed`` each has that many.
    """

    def __init__(self, folder: str, context: int) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.context = context

    def packed(self, texts: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        """Texts one after the other, each with an end, cut in windows; what is left over at the
        end is left out.
        """
        end = [self.tokenizer.eos_token_id]
        every = [token for ids in self.tokenizer(texts["text"])["input_ids"] for token in ids + end]
        whole = len(every) // self.context * self.context
        return {"input_ids": [every[i : i + self.context] for i in range(0, whole, self.context)]}

    def batch(self, samples: list[dict[str, Any]]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Inputs by the names of the model's arguments, and labels: all (batch, time of the
        longest).
        """
        if "text" in samples[0]:
            found = self.tokenizer(
                [sample["text"] for sample in samples],
                padding=True,
                truncation=True,
                max_length=self.context,
                return_tensors="pt",
            )
            ids, mask = found["input_ids"], found["attention_mask"]
        else:
            ids = torch.tensor([sample["input_ids"] for sample in samples])
            mask = torch.ones_like(ids)
        return {"input_ids": ids, "attention_mask": mask}, ids.masked_fill(mask == 0, IGNORED)


def nats(outputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss: (total, count) over the tokens that are predicted; the first of each row is not."""
    logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:]
    total = nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total, (targets != IGNORED).sum()


def accuracy(outputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tokens are predicted right, of how many."""
    return (outputs.logits[:, :-1].argmax(-1) == labels[:, 1:]).sum(), (
        labels[:, 1:] != IGNORED
    ).sum()


def read(folder: str, lora: int) -> nn.Module:
    """The pretrained model in float32, its loss left to the job; with adapters of rank ``lora``
    where that isn't 0.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_cache=False)
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=lora, lora_alpha=2 * lora))


def job(
    pretrained: str,
    texts: str | None = None,
    streaming: bool = False,
    packed: bool = False,
    lora: int = 0,
    context: int = 128,
    lr: float = 5e-4,
    steps: int = 200,
    warmup: int = 20,
) -> lockstep.Job:
    """The job; its parameters are given as `--set lora=8`.

    Args:
        pretrained: a folder of ``save_pretrained``, with a tokenizer.
        texts: a file of JSON lines; None takes Python's language reference.
        streaming: the texts are a stream, tokenized as it is read.
        packed: windows of ``context`` tokens without padding.
        lora: the rank of the adapters; 0 trains all weights.
        context: tokens of the longest text.
        lr: the highest learning rate; it rises for the first updates, then falls to zero.
        steps: updates.
        warmup: updates for which the learning rate rises.
    """
    tokens = Tokens(pretrained, context)

    def prepared(part: datasets.Dataset, streaming: bool) -> Any:
        chosen: Any = part.to_iterable_dataset() if streaming else part
        return chosen.map(tokens.packed, batched=True, remove_columns="text") if packed else chosen

    def written(event: lockstep.Event) -> None:
        if event.kind == "finished":
            folder = Path(event.folder, "pretrained")
            lockstep.Run.open(event.folder).model().save_pretrained(folder)
            tokens.tokenizer.save_pretrained(folder)

    train, held_out = texts_of(texts)
    return lockstep.Job(
        model=lambda: read(pretrained, lora),
        loss=nats,
        optimizer=lambda params: torch.optim.AdamW(params, lr=lr),
        train_data=lambda: prepared(train, streaming),
        eval_data=lambda: prepared(held_out, False),
        collate=tokens.batch,
        batch_size=16,
        steps=steps,
        clip_norm=1.0,
        save_frozen=not lora,
        lr_scheduler=lambda optimizer: get_scheduler("cosine", optimizer, warmup, steps),
        lr_scheduler_every="step",
        metrics={"accuracy": accuracy},
        log_every=10,
        eval_every=50,
        save_every=50,
        on_event=[written],
    )
