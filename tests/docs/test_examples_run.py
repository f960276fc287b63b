"""Every example in docs/ is executed in order and prints the output shown on its page."""

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from doc_pages import ROOT, examples, missing, pages, run

PAGES = [str(page.relative_to(ROOT)) for page in pages() if page.name != "findings.md"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES)
def test_page_examples_print_what_the_page_shows(tmp_path: Path, page: str) -> None:
    for example, printed in run(ROOT / page, tmp_path):
        where = f"{page}:{example.line}"
        assert "Traceback" not in printed, where
        assert missing(example.shown, printed) == [], f"{where} printed\n{printed}"


def test_pages_cover_quickstart_and_how_to_guides() -> None:
    how_to = {str(page.relative_to(ROOT)) for page in (ROOT / "docs/howto").glob("*.md")}
    needs_packages = {"docs/howto/diffusers.md"}  # every example gives a reason why it is not executed
    assert needs_packages.isdisjoint(PAGES)
    assert {"docs/quickstart.md", *how_to} <= {*PAGES, *needs_packages}


def test_example_that_is_not_run_has_a_reason() -> None:
    skipped = [each for page in (ROOT / "docs").rglob("*.md") for each in examples(page) if each.note]
    assert [each for each in skipped if not each.reason] == []


def test_missing_lines_are_reported_in_order() -> None:
    assert missing("a 1\nb\n", "a 2\nb\n") == []
    assert missing("a …\n…\nc\n", "a x y\nb\nc\n") == []
    assert missing("b\na\n", "a\nb\n") == ["a"]
    assert missing("max 1.5e-03  ok\n", "max   7e+01 ok\n") == []


def test_names_that_any_example_imports_exist() -> None:
    """Includes examples that are not executed."""
    imported = re.compile(r"^(?:>>> )?from (tapscope[\w.]*) import ([\w, ]+)$", re.MULTILINE)
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    missing_names = [
        f"{file.relative_to(ROOT)}: {module}.{name}"
        for file in files
        for module, names in imported.findall(file.read_text())
        for name in names.split(", ")
        if not hasattr(import_module(module), name.strip()) and find_spec(f"{module}.{name.strip()}") is None
    ]
    assert missing_names == []
