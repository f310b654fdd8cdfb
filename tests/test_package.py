"""What is released: the version by git's tags, and the wheel and the sdist in empty environments
without extras. ``make package`` runs all of it, and keeps both files in ``dist``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import lockstep
import versions
from lockstep.version import UNTAGGED

ROOT = Path(__file__).parents[1]

JOB = """
import lockstep, torch
from torch import nn
from torch.utils.data import TensorDataset

def data(seed):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(40, 6, generator=generator), torch.randint(3, (40,), generator=generator))

def job(lr: float = 0.1):
    return lockstep.Job(
        model=lambda: nn.Linear(6, 3), loss=nn.CrossEntropyLoss(), train_data=data(1), eval_data=data(2),
        optimizer=lambda params: torch.optim.SGD(params, lr=lr, momentum=0.9), batch_size=8, epochs=2,
    )
"""

QUICK = ("tests/test_job.py", "tests/test_public_face.py", "tests/strategies/test_parity.py")


def called(*command: str | Path, folder: Path) -> str:
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    words = [str(word) for word in command]
    out = subprocess.run(words, cwd=folder, env=own, capture_output=True, text=True, check=False)
    assert out.returncode == 0, f"{' '.join(words)}\n{out.stdout}\n{out.stderr}"
    return out.stdout


def environment(folder: Path, *packages: str | Path) -> Path:
    """The programs of a new environment with these packages."""
    called(sys.executable, "-m", "venv", folder, folder=folder.parent)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
    called(*pip, "--constraint", ROOT / "constraints.txt", *packages, folder=folder)
    return folder / "bin"


# ---- the version ---------------------------------------------------------------------------------


def built_version(root: Path) -> str:
    spec = importlib.util.spec_from_file_location("version_by_tags", ROOT / "version.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: str = module.version(root)
    return found


def test_the_version_is_that_of_the_newest_tag(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "tag.gpgsign=false")
        called("git", *who, *words, folder=tmp_path)

    assert built_version(tmp_path) == UNTAGGED
    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "-m", "First")
    git("tag", "unrelated")
    git("tag", "v0.3.0rc1")
    assert built_version(tmp_path) == UNTAGGED
    git("tag", "v0.3.0")
    assert built_version(tmp_path) == "0.3.0"
    git("commit", "--quiet", "--allow-empty", "-m", "Second")
    assert re.fullmatch(r"0\.3\.1\.dev1\+g[0-9a-f]{7,}", built_version(tmp_path))


def test_a_folder_within_a_repository_of_something_else_has_no_tag(tmp_path: Path) -> None:
    folder = tmp_path / "unpacked"
    folder.mkdir()
    called("git", "init", "--quiet", folder=tmp_path)
    assert built_version(folder) == UNTAGGED


def test_the_changelog_and_the_citation_name_the_next_version() -> None:
    next_version = UNTAGGED.removesuffix(".dev0")
    assert f"\nversion: {next_version}\n" in (ROOT / "CITATION.cff").read_text()
    heading = re.search(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading is not None and heading[1].split()[0] == next_version


def test_the_command_prints_the_versions_in_one_line() -> None:
    line = called(sys.executable, "-m", "lockstep", "--version", folder=ROOT / "src")
    assert re.fullmatch(r"lockstep \d\S+, torch \d\S+, Python \d\S+\n", line)


def test_looking_for_the_version_takes_no_time_at_import() -> None:
    code = "import lockstep.cli.command, sys; sys.exit('importlib.metadata' in sys.modules)"
    called(sys.executable, "-c", code, folder=ROOT / "src")
    assert lockstep.__version__


# ---- the versions of others ----------------------------------------------------------------------


def test_the_versions_that_are_promised_are_those_that_are_tested() -> None:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    assert (tuple(matrix["python"]), tuple(matrix["torch"])) == (versions.PYTHONS, versions.TORCHES)

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={versions.PYTHONS[0]}"
    assert f"torch>={versions.TORCHES[0]}" in project["dependencies"]
    for python in versions.PYTHONS:
        assert f"Programming Language :: Python :: {python}" in project["classifiers"]
    install = " ".join((ROOT / "docs" / "install.md").read_text().split())
    for first, *_, last in (versions.PYTHONS, versions.TORCHES):
        assert f"{first} to {last}" in install


# ---- the wheel and the sdist ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist, and the wheel that is built from the sdist."""
    folder = Path(os.environ.get("DIST", tmp_path_factory.mktemp("dist")))
    try:
        programs = environment(tmp_path_factory.mktemp("builder"), "build")
    except AssertionError as error:
        if "Could not find a version" in str(error) or "No matching distribution" in str(error):
            pytest.skip("no package index is here to build with")
        raise
    called(programs / "python", "-m", "build", "--outdir", folder, ROOT, folder=folder.parent)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_has_the_package_and_the_sdist_the_project(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    (sdist,) = built.glob("*.tar.gz")
    version = built_version(ROOT)
    assert wheel.name.startswith(f"torch_lockstep-{version}-py3-none-any")
    assert sdist.name == f"torch_lockstep-{version}.tar.gz"

    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "lockstep",
        f"torch_lockstep-{version}.dist-info",
    }
    assert "lockstep/py.typed" in names
    assert f"torch_lockstep-{version}.dist-info/licenses/LICENSE" in names

    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    if (ROOT / ".git").exists():
        tracked = called("git", "ls-files", folder=ROOT).splitlines()
        missing = {name for name in tracked if (ROOT / name).exists()} - packed
        assert {name.split("/")[0] for name in missing} <= {".ci"}
        assert packed - set(tracked) == {"PKG-INFO"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_plain_install_trains_evaluates_predicts_and_resumes(built: Path, tmp_path: Path) -> None:
    """What the wheel requires is all that it needs. (safetensors once wanted numpy to save.)"""
    (wheel,) = built.glob("*.whl")
    programs = environment(tmp_path / "environment", wheel)
    extras = (
        "import importlib.util as u; print([n for n in ('sklearn', 'matplotlib', 'psutil') "
        "if u.find_spec(n)])"
    )
    assert called(programs / "python", "-c", extras, folder=tmp_path).strip() == "[]"

    (tmp_path / "job.py").write_text(JOB)
    lockstep = programs / "lockstep"
    version = wheel.name.split("-")[1]
    line = called(lockstep, "--version", folder=tmp_path)
    assert line.startswith(f"lockstep {version}, torch ")
    assert line.strip() in called(lockstep, "doctor", folder=tmp_path)
    out = called(
        lockstep, "train", "job.py", "--strategy", "ddp", "--devices", "2xcpu", folder=tmp_path
    )
    run = out.splitlines()[-1].removeprefix("run: ")
    assert f'"lockstep": "{version}"' in (tmp_path / run / "summary.json").read_text()
    assert "loss" in called(lockstep, "evaluate", run, folder=tmp_path)
    assert "predictions" in called(lockstep, "predict", run, folder=tmp_path)
    assert "resuming after epoch 2" in called(
        lockstep, "train", "--resume", run, "--epochs", "3", folder=tmp_path
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_sdist_installs_and_its_tests_pass(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / sdist.name.removesuffix(".tar.gz")
    programs = environment(tmp_path / "environment", folder, *versions.NEEDED)
    version = folder.name.split("-")[1]
    line = called(programs / "lockstep", "--version", folder=tmp_path)
    assert line.startswith(f"lockstep {version}, torch ")
    called(programs / "python", "-m", "pytest", "-m", "not slow", *QUICK, folder=folder)
