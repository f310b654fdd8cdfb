"""A folder that somebody gave you: which file is run, what is kept of secrets, links in it, what
is no run at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep import Run
from lockstep.cli.command import main
from lockstep.compare.planned_rows import Setup, job_words
from lockstep.errors import FolderError, InputError, JobError
from lockstep.jobfile import JobFile, is_secret
from lockstep.launch.processes.local_ranks import _log
from lockstep.run.run_folder import RunFolder
from lockstep.training.records.run_page import write_page
from lockstep.training.run import job_of

FILE = """
import pathlib, torch, lockstep
from torch import nn
from torch.utils.data import TensorDataset

pathlib.Path(__file__).with_name("ran").touch()

def job(width: int = 4, api_key: str = "", token_count: int = 1):
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator))
    return lockstep.Job(
        model=lambda: nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)), loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), train_data=data, eval_data=data, batch_size=8)
"""
SECRET = "s3same"  # what must be in no file
COMMANDS = {
    "evaluate": ["evaluate", "run"],
    "predict": ["predict", "run"],
    "resume": ["train", "--resume", "run"],
}
MORE = {"evaluate": [], "predict": ["--overwrite"], "resume": ["--epochs", "9"]}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job file ``own.py``, and in ``run`` what one epoch of it has left."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(FILE)
    lockstep.train(JobFile("own.py"), devices=1, epochs=1, quiet=True).folder.rename(
        tmp_path / "run"
    )
    (tmp_path / "ran").unlink()
    return tmp_path


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    """The config of ``run``, after some changes."""
    file = folder / "run" / "config.json"
    if changes:
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that ends with 2."""
    capsys.readouterr()
    code = main(words)
    out, err = capsys.readouterr()
    assert code == 2, (code, out, err)
    (line,) = err.strip().splitlines()
    assert line.startswith("lockstep: ") and "Traceback" not in out
    return line


def notes(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]


# ---- the job file --------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_another_job_file_than_the_trained_one_is_run_only_when_a_person_says_so(
    command: str, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*COMMANDS[command], *MORE[command]]
    assert config(own)["sources"] == {"own.py": hashlib.sha256(FILE.encode()).hexdigest()}
    assert main(words) == 0, "as it was trained"
    (own / "own.py").write_text(FILE + "# edited\n")
    (own / "ran").unlink()
    said = refused(words, capsys)
    assert f"{own / 'own.py'} isn't the one that was trained (SHA-256 " in said
    assert said.endswith("--trust-job runs it as it is now, --job FILE gives another")
    assert not (own / "ran").exists(), "nothing of it was run"
    (own / "elsewhere.py").write_text(FILE)
    more = {"resume": [*COMMANDS[command], "--epochs", "10"]}.get(command, words)
    assert main([*more, "--job", "elsewhere.py"]) == 0
    more = {"resume": [*COMMANDS[command], "--epochs", "11", "--job", "own.py"]}.get(
        command, [*words, "--trust-job"]
    )
    assert main(more) == 0
    (own / "own.py").unlink()
    if command != "resume":
        assert "there is no such file" in refused([*words, "--trust-job"], capsys)
        assert "isn't there, or can't be read: --job FILE gives it from another place" in refused(
            words, capsys
        )


def test_a_resume_by_the_folder_trusts_on_demand_and_one_by_the_file_at_once(
    own: Path, capsys
) -> None:
    (own / "own.py").write_text(FILE + "# edited\n")
    assert main(["train", "--resume", "run", "--epochs", "2", "--trust-job"]) == 0
    assert notes(capsys) == ["note: own.py has changed since the run was started"]
    assert main(["train", "--resume", "run", "--epochs", "3"]) == 0, (
        "now it is the one that was trained last"
    )
    assert notes(capsys) == []
    (own / "own.py").write_text(FILE)
    assert main(["train", "own.py", "--resume", "run", "--epochs", "4"]) == 0
    assert notes(capsys) == ["note: own.py has changed since the run was started"]


def test_a_job_file_of_another_place_is_named_with_the_one_before(own: Path, capsys) -> None:
    (own / "other.py").write_text(FILE + "# another\n")
    assert main(["train", "--resume", "run", "--job", "other.py", "--epochs", "2"]) == 0
    said = f"note: the job file is {own / 'other.py'}, and was {own / 'own.py'} when the run was started"
    assert notes(capsys) == [said]
    assert config(own)["file"] == str(own / "other.py")
    assert main(["train", "own.py", "--resume", "run", "--epochs", "3"]) == 0
    assert [note.partition(",")[0] for note in notes(capsys)] == [
        f"note: the job file is {own / 'own.py'}"
    ]


def test_a_job_file_in_the_folder_or_by_half_a_path_is_not_run(own: Path, capsys) -> None:
    """The hash is right, as in a folder that was made to deceive."""
    (own / "run" / "own.py").write_text(FILE)
    for file in (str(own / "run" / "own.py"), "own.py", "run/own.py"):
        config(own, file=file)
        assert "so no training named it: --trust-job runs it" in refused(
            ["evaluate", "run"], capsys
        )
    assert not (own / "ran").exists() and not (own / "run" / "ran").exists()


def test_from_python_too(own: Path) -> None:
    whole = lockstep.evaluate("run")
    (own / "elsewhere.py").write_text(FILE)
    (own / "own.py").write_text(FILE + "# edited\n")
    for refused in (
        lambda: lockstep.evaluate("run"),
        lambda: lockstep.predict("run"),
        lambda: Run.open("run").model(),
    ):
        with pytest.raises(FolderError, match="--trust-job"):
            refused()
    for how in ({"trust_job": True}, {"job": "elsewhere.py"}, {"job": JobFile("elsewhere.py")}):
        assert lockstep.evaluate("run", **how) == whole
        assert lockstep.predict("run", quiet=True, **how).shape == (16, 3)
        assert Run.open("run", **how).model() is not None
    assert lockstep.evaluate(Run.open("run", trust_job=True)) == whole
    assert lockstep.evaluate(Run.open("run"), job=Path("elsewhere.py")) == whole
    with pytest.raises(InputError, match="--job is for a run"):
        lockstep.evaluate("own.py", job="elsewhere.py")


def test_a_job_that_was_no_file_is_given_by_one(own: Path, capsys) -> None:
    lockstep.train(JobFile("own.py").load(), devices=1, quiet=True).folder.rename(own / "plain")
    assert "its job was not a file" in refused(["evaluate", "plain"], capsys)
    assert main(["evaluate", "plain", "--job", "own.py"]) == 0


def test_job_is_for_a_resume(own: Path, capsys) -> None:
    for words in (
        ["train", "own.py", "--job", "own.py"],
        ["train", "own.py", "--resume", "run", "--job", "own.py"],
    ):
        assert "--job replaces the job file of --resume RUN" in refused(words, capsys)


def test_a_folder_without_the_hash_of_its_job_file_is_refused(own: Path, capsys) -> None:
    for sources, was in (({}, "unknown"), ({"own.py": ""}, ""), ({"own.py": 3}, "3")):
        config(own, sources=sources)
        assert "isn't the one that was trained (SHA-256" in refused(["evaluate", "run"], capsys)
        assert f"was {was})" in refused(["evaluate", "run"], capsys)
    config(own, sources={"own.py": 64 * "0"})
    assert "was 00000000" in refused(["evaluate", "run"], capsys)


# ---- settings that the file has otherwise now ----------------------------------------------------


def test_settings_that_a_resumed_run_does_not_follow_are_said(own: Path, capsys) -> None:
    assert main(["train", "--resume", "run", "--epochs", "2", "--clip-norm", "3"]) == 0
    text = FILE.replace("batch_size=8", "batch_size=4, accumulate=2, clip_norm=1.0, epochs=50")
    (own / "own.py").write_text(text)
    assert main(["train", "--resume", "run", "--epochs", "3", "--trust-job"]) == 0
    assert notes(capsys) == [
        "note: own.py has changed since the run was started",
        "note: accumulate: the run resumes with 1; the job file has 2 now",
        "note: batch_size: the run resumes with 8; the job file has 4 now",
    ], "epochs and clip_norm were given by hand"
    settings = config(own)["settings"]
    assert (
        settings["batch_size"],
        settings["accumulate"],
        settings["epochs"],
        settings["clip_norm"],
    ) == (8, 1, 3, 3.0)


# ---- secrets -------------------------------------------------------------------------------------


def test_names_of_secrets_are_told_by_their_words() -> None:
    secret = (
        "key api_key hf_token hfToken HF_TOKEN db_password password_prod "
        "aws_secret_access_key credentials APIKey"
    )
    assert all(map(is_secret, secret.split()))
    plain = (
        "keys monkey token_count keyword tokenizer max_tokens width key_size passwordless secretary"
    )
    assert not any(map(is_secret, plain.split()))


def test_a_secret_is_kept_nowhere_and_asked_for_again(own: Path, capsys) -> None:
    given = ["--set", f"api_key={SECRET}", "--set", "width=5", "--set", "token_count=7"]
    assert main(["train", "own.py", "--devices", "1", "--folder", "runs2", *given]) == 0
    (run,) = own.glob("runs2/*")
    assert json.loads((run / "config.json").read_text())["set"] == {
        "api_key": "***",
        "width": "5",
        "token_count": "7",
    }
    write_page(run)
    for path in [path for path in run.rglob("*") if path.is_file()]:
        assert SECRET.encode() not in path.read_bytes(), path
    job = JobFile("own.py", {"api_key": SECRET})
    assert SECRET not in " ".join(job_words(job)) and SECRET not in Setup("single", "1xcpu").line(
        job
    )
    asks = f"{run}: api_key looks like a secret and isn't kept: give it, --set api_key=VALUE"
    again = ["--set", f"api_key={SECRET}"]
    for words in (
        ["evaluate", str(run)],
        ["predict", str(run)],
        ["train", "--resume", str(run), "--epochs", "2"],
    ):
        assert refused(words, capsys) == f"lockstep: {asks}"
        assert main([*words, *again]) == 0
    assert json.loads((run / "config.json").read_text())["set"]["api_key"] == "***"
    with pytest.raises(FolderError, match="api_key looks like a secret"):
        lockstep.evaluate(run)
    assert "loss" in lockstep.evaluate(run, job_parameters={"api_key": SECRET})


# ---- links ---------------------------------------------------------------------------------------


def test_a_run_folder_is_private(own: Path) -> None:
    assert stat.S_IMODE((own / "run").stat().st_mode) == 0o700


def test_no_link_is_followed_where_a_file_is_written(own: Path) -> None:
    victim = own / "victim"
    victim.write_text("untouched\n")
    run = own / "run"
    names = (
        "config.json",
        "metrics.jsonl",
        "model.safetensors",
        "best.safetensors",
        "summary.json",
    )
    planted = [run / f".{name}.part" for name in names] + [run / ".lock", run / "summary.json"]
    for path in planted:
        path.unlink(missing_ok=True)
        path.symlink_to(victim)
    (run / "summary.json").unlink()
    (run / "failure.json").symlink_to(victim)
    assert main(["train", "--resume", "run", "--epochs", "3"]) == 0
    assert len(Run.open(run).history) == 3 and Run.open(run).summary["epochs"] == 3
    assert main(["evaluate", "run"]) == 0
    (run / "report.html").symlink_to(victim)
    assert write_page(run).stat().st_size > 1000 and not (run / "report.html").is_symlink()
    folder = RunFolder(run)
    (run / "config.json").unlink()
    (run / "config.json").symlink_to(victim)
    folder.write_json(folder.config, {"job": "x"})
    assert not (run / "config.json").is_symlink() and not list(run.glob(".*.part"))
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(own / "new")
    folder.keep_metrics(0, None)
    folder.add_metrics({"step": 1})
    assert folder.read_metrics() == [{"step": 1}] and not (own / "new").exists()
    (run / "ranks").mkdir(exist_ok=True)
    (run / "ranks" / "1.log").unlink(missing_ok=True)
    (run / "ranks" / "1.log").symlink_to(victim)
    with pytest.raises(FolderError, match="can't be written"):
        _log(str(run), 1)
    assert victim.read_text() == "untouched\n"


# ---- odd folders ---------------------------------------------------------------------------------

ODD: dict[str, Callable[[Path], Any]] = {
    "list": lambda file: file.write_text("[1, 2]"),
    "text": lambda file: file.write_text('"x"'),
    "null": lambda file: file.write_text("null"),
    "empty": lambda file: file.write_text(""),
    "cut": lambda file: file.write_text(file.read_text()[:200]),
    "binary": lambda file: file.write_bytes(bytes(range(256))),
    "deep": lambda file: file.write_text(100_000 * "["),
    "gone": lambda file: file.unlink(),
    "folder": lambda file: (file.unlink(), file.mkdir()),
    "loop": lambda file: (file.unlink(), file.symlink_to(file)),
}


@pytest.mark.parametrize("how", ODD)
def test_a_config_that_is_none_ends_in_one_line(
    how: str, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ODD[how](own / "run" / "config.json")
    for words in (*COMMANDS.values(), ["train", "own.py", "--resume", "run"], ["report", "run"]):
        assert "run" in refused(words, capsys)
    for call in (lockstep.evaluate, lockstep.predict, job_of, write_page):
        with pytest.raises(FolderError):
            call("run")


@pytest.mark.slow
def test_a_config_that_lacks_something_ends_in_one_line(own: Path, capsys) -> None:
    file = own / "run" / "config.json"
    whole = json.loads(file.read_text())
    changes: list[tuple[str, dict[str, Any]]] = [
        (key, {k: v for k, v in whole.items() if k != key}) for key in whole
    ]
    refusals = 0
    for key, changed in changes:
        for name, words in COMMANDS.items():
            file.write_text(json.dumps(changed))
            # To be refused for no other reason than the config: nothing is left of what was
            # trained.
            step = name == "resume" and (own / "run" / "checkpoints").rename(own / "aside")
            try:
                code = main([*words, *MORE[name]])
            finally:
                if step:
                    (own / "aside").rename(own / "run" / "checkpoints")
            out, err = capsys.readouterr()
            assert code == 2 or (code == 0 and name != "resume"), (key, changed.get(key), name, err)
            assert "Traceback" not in out + err
            lines = [line for line in err.splitlines() if not line.startswith("note: ")]
            assert len(lines) == (code == 2), err
            refusals += code == 2 and f"without {key}: it is damaged" in err
            if code == 2 and name == "evaluate":
                with pytest.raises((FolderError, JobError)):
                    lockstep.evaluate("run")
    assert refusals > 20


def test_a_summary_that_is_no_object_is_refused(own: Path) -> None:
    for text in ("[]", "3", "{", ""):
        (own / "run" / "summary.json").write_text(text)
        with pytest.raises(FolderError, match=r"summary\.json"):
            Run.open("run")


def test_a_cut_line_of_the_metrics_is_left_out(own: Path, capsys) -> None:
    file = own / "run" / "metrics.jsonl"
    whole = file.read_text()
    file.write_text(whole + whole[:30])
    assert main(["train", "--resume", "run", "--epochs", "2"]) == 0
    assert [record["epoch"] for record in Run.open("run").history] == [1, 2] and not notes(capsys)
    for broken in ("nonsense", "3", '{"epoch": 1}', '{"step": "x"}', "\udcff", 100_000 * "["):
        file.write_bytes((broken + "\n" + whole).encode(errors="surrogateescape"))
        assert [record["epoch"] for record in Run.open("run").history] == [1]


def test_what_is_no_folder_of_a_run_ends_in_one_line(own: Path, capsys) -> None:
    (own / "file").write_text("x")
    (own / "empty").mkdir()
    shutil.copytree(own / "run", own / "closed")
    (own / "closed").chmod(0)
    for path in ("file", "empty", "nowhere", "file/run", 300 * "a", "nul\0nul"):
        for words in (["evaluate", path], ["predict", path], ["train", "--resume", path]):
            refused(words, capsys)
        with pytest.raises(InputError):
            lockstep.evaluate(path)
        for call in (lockstep.predict, Run.open, job_of):
            with pytest.raises(FolderError):
                call(path)
    own.chmod(0o755)
    child = os.fork()
    if not child:  # as somebody who may not read it
        code = 1
        try:
            if os.getuid() == 0:
                os.setuid(65534)
            lines = [
                refused([*words, "closed"], capsys)
                for words in (["evaluate"], ["predict"], ["train", "--resume"])
            ]
            code = (
                0 if all("no run is kept there (it can't be read)" in line for line in lines) else 3
            )
        finally:
            sys.stdout.flush()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    (own / "closed").chmod(0o700)
