"""Each extra supports its commands and public names, installed alone and without a compiler.

Each environment is a real venv with a directory of links to installed packages, limited to those that the extra
declares and their dependencies.
"""

import importlib.metadata as metadata
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import make_llama
from comparator_toy import Toy, prompts, weights
from packaging.requirements import Requirement

from tapscope.core.extras import EXTRAS
from tapscope.run_format.compact import compact_run

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SENTENCE = re.compile(r"tapscope: error: [^\n]+ not installed; install the extra: pip install 'tapscope\[(\w+)\]'\n")
Python = Callable[..., "subprocess.CompletedProcess[str]"]


def _closure(extra: str) -> set[str]:
    """Return the distributions required by ``extra``, directly or indirectly, that are installed on this machine."""
    wanted = [Requirement(text) for text in PROJECT["dependencies"]]
    wanted += [Requirement(text) for text in PROJECT["optional-dependencies"].get(extra, [])]
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    while wanted:
        one = wanted.pop()
        if one.name == "tapscope":
            wanted += [Requirement(t) for more in one.extras for t in PROJECT["optional-dependencies"][more]]
            continue
        if (one.name, frozenset(one.extras)) in seen:
            continue
        seen.add((one.name, frozenset(one.extras)))
        if one.marker is not None and not any(one.marker.evaluate({"extra": e}) for e in (*one.extras, "")):
            continue
        try:
            needs = metadata.requires(one.name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(one.name)
        for need in map(Requirement, needs):
            if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in (*one.extras, "")):
                wanted.append(Requirement(str(need).partition(";")[0]))
    return found


def _link_packages(site: Path, names: set[str]) -> None:
    for name in names:
        distribution = metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))


@pytest.fixture(scope="module")
def without_compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a wheel built without a C++ compiler."""
    folder = tmp_path_factory.mktemp("wheel")
    commands = ["egg_info", "--egg-base", folder, "build_py", "--build-lib", folder / "lib"]
    subprocess.run([sys.executable, "setup.py", "-q", *commands], cwd=ROOT, check=True, timeout=120)
    return folder / "lib/tapscope"


def _files(package: Path) -> set[Path]:
    """Return the paths of the files in ``package``, without compiled files."""
    found = {
        Path(at, name).relative_to(package) for at, _, names in os.walk(package, followlinks=True) for name in names
    }
    return {file for file in found if file.suffix not in (".pyc", ".so")}


def test_wheel_has_every_file_of_the_package(without_compiler: Path) -> None:
    files = _files(without_compiler)
    assert files == _files(ROOT / "src/tapscope")
    assert {"py.typed", "dashboard/app.tcss", "dashboard/static/style.css"} <= set(map(str, files))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, without_compiler: Path) -> Callable[[str], Python]:
    """Return ``installed(extra)``: a function that runs Python in a venv with only ``extra`` installed."""
    made: dict[str, Path] = {}

    def make(extra: str) -> Path:
        folder = tmp_path_factory.mktemp(extra)
        venv.create(folder / "venv", symlinks=True)
        packages = folder / "packages"
        packages.mkdir()
        _link_packages(packages, _closure(extra))
        (packages / "tapscope").symlink_to(without_compiler)
        site = next((folder / "venv/lib").glob("python*/site-packages"))
        (site / "all.pth").write_text(f"{packages}\n")
        return folder / "venv/bin/python"

    def installed_(extra: str) -> Python:
        python = made.setdefault(extra, made.get(extra) or make(extra))
        environment = {n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "TAPSCOPE", "COV_"))}

        def run(*words: object, **options: object) -> "subprocess.CompletedProcess[str]":
            command = [str(python), *map(str, words)]
            settings = {"capture_output": True, "text": True, "timeout": 120, "cwd": "/", "env": environment} | options
            return subprocess.run(command, check=False, **settings)  # type: ignore[call-overload, no-any-return]

        return run

    return installed_


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    Toy(weights()).write(path, prompts())
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("models") / "llama")


def test_extras_named_in_messages_are_declared() -> None:
    for extra, modules in EXTRAS.items():
        declared = [Requirement(text) for text in PROJECT["optional-dependencies"][extra]]
        while tapscope := next((r for r in declared if r.name == "tapscope"), None):
            declared.remove(tapscope)
            declared += [Requirement(t) for more in tapscope.extras for t in PROJECT["optional-dependencies"][more]]
        assert {r.name for r in declared} == set(modules.values()), extra


@pytest.mark.parametrize("extra", ["core", "tui", "capture"])
def test_reading_verbs_need_no_extra_and_no_compiler(extra: str, installed, run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    calls = [
        ["--help"],
        ["--version"],
        ["info", run],
        ["info", "--env"],
        ["ls", run, "--limit", "2"],
        ["show", run, "*:out"],
        ["diff", run, run],
        ["verify", run],
        ["repair", copy],
    ]
    for words in calls if extra == "core" else calls[2:3]:
        done = installed(extra)("-m", "tapscope", *words)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), (words, done.stdout, done.stderr)
    assert "numpy" in installed(extra)("-m", "tapscope", "info", "--env").stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("has", "words", "lacks"),
    [
        ("core", ["dump", "MODEL", "-o", "OUT", "--prompt", "a"], "engine"),
        ("core", ["dump", "MODEL", "-o", "OUT", "--prompt", "a", "--backend", "hf"], "hf"),
        ("core", ["serve", "MODEL", "-o", "OUT", "--listen", "127.0.0.1:0"], "engine"),
        ("core", ["bench", "serving", "http://127.0.0.1:1"], "bench"),
        ("core", ["bench", "batch", "MODEL"], "engine"),
        ("core", ["bench", "latency", "MODEL"], "engine"),
        ("core", ["ctl", "RUN", "state"], "capture"),
        ("core", ["compact", "RUN"], "table"),
        ("core", ["info", "COMPACTED"], "table"),
        ("tui", ["dump", "MODEL", "-o", "OUT", "--prompt", "a"], "engine"),
        ("capture", ["dump", "MODEL", "-o", "OUT", "--prompt", "a"], "engine"),
        ("capture", ["dump", "MODEL", "-o", "OUT", "--prompt", "a", "--backend", "hf"], "hf"),
        ("capture", ["serve", "MODEL", "-o", "OUT", "--listen", "127.0.0.1:0"], "engine"),
        ("capture", ["bench", "batch", "MODEL"], "engine"),
        ("engine", ["dump", "MODEL", "-o", "OUT", "--prompt", "a", "--backend", "hf"], "hf"),
        ("engine", ["bench", "serving", "http://127.0.0.1:1"], "bench"),
    ],
)
def test_verb_without_its_extra_says_so_in_one_sentence(
    has: str, words: list[str], lacks: str, installed, run: Path, model: Path, tmp_path: Path
) -> None:
    places = {"MODEL": model, "RUN": run, "OUT": tmp_path / "out", "COMPACTED": tmp_path / "compacted"}
    if "COMPACTED" in words:
        compact_run(shutil.copytree(run, places["COMPACTED"]))
    done = installed(has)("-m", "tapscope", *(places.get(word, word) for word in words))
    match = SENTENCE.fullmatch(done.stderr)
    assert match is not None, done.stderr
    assert (done.returncode, done.stdout, match[1]) == (2, "", lacks)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("extra", ["core", "capture"])
def test_view_without_textual_names_its_extra(extra: str, installed, run: Path) -> None:
    ours, theirs = pty.openpty()
    done = installed(extra)(
        "-m", "tapscope", "view", run, stdin=theirs, stdout=theirs, stderr=theirs, capture_output=False
    )
    os.close(theirs)
    output = os.read(ours, 4096).decode().replace("\r\n", "\n")
    os.close(ours)
    assert (done.returncode, SENTENCE.fullmatch(output)[1]) == (2, "tui")  # type: ignore[index]


def test_tui_extra_alone_browses(installed, run: Path) -> None:
    ours, theirs = pty.openpty()
    packages = installed("tui")("-c", "import sys; print(sys.executable)").stdout.strip()
    process = subprocess.Popen([packages, "-m", "tapscope", "view", run], stdin=theirs, stdout=theirs, stderr=theirs)
    seen = b""
    while b"layers" not in seen and select.select([ours], [], [], 60)[0]:
        seen += os.read(ours, 65536)
    process.send_signal(signal.SIGTERM)
    process.wait()
    os.close(theirs)
    os.close(ours)
    assert b"layers" in seen, seen


PUBLIC = """
import importlib, sys
import tapscope
for module in ("tapscope", "tapscope.dumper", "tapscope.engine", "tapscope.comparator"):
    loaded = importlib.import_module(module)
    for name in loaded.__all__:
        try:
            scope = {}
            exec(f"from {module} import {name}", scope)
            print("ok", module, name)
        except ImportError as error:
            assert isinstance(error, tapscope.TapscopeError), (module, name, error)
            print("lacks", module, name, str(error).rpartition("tapscope[")[2].partition("]")[0])
"""


def test_public_name_loads_or_names_its_extra(installed) -> None:
    found = {extra: installed(extra)("-c", PUBLIC) for extra in ("core", "capture", "engine")}
    assert {extra: done.stderr for extra, done in found.items()} == dict.fromkeys(found, "")
    lacking = {
        extra: {tuple(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith("lacks")}
        for extra, done in found.items()
    }
    assert lacking["engine"] == set()
    assert {extra for _, _, extra in lacking["capture"]} == {"engine"}
    assert ("tapscope", "LLM", "engine") in lacking["capture"]
    assert {("tapscope", "Dumper", "capture"), ("tapscope.dumper", "dump", "capture")} <= lacking["core"]
    assert {("tapscope", "LLM", "engine"), ("tapscope.engine", "LLM", "engine")} <= lacking["core"]
    readable = {tuple(line.split()[1:]) for line in found["core"].stdout.splitlines() if line.startswith("ok")}
    wanted = {("tapscope", name) for name in ("compare", "open_run", "dumper", "Run", "Site", "DumperConfig")}
    assert wanted <= readable


def test_capture_extra_alone_records_without_a_compiler(installed, tmp_path: Path) -> None:
    program = f"""
import torch
from tapscope import Dumper, open_run
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
with Dumper(model, {str(tmp_path / "run")!r}, keep="full"):
    model(torch.ones(2, 4))
print(len(open_run({str(tmp_path / "run")!r}).records))
"""
    done = installed("capture")("-c", program)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert int(done.stdout) >= 4


def test_engine_extra_alone_dumps_without_a_compiler(installed, model: Path, tmp_path: Path) -> None:
    done = installed("engine")(
        "-m", "tapscope", "dump", model, "-o", tmp_path / "run", "--prompt", "a", "--max-new-tokens", 2
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
