"""examples/pretrain_text.py and examples/finetune_text.py on models and texts small enough for a
test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from lockstep import Run
from lockstep.cli.command import main
from lockstep.jobfile import loaded

EXAMPLES = Path(__file__).parents[2] / "examples"
PRETRAIN = str(EXAMPLES / "pretrain_text.py")
FINETUNE = str(EXAMPLES / "finetune_text.py")
SMALL = [
    "--set",
    "width=32",
    "--set",
    "layers=1",
    "--set",
    "size=40000",
    "--set",
    "vocabulary=300",
    "--set",
    "context=32",
]
ON = {"single": "1xcpu", "dp": "2xcpu", "ddp": "2xcpu", "mp": "2xcpu", "pp": "2xcpu"}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT-2 and its tokenizer, as ``save_pretrained`` writes them."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, show_progress=False, special_tokens=["<end>"]
    )
    words.train_from_iterator(loaded(FINETUNE).texts_of(None)[1]["text"], trainer)
    folder = tmp_path_factory.mktemp("pretrained")
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=300,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def trained(folder: Path, pretrained: Path, strategy: str, *words: str) -> Run:
    """The run of six updates in the folder of this name."""
    sets = [
        "--set",
        f"pretrained={pretrained}",
        "--set",
        "context=48",
        "--set",
        "steps=6",
        "--set",
        "warmup=2",
    ]
    way = ["--strategy", strategy, "--devices", ON[strategy]]
    assert (
        main(["train", FINETUNE, *way, *sets, "--steps", "6", "--folder", str(folder), *words]) == 0
    )
    return Run.open(max(folder.iterdir()))


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run.model().state_dict().items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        pytest.param("ddp", [], marks=pytest.mark.slow),
        pytest.param(
            "ddp",
            ["--set", "streaming=true", "--set", "packed=true", "--set", "lora=2"],
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(strategy, words, marks=pytest.mark.slow)
            for strategy in ("dp", "ddp", "mp", "pp")
            for words in (
                ["--set", "packed=true"],
                ["--set", "streaming=true"],
                ["--set", "lora=2"],
                ["--set", "lora=2", "--set", "packed=true"],
            )
        ),
    ],
)
def test_fine_tuning_ends_where_one_device_does(
    strategy: str, words: list[str], tmp_path: Path, pretrained
) -> None:
    fp64 = ["--precision", "fp64"]
    # GPT-2 computes its own loss in float32. In two micro-batches backward begins with total / n, as
    # it does under dp and ddp, so that rounding is the same.
    accumulate = [] if strategy == "mp" else ["--accumulate", "2"]
    one = weights(trained(tmp_path / "one", pretrained, "single", *words, *fp64, *accumulate))
    cut = ["--microbatches", "2"] if strategy == "pp" else []
    many = trained(tmp_path / "many", pretrained, strategy, *words, *fp64, *cut)
    for name, tensor in weights(many).items():
        assert (tensor - one[name]).abs().max() <= 1e-10, name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_was_fine_tuned_is_read_by_transformers_and_by_peft(
    tmp_path: Path, pretrained: Path
) -> None:
    tokens = AutoTokenizer.from_pretrained(pretrained)(
        "an assignment statement", return_tensors="pt"
    )
    run = trained(tmp_path / "whole", pretrained, "ddp", "--precision", "bf16")
    read = AutoModelForCausalLM.from_pretrained(Path(run.folder, "pretrained"))
    assert torch.equal(read(**tokens).logits, run.model().eval()(**tokens).logits)
    assert AutoTokenizer.from_pretrained(Path(run.folder, "pretrained"))(
        "an"
    ) == AutoTokenizer.from_pretrained(pretrained)("an")

    from peft import PeftModel

    run = trained(tmp_path / "adapters", pretrained, "ddp", "--set", "lora=2")
    kept = Path(run.folder, "pretrained")
    files = [run.folder / "model.safetensors", *run.folder.glob("checkpoints/*/*.safetensors")]
    names = [name for file in files for name in load_file(file)]
    assert len(files) > 1 and all("lora_" in name for name in names), names
    base = AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.float32)
    read = PeftModel.from_pretrained(base, kept)
    read.save_pretrained(tmp_path / "again")
    name = "adapter_model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (kept / name).read_bytes()
    assert torch.equal(read.eval()(**tokens).logits, run.model().eval()(**tokens).logits)
    assert not torch.equal(
        read(**tokens).logits, AutoModelForCausalLM.from_pretrained(pretrained)(**tokens).logits
    )


def pretrain(folder: Path, *words: str) -> int:
    return main(["train", PRETRAIN, *SMALL, "--batch-size", "16", "--folder", str(folder), *words])


@pytest.mark.slow
def test_one_epoch_of_texts_stops_and_resumes_inside_itself_with_the_same_bits(
    tmp_path: Path, capsys
) -> None:
    assert pretrain(tmp_path / "whole", "--devices", "1xcpu") == 0
    assert "perplexity of a token" in capsys.readouterr().out
    assert pretrain(tmp_path / "cut", "--devices", "1xcpu", "--steps", "7") == 0
    cut = max((tmp_path / "cut").iterdir())
    assert main(["train", "--resume", str(cut), "--steps", "none"]) == 0
    whole = max((tmp_path / "whole").iterdir())
    assert (whole / "model.safetensors").read_bytes() == (cut / "model.safetensors").read_bytes()
    ends = [
        json.loads((run / "metrics.jsonl").read_text().splitlines()[-1]) for run in (whole, cut)
    ]
    assert ends[0]["step"] == ends[1]["step"] > 7 and ends[0]["eval_loss"] == ends[1]["eval_loss"]
    written = [
        (run / "samples" / f"step-{ends[0]['step']}.txt").read_text() for run in (whole, cut)
    ]
    assert written[0] == written[1] and written[0].startswith("import ")


def test_a_bigram_model_is_better_than_a_unigram_model_and_the_texts_are_kept() -> None:
    example: Any = loaded(PRETRAIN)
    tokenizer, train, held_out = example.tokenized(40_000, 300)
    assert tokenizer.decode(train.tolist()) == example.standard_library(40_000)[0].decode()
    unigrams, bigrams = example.counted_perplexities(train, held_out, 300)
    assert 1 < bigrams < unigrams < 300
    data = example.Windows(train, 32)
    assert torch.equal(
        torch.cat([data[i][1] for i in range(len(data))]), train[1 : len(data) * 32 + 1]
    )
