"""House rules that no linter knows: which words stay out of tiers/, how long things get."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [p for room in ("impress", "tiers", "experiments") for p in (ROOT / room).rglob("*.py")]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "experiments/gpu_recipe.md")),
    *(ROOT / "docs").rglob("*.md"),
]


def test_media_never_hear_of_meaning() -> None:
    words = re.compile(r"\b(tokens?|prefix(es)?|layers?|importance|heads?)\b", re.IGNORECASE)
    for path in (ROOT / "tiers").glob("*.py"):
        found = words.search(path.read_text())
        assert not found, f"{path.name} says {found and found.group()!r}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") < 400, "a second room is wanted"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            n_lines = (node.end_lineno or 0) - node.lineno + 1
            assert n_lines <= 70, f"{node.name} has {n_lines} lines"


def test_every_package_of_the_wheel_says_that_it_is_typed() -> None:
    """Without the marker, a type checker takes all of an installed package for Any."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for name in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        assert (ROOT / name / "py.typed").is_file()


def test_what_the_documents_name_is_there_for_a_type_checker_too() -> None:
    """`impress.engines.hf.Virtual` was an error under mypy --strict: hf only imported it."""
    said = "\n".join(p.read_text() for p in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    named = set(re.findall(r"\b(impress(?:\.[a-z_]+)+)\.([A-Z]\w+)", said))
    assert ("impress.engines.hf", "Virtual") in named
    for module, name in sorted(named):
        tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text())
        defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        given_on = [alias.asname for node in imports for alias in node.names]
        assert name in [*defined, *given_on], f"{module} does not export {name}"


def anchors(page: Path) -> set[str]:
    """Anchors that links to the page's headings may end in: lower case, hyphens, no punctuation."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_a_document_points_to_is_there(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
    for name in re.findall(r"`([\w.]+/[\w./]*\.(?:py|md))`", text):
        rooms = (ROOT, ROOT / "impress", page.parent)
        assert any((room / name).is_file() for room in rooms), name
    for module in re.findall(r"python3? -m ((?:experiments|tests)[\w.]*\w)", text):
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), module


def test_the_index_of_decisions_lists_them_all_in_order() -> None:
    """It ended before the last one."""
    folder = ROOT / "docs/decisions"
    listed = re.findall(r"^- \[.*\]\((\d{4}-[^)]+)\)$", (folder / "README.md").read_text(), re.M)
    assert listed == sorted(page.name for page in folder.glob("0*.md"))
