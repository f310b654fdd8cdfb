"""The site has the README as its first page, and a page for each file that a page links to.

The pages of docs/ link to examples, benchmarks and the README by relative paths, as GitHub wants
them. Such a file becomes a page of the site (code in one block), and the link leads to that page.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
HOME = {"README.md": "index.md"}

_LINK = re.compile(r"\]\((?P<path>[\w./-]+)(?P<anchor>#[\w-]*)?\)")
_LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".json": "json"}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the files outside of docs/ that pages link to, and theirs."""
    from mkdocs.structure.files import File, InclusionLevel

    todo = [*DOCS.rglob("*.md"), ROOT / "README.md"]
    known = set(todo)
    while todo:
        path = todo.pop()
        found = targets(path) - known
        known |= found
        todo += found
        if DOCS not in path.parents:
            in_nav = InclusionLevel.INCLUDED if path.suffix == ".md" else InclusionLevel.NOT_IN_NAV
            page = File.generated(config, uri(path), content=content(path), inclusion=in_nav)
            files.append(page)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point each link to the page that its file has in the site."""
    source = origin(page.file.src_uri)
    if source.is_file() and source.suffix != ".md":
        return markdown

    def there(match: re.Match[str]) -> str:
        target = linked(source, match["path"])
        if target is None:
            return match[0]
        path = os.path.relpath(uri(target), os.path.dirname(page.file.src_uri))
        return f"]({path}{match['anchor'] or ''})"

    return _LINK.sub(there, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """In docstrings, ``::`` announces a block of code."""
    return html.replace("::</p>", ":</p>") if page.url.startswith("reference/") else html


def targets(path: Path) -> set[Path]:
    """Return the files and folders that a page links to; of a folder, its files."""
    if path.is_dir():
        return {one for one in path.iterdir() if one.is_file()}
    if path.suffix != ".md":
        return set()
    found = {linked(path, match["path"]) for match in _LINK.finditer(path.read_text())}
    return {one for one in found if one is not None}


def linked(page: Path, path: str) -> Path | None:
    """Return the file or folder of the project that a page links to, if there is one."""
    target = Path(os.path.normpath(page.parent / path))
    if not target.exists() or not target.is_relative_to(ROOT):
        return None
    readme = target / "README.md"
    return readme if readme.exists() else target


def uri(path: Path) -> str:
    """Return the place of a file's page in the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return HOME.get(name, name if path.suffix == ".md" else f"{name}.md")


def origin(uri: str) -> Path:
    """Return the file of the project that a page was made of."""
    if uri == "index.md":
        return ROOT / "README.md"
    if (DOCS / uri).exists():
        return DOCS / uri
    path = ROOT / uri
    return path if path.exists() else path.with_suffix("")


def content(path: Path) -> str:
    """Return the page of a file outside of docs/."""
    if path.suffix == ".md":
        return path.read_text()
    title = f"---\nsearch:\n  exclude: true\n---\n\n# {path.relative_to(ROOT)}\n\n"
    if path.is_dir():
        names = sorted(one.name for one in path.iterdir() if one.is_file())
        return title + "\n".join(f"- [{name}]({path.name}/{name})" for name in names)
    language = _LANGUAGES.get(path.suffix, "text")
    return f"{title}````{language}\n{path.read_text()}````\n"
