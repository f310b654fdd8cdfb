"""Pages of docs/: their blocks, run as they stand there, and what they print held against what the
page shows.

    ```console                        commands after "$ ", each with what it prints below it
    ```python  then  ```output        code, and what it prints

A comment before a block says how a test runs it; readers don't see it::

    <!-- test: slow; shape; add --seconds 0.1; file small.py; exit 3; elsewhere; pictures NAME -->

slow: not among the fast tests. shape: numbers follow the machine, so lines are compared with their
    numbers left out.
add: further words for the block's first command. file: the code is written to that file, not run.
    exit: the code that
the last command ends with. elsewhere: it needs what no test has (other machines).

`make pages` writes anew what the blocks of some pages print. A block with `pictures NAME` is a
comparison that is to be measured on a machine that does nothing else: `make pictures` runs these,
and keeps their charts in docs/pictures/.
"""

from __future__ import annotations

import contextlib
import glob
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

from lockstep.cli import command as cli
from lockstep.strategies import STRATEGIES

ROOT = Path(__file__).parents[1]

_BLOCK = re.compile(
    r"^(?P<margin> *)(?:<!-- test: (?P<said>[^\n]*?) -->\n *)?```(?P<language>\w*)\n"
    r"(?P<text>.*?)^(?P=margin)```$",
    re.DOTALL | re.MULTILINE,
)


_DAY = re.compile(r"\d{8}-\d{6}(-\d+)?")
"""The time in the name of a run's folder."""
_WORDS = {"slow", "shape", "add", "file", "exit", "elsewhere", "pictures"}


@dataclass(frozen=True)
class Block:
    """A block of a page.

    Attributes:
        language: ``python``, ``console``, ``output``, or "".
        text: what is in it.
        heading: what it stands under.
        said: how a test runs it.
        span: where its text lies in the page.
    """

    language: str
    text: str
    heading: str
    said: dict[str, str]
    span: tuple[int, int]

    @property
    def is_part(self) -> bool:
        """Whether it is a part of a script: a test of its own gives it the names that it needs."""
        return self.language == "python" and not self.text.startswith(("import ", "from "))

    @property
    def commands(self) -> list[tuple[str, list[str]]]:
        """Of a console: each command, and the lines that it prints."""
        found: list[tuple[str, list[str]]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif found[-1][0].endswith("\\"):
                found[-1] = found[-1][0][:-1].rstrip() + " " + line.strip(), []
            else:
                found[-1][1].append(line)
        return found


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        words = [word.strip() for word in (match["said"] or "").split(";") if word.strip()]
        said = {word.partition(" ")[0]: word.partition(" ")[2] for word in words}
        unknown = set(said) - _WORDS
        assert not unknown, f"{page.name}: a test can't {unknown}"
        heading = re.findall(r"^##+ (.*)$", text[: match.start()], re.MULTILINE)
        found.append(
            Block(
                match["language"],
                textwrap.dedent(match["text"]),
                (heading or [""])[-1],
                said,
                match.span("text"),
            )
        )
    return found


@dataclass(frozen=True)
class Piece:
    """Something to run, and what the page says that it prints.

    Attributes:
        heading: where it stands.
        before: files that are to be there, by name.
        block: the code or the commands.
        output: the block below a code that shows what it prints.
    """

    heading: str
    before: dict[str, str]
    block: Block
    output: Block | None = None

    @property
    def shown(self) -> list[str]:
        """All that the page shows as printed."""
        if self.output is not None:
            return self.output.text.splitlines()
        if self.block.language == "python":
            return []
        return [line for _, lines in self.block.commands for line in lines]


def pieces(page: Path, languages: tuple[str, ...] = ("python", "console")) -> list[Piece]:
    """All that can be run of a page, but for what needs more than a test has."""
    every = blocks(page)
    found, files = [], dict[str, str]()
    for block, after in zip(every, [*every[1:], None], strict=False):
        if "file" in block.said:
            files[block.said["file"]] = block.text
        elif block.language in languages and "elsewhere" not in block.said:
            output = (
                after
                if block.language == "python" and after is not None and after.language == "output"
                else None
            )
            found.append(Piece(block.heading, dict(files), block, output))
    return found


def printed(piece: Piece, *, small: bool = True) -> list[list[str]]:
    """What it prints, in the present folder: of each of its commands, or of its code, the lines.

    Args:
        piece: what to run.
        small: with the further words that make it quick.
    """
    for name, text in piece.before.items():
        Path(name).write_text(text)
    if not Path("examples").exists():
        Path("examples").symlink_to(ROOT / "examples")
    if piece.block.language == "python":
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(piece.block.text, piece.heading, "exec"), {"__name__": "__main__"})
        return [_lines(out.getvalue())]
    found = []
    commands = piece.block.commands
    for i, (command, _) in enumerate(commands):
        more = piece.block.said.get("add", "") if small and i == 0 else ""
        code, text = _called([*_words(command), *shlex.split(more)])
        wanted = int(piece.block.said.get("exit", 0)) if i == len(commands) - 1 else 0
        assert code == wanted, f"{command}: ended with {code}\n{text}"
        found.append(_lines(text))
    return found


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _words(command: str) -> list[str]:
    """As a shell would, but that runs/digits-ddp-20261123-161932 is the like folder that is there."""
    return [
        found
        for word in shlex.split(command, comments=True)
        for found in (glob.glob(_DAY.sub("*", word)) or [word])
    ]


def _called(words: list[str]) -> tuple[int, str]:
    """Call a command; Lockstep's own in this process, which has torch already."""
    if words[0] == "lockstep":
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = cli.main(words[1:])
        return code, out.getvalue()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    surroundings = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, env=surroundings, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr


# ---- held against the page -----------------------------------------------------------------------

_VARIES = (
    (re.compile(r"\d[\d,.]* (samples/s|ms|s|us)\b"), "# s"),  # rates and times
    (re.compile(r"\b\d+:\d\d\b"), "# s"),
    (_DAY, "#"),
    (re.compile(r"\bof [\d.]+ [MG]iB"), "of # B"),  # what a device has
)
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")
_PROGRESS = re.compile(r"epoch\s+\d+(/\d+)?\s+step \d")
"""A line that a slow machine prints after ten seconds."""
_OPINIONS = ("Take ", "The turns of ")
"""How a comparison's paragraphs begin that follow from its numbers."""


def difference(shown: list[str], was_printed: list[str], *, shape: bool = False) -> str:
    """Where what was printed isn't what is shown; "" where it is.

    Words and whole numbers must be the same; other numbers to one in fifty: another processor adds
    in another order, and the training goes on from there. Times, rates and dates are left out, and
    with ``shape`` all numbers, bars, where lines end, and what is concluded from numbers. A line
    "..." stands for any lines.
    """
    wanted, got = (_prepared(lines, shape) for lines in (shown, was_printed))
    if shape:  # word by word: where a line ends follows from how long its numbers are
        wanted, got = (
            [word for line in lines for word in line.split(" ")] for lines in (wanted, got)
        )
    parts: list[list[str]] = [[]]
    for line in wanted:
        if line == "...":
            parts.append([])
        else:
            parts[-1].append(line)
    place = 0
    for i, part in enumerate(parts):
        last = len(got) - len(part)
        starts = (
            [place]
            if i == 0
            else [last]
            if i == len(parts) - 1 and part
            else range(place, last + 1)
        )
        every = [
            _first_apart(part, got[start : start + len(part)]) if start >= place else 0
            for start in starts
        ]
        if None not in every:
            apart = max((one for one in every if one is not None), default=0)
            said = " ".join(part[max(0, apart - 5) : apart + 1]) if shape else part[apart]
            return f'"{said}" was not printed; what was:\n' + "\n".join(was_printed)
        place = starts[every.index(None)] + len(part)
    if len(parts) == 1 and place != len(got):
        return "more was printed than is shown:\n" + "\n".join(was_printed)
    return ""


def _prepared(lines: list[str], shape: bool) -> list[str]:
    found, skips = [], False
    for line in lines:
        skips = shape and bool(line.strip()) and (skips or line.startswith(_OPINIONS))
        if skips or _PROGRESS.match(line) or (shape and not line.strip()):
            continue
        for varying, word in _VARIES:
            line = varying.sub(word, line)
        line = re.sub(r"[\s█▏▎▍▌▋▊▉─]+" if shape else r"\s+", " ", line).strip()
        if shape:
            # "391 MiB" and "1.2 GiB", "1 core" and "2 cores": units follow the machine too.
            line = re.sub(r"\b[KMG]iB\b", "B", re.sub(r"\bcores\b", "core", _NUMBER.sub("#", line)))
        found.append(line)
    return found


def _first_apart(wanted: list[str], got: list[str]) -> int | None:
    for i, line in enumerate(wanted):
        if i >= len(got) or not _alike(line, got[i]):
            return i
    return None


def _alike(a: str, b: str) -> bool:
    numbers = zip(_NUMBER.findall(a), _NUMBER.findall(b), strict=False)
    return _NUMBER.sub("#", a) == _NUMBER.sub("#", b) and all(_near(x, y) for x, y in numbers)


def _near(a: str, b: str) -> bool:
    if a.isdigit() and b.isdigit():
        return a == b
    x, y = (float(word.replace(",", "")) for word in (a, b))
    return abs(x - y) <= max(5e-4, 0.02 * abs(x))


# ---- written anew --------------------------------------------------------------------------------


def rewrite(page: Path, *, pictures: bool) -> None:
    """Run what can be run of a page, as it stands, and write what it prints into the page.

    Args:
        page: the page.
        pictures: those blocks that have pictures, or all the others.
    """
    (ROOT / "docs" / "pictures").mkdir(exist_ok=True)
    moved = 0  # by how much longer the page has become so far
    os.environ["COLUMNS"] = "80"
    for piece in pieces(page, ("console",) if pictures else ("python", "console")):
        name = piece.block.said.get("pictures")
        if (name is not None) is not pictures:
            continue
        if "..." in piece.shown and not piece.block.text.startswith("$ lockstep compare"):
            print(
                f"{page.name}: {piece.heading}: shows a part of what it prints; it is left as it is"
            )
            continue
        print(f"{page.name}: {piece.heading}", flush=True)
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            found = [abridged(lines) for lines in printed(piece, small=False)]
            for figure in Path().glob("runs/*/figures/*.png") if name is not None else ():
                if f"pictures/{name}-{figure.name}" in page.read_text():
                    shutil.copy(figure, ROOT / "docs" / "pictures" / f"{name}-{figure.name}")
        heads = re.findall(r"^\$ (?:.*\\\n)*.*$", piece.block.text, re.MULTILINE)
        lines = found[0]
        if piece.block.language == "console":
            lines = [line for head, out in zip(heads, found, strict=True) for line in (head, *out)]
        elif piece.output is None:
            continue
        start, end = (piece.output or piece.block).span
        text, written = page.read_text(), "\n".join([*lines, ""])
        page.write_text(text[: start + moved] + written + text[end + moved :])
        moved += len(written) - (end - start)


def abridged(lines: list[str]) -> list[str]:
    """Of a comparison its first table and its sentence; all of anything else."""
    first = next((i for i, line in enumerate(lines) if ": batches of " in line), None)
    last = next((i for i, line in enumerate(lines) if line.startswith("Take ")), None)
    if first is None or last is None:
        return lines
    table = lines.index("", lines.index("", first) + 1)
    sentence = lines.index("", last) if "" in lines[last:] else len(lines)
    return ["...", *lines[first:table], "...", "", *lines[last:sentence], "..."]


def table_of_strategies() -> list[str]:
    """The lines of the README's table."""
    rows = [f"| `{name}` | {kind.summary} | {kind.good_for} |" for name, kind in STRATEGIES.items()]
    return ["| strategy | what each device holds | good for |", "|---|---|---|", *rows]


if __name__ == "__main__":
    for word in sys.argv[1:]:
        if word != "--pictures":
            rewrite(Path(word).resolve(), pictures="--pictures" in sys.argv)
