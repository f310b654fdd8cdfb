"""The site of docs/: each page is in the navigation, each public name in the reference, each family
of errors in the index.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lockstep
from docs_pages import ROOT, blocks
from lockstep import errors
from lockstep.strategies import STRATEGIES

DOCS = ROOT / "docs"
SRC = Path(lockstep.__file__).parent
CONFIG = (ROOT / "mkdocs.yml").read_text()
MODULES = ("callbacks", "parallel", "strategies")


# ---- pages ---------------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation() -> None:
    navigation = CONFIG.partition("\nnav:")[2].partition("\n\n")[0]
    named = re.findall(r"([\w/-]+\.md)$", navigation, re.MULTILINE)
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    outside = {name for name in named if (ROOT / name).exists()} | {"index.md"}
    assert sorted(pages - set(named)) == []
    assert sorted(set(named) - pages - outside) == []
    assert len(named) == len(set(named))


def test_the_pages_have_25_000_words_at_most() -> None:
    """What is written twice is cut before anything is added."""
    words = {path: len(path.read_text().split()) for path in DOCS.rglob("*.md")}
    assert sum(words.values()) <= 25_000, max(words, key=lambda path: words[path])


def test_a_blank_line_is_above_each_list() -> None:
    """Without it the site shows one paragraph."""
    above = re.compile(r"^(?![ >]|- |\d+\. |```)\S.*\n(?=- |1\. )", re.MULTILINE)
    for path in (*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md")):
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        assert above.findall(text) == [], path.name


def test_every_strategy_has_a_page_with_a_picture_its_costs_and_a_measurement() -> None:
    for name in (*STRATEGIES, "products"):
        page = DOCS / "strategies" / f"{name}.md"
        text = page.read_text()
        languages = [block.language for block in blocks(page)]
        assert "" in languages and {"python", "console"} & set(languages), name
        for words in ("**What moves**", "**Costs**", "**Take it**", "**Don't**"):
            assert words in text, f"{name}: {words}"
        assert "## Measured" in text or name == "single", name


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None
    or importlib.util.find_spec("mkdocstrings_handlers") is None,
    reason="mkdocs-material and mkdocstrings aren't installed (the extra docs)",
)
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    job = (tmp_path / "reference" / "job.html").read_text()
    assert all(field.name in job for field in dataclasses.fields(lockstep.Job))
    fetched = [
        page.name
        for page in tmp_path.rglob("*.html")
        if re.search(r'<(?:script|link|img)[^>]*(?:src|href)="https?://', page.read_text())
    ]
    assert fetched == []


# ---- reference -----------------------------------------------------------------------------------


def test_every_public_name_is_in_the_reference() -> None:
    pages = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: ([\w.]+)$|heading: ([\w.]+)", pages, re.MULTILINE))
    named = {name for pair in shown for name in pair}
    aside = {"__version__", "LockstepError", "callbacks", "parallel", "callbacks.Callback"}
    wanted = [*lockstep.__all__]
    for module in MODULES:
        wanted += [f"{module}.{name}" for name in getattr(lockstep, module).__all__]
    assert [name for name in wanted if f"lockstep.{name}" not in named and name not in aside] == []


def public_classes() -> Iterator[tuple[str, type]]:
    for home in (lockstep, *(getattr(lockstep, name) for name in MODULES)):
        for name in home.__all__:
            thing = getattr(home, name)
            if inspect.isclass(thing):
                yield name, thing


@pytest.mark.parametrize(("name", "kind"), list(public_classes()))
def test_a_docstring_describes_every_field(name: str, kind: Any) -> None:
    if not dataclasses.is_dataclass(kind):
        pytest.skip("not a dataclass")
    texts = [base.__doc__ or "" for base in kind.__mro__ if base.__module__.startswith("lockstep")]
    described = set(re.findall(r"^ {4,8}([\w, ]+): ", "\n".join(texts), re.MULTILINE))
    described = {name for names in described for name in names.split(", ")}
    fields = {field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")}
    assert sorted(fields - described) == []


# ---- errors --------------------------------------------------------------------------------------

ANY = "\0"
"""What stands for a value in the words of a message."""


def words_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(words_of(value) for value in node.values)
    return ANY


@functools.cache
def strings_and_messages() -> tuple[set[str], list[tuple[type[Exception], str]]]:
    """All texts of the package but docstrings, and its errors: class and words of each."""
    strings, found = set(), []
    for path in SRC.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant | ast.JoinedStr):
                strings.add(words_of(node))
            if isinstance(node, ast.Call) and node.args:
                called = node.func
                name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
                kind = getattr(errors, name, None)
                if inspect.isclass(kind) and issubclass(kind, errors.LockstepError):
                    found.append((kind, words_of(node.args[0])))
    return {text for text in strings if len(text) < 500}, found


def family(words: str) -> str:
    """What a message begins with: a field, a setting or a strategy before a colon."""
    match = re.match(r"([a-z_]+(?: [a-z]+)?): ", words)
    return match[1] if match else ""


@functools.cache
def entries() -> dict[str, list[str]]:
    """The first words of messages that the index lists, and what is fixed in them."""
    found = {}
    page = (DOCS / "errors.md").read_text().replace("\n  ", " ")
    for line in re.findall(r"^- (.*)$", page, re.MULTILINE):
        head = re.match(r"(?:`[^`]+`(?: \([^)]*\))?(?:, )?)+(?=: )", line)
        assert head, f"{line}: an entry is the first words of messages, and a colon"
        for words in re.findall(r"`([^`]+)`", re.sub(r" \(`[^)]*\)", "", head[0])):
            found[words] = re.split(r"\s*(?:\.\.\.|\b[A-Z][A-Z_]+\b)\s*", words)
    return found


def has(text: str, parts: list[str], start: int = 0) -> bool:
    """Whether a text has some parts, in order."""
    for part in parts:
        start = text.find(part, start)
        if start < 0:
            return False
        start += len(part)
    return True


def is_listed(message: str) -> bool:
    return any(message.startswith(parts[0]) and has(message, parts) for parts in entries().values())


def test_the_index_of_errors_has_each_class_each_family_and_each_failure_of_a_run() -> None:
    """A family is the messages with one field, setting or strategy before a colon."""
    page, by_family = (DOCS / "errors.md").read_text(), dict[str, list[str]]()
    for kind, message in strings_and_messages()[1]:
        assert f"`{kind.__name__}`" in page, kind.__name__
        by_family.setdefault(family(message), []).append(message)
        if issubclass(kind, errors.RunError) and len(re.findall("[a-z]+", message)) > 1:
            assert is_listed(message), message
    for name, its in by_family.items():
        if name and len(its) > 1:
            assert any(map(is_listed, its)), f"{name}: {its}"


def test_the_index_of_errors_lists_only_what_the_package_reports() -> None:
    strings, _ = strings_and_messages()
    known = entries().items()
    assert [words for words, parts in known if not any(has(s, parts) for s in strings)] == []
