"""The site as a whole builds, and its generated pages are current. `make lint` checks its prose."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import check_words
import pytest
import yaml

from tapscope.cli import VERBS
from tapscope.core import errors
from tapscope.engine import EngineConfig, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def generator() -> Iterator[ModuleType]:
    """Load docs/_generate.py, whose folder is then on the path as in a call from the command line."""
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "_generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        spec.loader.exec_module(module)
        yield module


def test_generated_pages_are_current(generator: ModuleType) -> None:
    stale = [name for name, text in generator.pages().items() if (DOCS / name).read_text() != text]
    assert stale == [], "run: python docs/_generate.py"


def test_generated_pages_have_every_verb_setting_and_route(generator: ModuleType) -> None:
    pages = generator.pages()
    assert [verb for verb in VERBS if f"\n## tapscope {verb}\n" not in pages["reference/cli.md"]] == []
    for cls in (EngineConfig, SamplingParams):
        names = [name for name, *_ in generator._settings(cls)]
        assert len(names) > 20
        assert [name for name in names if f"| `{name}` |" not in pages["reference/configuration.md"]] == []
    for route in ("POST /generate", "POST /v1/messages", "POST /dumper/configure", "GET /metrics"):
        assert f"\n### {route}\n" in pages["reference/http.md"]


def test_every_setting_has_type_default_and_description(generator: ModuleType) -> None:
    for cls in (EngineConfig, SamplingParams):
        for name, kind, default, meaning in generator._settings(cls):
            assert kind, name
            assert default, name
            assert meaning, name


def test_site_builds_without_warnings_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [page.read_text() for page in (tmp_path / "site").rglob("*.html")]
    assert len(pages) > 30
    loaded = {
        url for page in pages for url in re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="(https?://[^"]+)', page)
    }
    assert loaded == set()


def test_troubleshooting_has_a_row_for_every_error() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| `(\w+Error)` \|", page, re.MULTILINE)
    classes = [each.__name__ for each in vars(errors).values() if isinstance(each, type)]
    assert sorted(rows) == sorted(name for name in classes if name != "TapscopeError")


def test_options_that_pages_name_exist(generator: ModuleType) -> None:
    known = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", generator.pages()["reference/cli.md"])) | {
        "--help",
        "--version",
        "--env",
    }
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        if page.parent.name == "reference" or page.name == "findings.md":
            continue
        commands = re.findall(r"^\$? ?tapscope [^\n]*(?:\\\n[^\n]*)*", page.read_text(), re.MULTILINE)
        named = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", "\n".join(commands)))
        assert named - known == set(), page.name


def test_glossary_defines_the_words_of_the_code() -> None:
    terms = set(re.findall(r"^\| \*\*([\w ]+)\*\* \|", (DOCS / "explanation/glossary.md").read_text(), re.MULTILINE))
    words = "run site tap step microbatch pass rank layer occurrence key visit record stats digest dims metric ledger"
    assert {*words.split(), "baseline", "target", "finding", "verdict"} - terms == set()


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", yaml.safe_dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])))
    assert {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} == listed


def test_check_words_finds_phrases_names_and_long_sentences(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("It is no\nrun. `texts` is code.\n\n```text\nanew\n```\n\n" + "word " * 36 + ".\n")
    found = [(each.line, each.text) for each in check_words.problems(page)]
    assert [line for line, _ in found] == [1, 8]
    code = tmp_path / "code.py"
    code.write_text('def f(obeys):\n    """Begin anew."""\n    return "a text"  # a whole number\n')
    assert [each.line for each in check_words.problems(code)] == [1, 2, 3, 3]
    assert "integer" in check_words.problems(code)[-1].text + check_words.problems(code)[-2].text
