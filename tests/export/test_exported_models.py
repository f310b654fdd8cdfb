"""The models of the examples, and one of Hugging Face, as programs and as graphs of ONNX, small
ones and whole ones.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep import Run
from lockstep.jobfile import JobFile

ROOT = Path(__file__).parents[2]

GPT = {
    "size": 20_000,
    "width": 16,
    "layers": 2,
    "heads": 2,
    "context": 32,
    "updates": 2,
    "steps": 2,
}
MOBILENET = {"generated": True, "samples": 20, "image_size": 32}
LARGE: dict[str, dict[str, Any]] = {
    "char_lm.py": {"size": 200_000, "updates": 20, "steps": 20},
    "cifar10_mobilenetv2.py": {"generated": True, "samples": 64},
    "resnet50_split.py": {"samples": 16, "image_size": 112},
    "huggingface.py": {},
    "unet.py": {"steps": 2},
}

BERT = """
import torch, lockstep
from torch import nn

def bert(width, layers):
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=64, hidden_size=width, num_hidden_layers=layers, num_attention_heads=max(2, width // 64),
            intermediate_size=4 * width, max_position_embeddings=64, num_labels=3,
        )
    )

def collate(samples):
    words = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    labels = torch.tensor([len(sample) % 3 for sample in samples])
    return {"attention_mask": (words != 0).long(), "input_ids": words}, labels

def accuracy(outputs, labels):
    return (outputs.logits.argmax(1) == labels).sum(), len(labels)

def job(width: int = 32, layers: int = 2):
    made = torch.Generator().manual_seed(1)
    texts = [torch.randint(1, 64, (5 + 7 * i % 23,), generator=made) for i in range(24)]
    return lockstep.Job(
        model=lambda: bert(width, layers), collate=collate, train_data=texts[:16], eval_data=texts[16:], batch_size=8,
        loss=lambda outputs, labels: nn.functional.cross_entropy(outputs.logits, labels),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3), steps=2, metrics={"accuracy": accuracy},
    )
"""


def trained(file: Path, parameters: dict[str, Any], folder: Path, **settings: Any) -> Run:
    own = {
        "batch_size": 8,
        **settings,
        **({"steps": parameters["steps"]} if "steps" in parameters else {"epochs": 1}),
    }
    its = {name: value for name, value in parameters.items() if name != "steps"}
    return lockstep.train(JobFile(str(file), its, own), folder=folder, devices=1, quiet=True)


def example(name: str, sizes: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    return trained(ROOT / "examples" / name, sizes, folder)


def bert(folder: Path, **sizes: int) -> Run:
    pytest.importorskip("transformers")
    (folder / "bert.py").write_text(BERT)
    return trained(folder / "bert.py", dict(sizes), folder)


def needs_onnx() -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)


@pytest.mark.slow
def test_mobilenetv2_for_small_images_is_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = example("cifar10_mobilenetv2.py", MOBILENET, tmp_path, monkeypatch)
    assert lockstep.export(run, format="torch-export", quiet=True).difference < 1e-5


@pytest.mark.slow
def test_resnet_50_for_small_images_is_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = example("resnet50_split.py", {"samples": 8, "image_size": 32}, tmp_path, monkeypatch)
    assert lockstep.export(run, format="torch-export", quiet=True).difference < 1e-5


@pytest.mark.slow
def test_a_small_gpt_in_onnx_takes_texts_of_any_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_onnx()
    import onnxruntime

    run = example("char_lm.py", GPT, tmp_path, monkeypatch)
    found = lockstep.export(run, format="onnx", quiet=True)
    session = onnxruntime.InferenceSession(str(found.path), providers=["CPUExecutionProvider"])
    assert [(g.name, g.shape) for g in session.get_inputs()] == [("tokens", ["batch", "tokens_1"])]
    for size, length in ((1, 1), (3, 32), (20, 7)):
        tokens = torch.randint(256, (size, length))
        [logits] = session.run(["output"], {"tokens": tokens.numpy()})
        torch.testing.assert_close(
            torch.from_numpy(logits), run.model()(tokens), rtol=1e-4, atol=1e-5
        )


@pytest.mark.slow
def test_a_small_bert_takes_its_inputs_by_name(tmp_path: Path) -> None:
    run = bert(tmp_path)
    found = lockstep.export(run, format="torch-export", quiet=True)
    words = torch.randint(1, 64, (3, 11))
    outputs = torch.export.load(found.path).module()(
        input_ids=words, attention_mask=torch.ones_like(words)
    )
    assert list(outputs) == ["logits"]
    model: nn.Module = run.model()
    torch.testing.assert_close(
        outputs["logits"], model(input_ids=words, attention_mask=torch.ones_like(words)).logits
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LARGE, "bert"])
def test_a_model_is_exported_in_each_way(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_onnx()
    run = (
        bert(tmp_path, width=256, layers=6)
        if name == "bert"
        else example(name, LARGE[name], tmp_path, monkeypatch)
    )
    assert lockstep.export(run, format="safetensors", quiet=True).difference == 0
    assert lockstep.export(run, format="torch-export", quiet=True).difference < 1e-5
    assert 0 < lockstep.export(run, format="onnx", quiet=True).difference < 1e-5
