"""Runs the examples of a Markdown page in order, and compares their output with the page.

A page is one session: its `python` blocks share a namespace, its `sh` blocks one shell, and both one directory. A
`text` block right after an example is its expected output: the lines in order, `…` for anything, numbers for any
numbers. An example that cannot run is preceded by a comment: `<!-- not run: REASON -->`.
"""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forkserver_pool

ROOT = Path(__file__).resolve().parents[2]
NUMBER = re.compile(r"\d[\d,.]*(?:e[+-]\d+)?")
_FENCE = re.compile(
    r"(?:^<!-- (?P<note>[^>]*?) -->\n\n?)?^(?P<indent> *)```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^(?P=indent)```$"
    r"(?:\n\n?(?P=indent)```text\n(?P<shown>.*?)^(?P=indent)```$)?",
    re.MULTILINE | re.DOTALL,
)
RUN = ("python", "sh")
"""Languages of runnable examples; `text`, `json`, `yaml` and others are only shown."""


@dataclass(frozen=True)
class Example:
    """One runnable block of a page."""

    language: str
    code: str
    shown: str
    note: str
    line: int

    @property
    def reason(self) -> str:
        """Why the example is not run; empty if it is run."""
        return self.note.removeprefix("not run: ") if self.note.startswith("not run: ") else ""


def examples(page: Path) -> list[Example]:
    """Return every example of a page, in order."""
    text = page.read_text()
    return [
        Example(
            each["language"],
            _dedented(each["code"], each["indent"]),
            _dedented(each["shown"] or "", each["indent"]),
            each["note"] or "",
            text.count("\n", 0, each.start("language")) + 1,
        )
        for each in _FENCE.finditer(text)
        if each["language"] in RUN
    ]


def _dedented(text: str, indent: str) -> str:
    return re.sub(rf"^{indent}", "", text, flags=re.MULTILINE)


def run(page: Path, folder: Path, *, is_forked: bool = True) -> list[tuple[Example, str]]:
    """Run a page's examples in their own directory; return each with its output.

    Stops at the first failing example. ``is_forked``: fork commands from a process that has torch imported, instead of
    running the installed ones.
    """
    todo = [each for each in examples(page) if not each.reason]
    (folder / "examples").symlink_to(ROOT / "examples")
    code = json.dumps([{"language": each.language, "code": each.code} for each in todo])
    for port in sorted(set(re.findall(r":([78]0\d\d)\b", code))):
        code = code.replace(f":{port}", f":{_free_port()}")
    (folder / "page.json").write_text(code)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TAPSCOPE")}
    first = [forkserver_pool.commands()] if is_forked else []
    path = os.pathsep.join([*map(str, first), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment |= {"PATH": path, "OMP_NUM_THREADS": "1"}
    environment |= {"COLUMNS": "118", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    environment["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # otherwise inductor compiles ten programs to probe the CPU
    popen = forkserver_pool.WarmTree if is_forked else forkserver_pool.WarmPopen
    done = forkserver_pool.run(__file__, "page.json", popen=popen, cwd=folder, env=environment, timeout=None)
    printed = [(folder / f"printed-{i}.txt").read_text() for i in range(len(todo)) if _is_there(folder, i)]
    where = f"{page.name}:{todo[len(printed) - 1].line}" if printed else page.name
    assert done.returncode == 0, f"{where}: {done.stderr}\n{printed[-1] if printed else ''}"
    return list(zip(todo, printed, strict=True))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _is_there(folder: Path, number: int) -> bool:
    return (folder / f"printed-{number}.txt").exists()


def missing(shown: str, printed: str) -> list[str]:
    """Return the lines that a page shows but that were not printed in this order."""
    have = iter([_masked(line) for line in printed.splitlines()])
    told = [line for line in shown.splitlines() if line.strip() not in ("", "…")]
    for number, line in enumerate(told):
        pattern = re.compile(re.escape(_masked(line)).replace("…", ".*"))
        if not any(pattern.fullmatch(one) for one in have):
            return told[number:]
    return []


def _masked(line: str) -> str:
    """Mask numbers, the words for equal bits (which depend on the machine's arithmetic), and blanks, which depend on
    the length of numbers."""
    line = re.sub(r"\binputs (equal|close)\b", "inputs #", re.sub(r"[-−]#", "#", NUMBER.sub("#", line)))
    return re.sub(r"[\s─]+", " ", line).strip()


_STRICT = r"""
set -E
trap 'code=$?; [[ $code = 1 && $BASH_COMMAND =~ ^tapscope\ (diff|info|verify) ]] || exit $code' ERR
"""
"""A shell that exits at the first failing command; a difference between runs is a result, not a failure."""


class _Shell:
    """One bash process for all `sh` blocks."""

    def __init__(self) -> None:
        self._bash = subprocess.Popen(["bash"], stdin=subprocess.PIPE, text=True, start_new_session=True)
        assert self._bash.stdin is not None
        self._bash.stdin.write(_STRICT)

    def run(self, code: str, number: int) -> None:
        assert self._bash.stdin is not None
        script, done = f"block-{number}.sh", Path(f"done-{number}")
        Path(script).write_text(f"{code}\n:\n")
        os.mkfifo(done)
        out = f"printed-{number}.txt"
        self._bash.stdin.write(f". ./{script} >>{out} 2>&1 </dev/null\necho 0 >{done}\n")
        self._bash.stdin.flush()
        self._wait(done)

    def _wait(self, done: Path) -> None:
        """Wait until the block or the shell has ended."""
        handle = os.open(done, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while self._bash.poll() is None:
                if select.select([handle], [], [], 0.2)[0] and os.read(handle, 8):
                    return
        finally:
            os.close(handle)
        sys.exit(f"the shell ended with exit code {self._bash.returncode}")

    def close(self) -> None:
        """Stop the shell and all processes that it left running."""
        assert self._bash.stdin is not None
        self._bash.stdin.close()
        self._bash.wait(timeout=60)
        with suppress(ProcessLookupError):
            os.killpg(self._bash.pid, signal.SIGTERM)


def _run_all(blocks: list[dict[str, str]]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    with closing(_Shell()) as shell:
        for number, block in enumerate(blocks):
            Path(f"printed-{number}.txt").touch()
            if block["language"] == "sh":
                shell.run(block["code"], number)
            elif "__main__" in block["code"]:  # it starts processes that import its file
                Path(f"block_{number}.py").write_text(block["code"])
                shell.run(f"python block_{number}.py", number)
            else:
                with _printing_to(f"printed-{number}.txt"):
                    exec(compile(block["code"], f"block {number}", "exec"), names)


class _printing_to:
    """Context manager: redirect both streams of this process and its children to a file."""

    def __init__(self, file: str) -> None:
        self._file = file

    def __enter__(self) -> None:
        sys.stdout.flush()
        self._kept = [os.dup(1), os.dup(2)]
        with open(self._file, "a") as to:
            os.dup2(to.fileno(), 1)
            os.dup2(to.fileno(), 2)

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()
        for number, kept in enumerate(self._kept, 1):
            os.dup2(kept, number)
            os.close(kept)


def pages() -> Iterator[Path]:
    """Yield every page of docs/ with a runnable example."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        if any(not each.reason for each in examples(page)):
            yield page


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent]
    warnings.simplefilter("error")
    for kind in (DeprecationWarning, FutureWarning):  # raised by torch itself, as in pyproject.toml
        warnings.filterwarnings("ignore", category=kind, module=r"torch\b")
    _run_all(json.loads(Path(sys.argv[1]).read_text()))
