"""The loss that a model of Hugging Face computes itself: one line weights it as one device does
over the whole batch.

Models from tiny configurations; sequences of 2 to 8 tokens, some labels ignored, and all of some
sequences; batches of 8, 8, 8 and 1. GPT-2 and Llama compute their loss in float32 whatever the
model is in, which leaves rounding of 1e-7; a wrong weighting is off by 1e-2.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

import lockstep
from lockstep import Job
from lockstep.errors import LossError, StrategyError
from lockstep.strategies import PP

from harness import parity  # isort: skip
from hugging_face import WORDS, bert_config, gpt2, sequences, t5
from zoo import sgd


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=8,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            use_cache=False,
        )
    )


def bert() -> nn.Module:
    return BertForMaskedLM(bert_config())


def classifier() -> nn.Module:
    return BertForSequenceClassification(
        bert_config(num_labels=3, problem_type="single_label_classification")
    )


def with_tokens(samples: list[Any]) -> tuple[dict[str, Tensor], Tensor]:
    """A third of the tokens is ignored, and all of short sequences: some local batches have none
    that counts.
    """
    inputs = nn.utils.rnn.pad_sequence([tokens for tokens, _ in samples], batch_first=True)
    mask = inputs != 0
    wanted = inputs.masked_fill((inputs % 3 == 0) | ~mask, -100)
    wanted[mask.sum(dim=1) < 5] = -100
    return {"input_ids": inputs, "attention_mask": mask.long(), "labels": wanted}, wanted


def with_classes(samples: list[Any]) -> tuple[dict[str, Tensor], Tensor]:
    inputs, _ = with_tokens(samples)
    classes = torch.tensor([kind for _, kind in samples])
    return {**inputs, "labels": classes}, classes


def job_of(model: Any, loss: Any = lockstep.model_loss, **settings: Any) -> Job:
    data = sequences()
    collate = with_classes if model is classifier else with_tokens
    fields: dict[str, Any] = {
        "collate": collate,
        "eval_data": data,
        "batch_size": 8,
        "epochs": 2,
        **settings,
    }
    return Job(model=model, loss=loss, optimizer=sgd, train_data=data, **fields)


def own(outputs: Any, targets: Tensor) -> Tensor:
    """As people write it."""
    loss: Tensor = outputs.loss
    return loss


MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert, "classifier": classifier, "t5": t5}
IN_FLOAT32 = {"gpt2", "llama", "t5"}
"""Models that compute norms and softmax in float32, whatever their format is."""
WAYS: dict[str, Any] = {
    "single, accumulate=4": ("single", "1xcpu", {"accumulate": 4}),
    "dp": ("dp", "3xcpu", {}),
    "ddp": ("ddp", "2xcpu", {}),
    "pp": (PP(microbatches=4), "2xcpu", {}),
}

FAST = {("bert", "single, accumulate=4")}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param(kind, way, marks=[] if (kind, way) in FAST else [pytest.mark.slow])
        for kind in MODELS
        for way in WAYS
    ],
)
def test_the_models_own_loss_is_that_of_the_whole_batch(kind: str, way: str) -> None:
    strategy, devices, settings = WAYS[way]
    job = job_of(MODELS[kind])
    found = parity(job.replace(**settings), strategy, devices, against_settings={"accumulate": 1})
    assert found.worst < (1e-5 if kind in IN_FLOAT32 else 1e-10), str(found)
    assert max(found.history.values()) < (1e-5 if kind in IN_FLOAT32 else 1e-10)
    assert any(found.moved.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_one_device_trains_on_exactly_the_mean_that_the_model_gives(kind: str) -> None:
    """With a whole batch the weighting changes nothing, so the line may be written from the
    beginning.
    """
    job = job_of(MODELS[kind], eval_data=None)
    found = parity(job, "single", "1xcpu", against_settings={"loss": own})
    assert found.worst < (1e-5 if kind in IN_FLOAT32 else 1e-10)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("way", "settings"), [("single", {"accumulate": 4}), ("dp", {}), ("pp", {})]
)
def test_the_outputs_own_mean_is_refused_where_batches_are_cut_with_the_line_to_use(
    way: str, settings: Any, tmp_path: Any
) -> None:
    devices = "1xcpu" if way == "single" else "2xcpu"
    with pytest.raises(
        LossError,
        match=r"own is outputs.loss, the model's mean .*take loss=lockstep.model_loss, which weig",
    ):
        lockstep.train(
            job_of(bert, own),
            strategy=way,
            devices=devices,
            folder=tmp_path,
            quiet=True,
            precision="fp64",
            **settings,
        )


class WithPenalty(BertForMaskedLM):
    """Adds something to its loss."""

    def forward(self, *args: Any, **named: Any) -> Any:
        outputs = super().forward(*args, **named)
        outputs.loss = outputs.loss + 0.01 * outputs.logits.square().mean()
        return outputs


def test_a_model_that_adds_to_its_loss_is_refused_where_batches_are_cut(tmp_path: Any) -> None:
    job = job_of(lambda: WithPenalty(bert_config()))
    where = {"devices": "1xcpu", "folder": tmp_path, "quiet": True}
    with pytest.raises(StrategyError, match="the total of the loss is"):
        lockstep.train(job, accumulate=2, **where)
    assert lockstep.train(job, **where).summary["steps"]


def without_labels(samples: list[Any]) -> tuple[dict[str, Tensor], Tensor]:
    inputs, wanted = with_tokens(samples)
    del inputs["labels"]
    return inputs, wanted


def with_numbers(samples: list[Any]) -> tuple[dict[str, Tensor], Tensor]:
    inputs, classes = with_classes(samples)
    return inputs, classes.float()


@pytest.mark.parametrize(
    ("model", "collate", "says"),
    [
        (
            bert,
            without_labels,
            r"the outputs have no loss, a scalar: give the model labels .*: return \(total, count\)",
        ),
        (
            classifier,
            with_numbers,
            r"logits and labels of tokens or classes are expected, not float32\(8, 3\) and float32\(8,\)",
        ),
    ],
)
def test_what_the_line_is_not_right_for_is_refused(
    model: Any, collate: Any, says: str, tmp_path: Any
) -> None:
    with pytest.raises(LossError, match=says):
        lockstep.train(
            job_of(model, collate=collate),
            strategy="single",
            devices="1xcpu",
            folder=tmp_path,
            quiet=True,
        )


def test_outputs_may_be_in_a_dict() -> None:
    logits, words = torch.randn(4, 5, 7), torch.randint(7, (4, 5))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())
    total, count = lockstep.model_loss({"loss": loss, "logits": logits}, words)
    assert count == 20 and torch.equal(total, loss * 20)
