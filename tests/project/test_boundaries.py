"""Project rules: imports between packages, files named in the docs, and public names."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tapscope

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("engine", "dumper", "comparator", "dashboard", "kernels")
NAMED = re.compile(rf"(?<![\w/.])(?:{'|'.join(PARTS)}|src/tapscope|tests|docs)/[\w/]+\.(?:py|md|h|cpp)\b")


def _loaded(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/")
    return {name.partition(".")[0] for name in done.stdout.split()} | set(done.stdout.split())


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import tapscope", {"numpy", "torch", "textual", "zmq", "polars"}),
        ("import tapscope.cli; tapscope.cli.main(['--help'])", {"numpy", "torch", "textual", "rich", "zmq", "polars"}),
        ("import tapscope.comparator as c; c.compare", {"torch", "zmq", "textual", "fastapi", "tapscope.dumper"}),
        ("import tapscope.comparator.report.table", {"torch", "zmq", "textual"}),
        ("import tapscope.dashboard.app", {"torch", "zmq", "tapscope.dumper", "tapscope.engine"}),
        ("import tapscope.dumper.recorder.recorder", {"torch", "numpy", "polars", "fastapi", "asyncio", "textual"}),
        ("import tapscope.dumper as d; d.Dumper", {"polars", "fastapi", "textual", "transformers", "tapscope.engine"}),
        ("import tapscope.engine as e; e.LLM", {"polars", "fastapi", "textual", "transformers", "tapscope.dumper"}),
        ("import tapscope.run_format.run", {"torch", "zmq", "rich", "textual"}),
    ],
)
def test_imports_load_only_what_they_need(code: str, forbidden: set[str]) -> None:
    assert _loaded(code) & forbidden == set()


@pytest.mark.parametrize("verb", ["diff", "info", "ls", "show", "view", "ctl"])
def test_help_of_reading_verbs_loads_no_torch(verb: str) -> None:
    assert "torch" not in _loaded(f"import tapscope.cli; tapscope.cli.main([{verb!r}, '--help'])")


def _sources() -> list[Path]:
    files = [file for part in PARTS for file in (ROOT / part).rglob("*.py")]
    packages = ("core", "expr", "http", "run_format", "sglang", "tensor_files", "render", "cli")
    return (
        files
        + list((ROOT / "src/tapscope").glob("*.py"))
        + [file for package in packages for file in (ROOT / "src/tapscope" / package).rglob("*.py")]
    )


def test_files_named_in_docs_and_comments_exist() -> None:
    places = ("*.md", "docs/**/*.md", "kernels/native/*.h", "kernels/native/*.cpp")
    files = _sources() + [file for place in places for file in ROOT.glob(place)]
    files.remove(ROOT / "CHANGELOG.md")  # names files that may no longer exist
    named = {(file.name, name) for file in files for name in NAMED.findall(file.read_text())}
    assert len(named) > 50
    assert {
        (file, name) for file, name in named if not any((ROOT / where / name).is_file() for where in (".", "tests"))
    } == set()


def test_public_names_are_listed() -> None:
    classes = ["Dumper", "DumperConfig", "LLM", "Run", "Site", "TapscopeError"]
    functions = ["compare", "dumper", "enable_cuda_coredumps", "open_run", "wait_for_ready"]
    assert sorted(tapscope.__all__) == [*classes, "__version__", *functions]
    for name in tapscope.__all__:
        assert getattr(tapscope, name) is not None


def test_install_adds_one_top_level_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["packages"]["find"]["where"] == ["src"]
    assert [entry.name for entry in (ROOT / "src").iterdir() if not entry.name.endswith(".egg-info")] == ["tapscope"]
    links = {entry.name: entry.readlink() for entry in (ROOT / "src/tapscope").iterdir() if entry.is_symlink()}
    assert links == {name: Path("../..") / name for name in ("engine", "dumper", "comparator", "dashboard", "kernels")}
