"""Dashboard performance: first paint, opening, keys, quitting, page, grid, tile and report, as medians of CPU time.

    python benchmarks/dashboard.py [--sites 1000] [--steps 100] [--repeat 5] [--skip report] [--only keys]
    python benchmarks/dashboard.py --run RUN --only keys
    python benchmarks/dashboard.py --only quit

Times are CPU time of this process and its threads, or of a child process, so that other load on the machine has little
effect; quitting is also measured in wall time. Runs are written to a temporary directory by the real writer.
"""

import argparse
import asyncio
import gzip
import os
import pty
import resource
import statistics
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from diff_runs import write_run
from open_run import make

from tapscope.comparator import CompareOptions, Verdict, compare_open_runs
from tapscope.dashboard.app import TapscopeApp
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.compare_settings import CompareSettings
from tapscope.dashboard.diff_source import DiffSource
from tapscope.dashboard.model.diff import HashedSteps
from tapscope.dashboard.model.finding_grid import site_grid
from tapscope.dashboard.model.grid import Grid, GridColumn, GridRow, layer_grid
from tapscope.dashboard.model.run import run_view
from tapscope.dashboard.model.schema import to_json
from tapscope.dashboard.model.tile import tile
from tapscope.dashboard.report.html import html_report
from tapscope.dashboard.web.diff_jobs import diff_page
from tapscope.sources import open_run

STATIC = Path(__file__).resolve().parents[1] / "dashboard" / "static"
PAINT = """
import asyncio, threading
from tapscope.dashboard.app import TapscopeApp
never = threading.Event()
async def main():
    app = TapscopeApp(never.wait)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        never.set()
        import os
        os._exit(0)
asyncio.run(main())
"""
PARTS = ("paint", "quit", "open", "keys", "diff", "grid", "tile", "report")
DIFF_KEYS = ("j", "G", "g", "right_square_bracket", "s", "v", "slash", "7", "escape", "n", "c", "escape")
KEYS = ("j", "G", "g", "right_square_bracket", "s", "v", "slash", "7", "escape", "n", "c", "l", "G", "escape")

Row = Callable[[str, str, str], None]
"""(figure, description, limit): prints one row."""


def write(path: Path, num_sites: int, num_steps: int, scale: float = 1.0, width: int = 4) -> None:
    values = np.linspace(0.5, 1.0, width, dtype=np.float32).reshape(1, width)

    def sites(step: int) -> Iterator[tuple[str, Any]]:
        for i in range(num_sites):
            factor = scale if i > num_sites // 2 else 1.0
            yield f"model.layers.{i // 20}.part{i % 20}:out", ("t h", {0: values * (1 + step + i) * factor})

    write_run(path, 1, ((1, sites(step)) for step in range(num_steps)))


def cpu(work: Callable[[], Any], repeat: int) -> float:
    found = []
    for _ in range(repeat):
        begun = time.process_time()
        work()
        found.append(time.process_time() - begun)
    return statistics.median(found)


def child(code: str, repeat: int) -> float:
    found = []
    for _ in range(repeat):
        begun = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(ended.ru_utime - begun.ru_utime + ended.ru_stime - begun.ru_stime)
    return statistics.median(found)


def keys(make: Callable[[], TapscopeApp], pressed: tuple[str, ...], repeat: int) -> dict[str, float]:
    """Return key -> median CPU seconds until the screen has responded."""
    found: dict[str, list[float]] = {}

    async def go() -> None:
        app = make()
        async with app.run_test(size=(120, 40)) as pilot:

            async def answered() -> None:
                await pilot.pause()
                for _ in range(3000):
                    screen = next(each for each in reversed(app.screen_stack) if hasattr(each, "settled"))
                    if screen.settled:
                        break
                    await asyncio.sleep(0.005)

            await answered()
            for _ in range(repeat):
                for key in pressed:
                    begun = time.process_time()
                    app.simulate_key(key)
                    await answered()
                    found.setdefault(key, []).append(time.process_time() - begun)

    asyncio.run(go())
    return {key: statistics.median(times) for key, times in found.items()}


def quit_while_reading(run: Path) -> tuple[float, float]:
    """Return wall and CPU seconds from key q until `tapscope view` exits, half a second after it starts reading the
    run."""
    (run / "rank-00000" / "records.jsonl.index").unlink(missing_ok=True)  # an index would shorten reading
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (40, 120))
    command = [sys.executable, "-m", "tapscope", "view", str(run)]
    environment = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    while b"READING" not in seen:
        seen += os.read(ours, 65536)
    time.sleep(0.5)
    used = _cpu_of(process.pid)
    begun = time.perf_counter()
    os.write(ours, b"q")
    try:
        while True:
            seen += os.read(ours, 65536)
    except OSError:  # Linux: no process has the terminal open any more
        _, status, usage = os.wait4(process.pid, 0)
    took = time.perf_counter() - begun
    os.close(ours)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or b"ON DISK" in seen:
        raise RuntimeError(f"exit code {process.returncode}, or the run was read before q: {seen[-500:]!r}")
    return took, usage.ru_utime + usage.ru_stime - used


def _cpu_of(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def diff_app(paths: tuple[Path, Path]) -> TapscopeApp:
    """Return the app that compares two runs."""

    def open_source(way: CompareSettings, progress: Callable[[int, int], None]) -> DiffSource:
        return DiffSource.open(paths, CompareOptions(), progress, way)

    return TapscopeApp(open_diff=(open_source, "two runs"))


def large_grid(num_sites: int, num_steps: int) -> Grid:
    names = [f"model.layers.{i // 600}.mlp.experts.{i % 600}:out" for i in range(num_sites)]
    rows = tuple(GridRow(name, name, Verdict.CLOSE, (i,)) for i, name in enumerate(names))
    rng = np.random.default_rng(0)
    shape = num_sites, num_steps
    columns = tuple(GridColumn(i, i) for i in range(num_steps))
    return Grid(rows, columns, rng.random(shape), rng.integers(3, 7, shape).astype(np.uint8))


def page_bytes(paths: tuple[Path, Path]) -> int:
    """Return the compressed size of a comparison page in bytes: all scripts, style sheets and the data."""
    runs = open_run(paths[0]), open_run(paths[1])
    comparison = compare_open_runs(*runs, CompareOptions())
    grid = site_grid(comparison.report.findings, HashedSteps.of(runs))
    data = to_json(diff_page(comparison, runs, grid))
    files = [file.read_bytes() for file in STATIC.rglob("*") if file.suffix in (".js", ".css", ".svg")]
    return sum(len(gzip.compress(each, 4)) for each in (*files, data))


def report_bytes(root: Path) -> int:
    write(root / "report-base", 600, 200)
    write(root / "report-target", 600, 200, scale=1.5)
    runs = open_run(root / "report-base"), open_run(root / "report-target")
    comparison = compare_open_runs(*runs, CompareOptions())
    return len(html_report(comparison, runs, equal_steps=HashedSteps.of(runs)).encode())


def quit_rows(root: Path, repeat: int, row: Row) -> None:
    large = make(root / "large", 1_000_000)
    walls, cpus = zip(*(quit_while_reading(large) for _ in range(repeat)), strict=True)
    what = "quit while 1,000,000 records are read, wall time"
    row(what, f"{statistics.median(walls):.2f} s", "0.3 s")
    row("the same, the slowest", f"{max(walls):.2f} s", "0.3 s")
    row("the same, CPU time", f"{statistics.median(cpus):.2f} s", "")


def diff_rows(root: Path, repeat: int, row: Row) -> None:
    write(root / "base", 640, 200)
    write(root / "target", 640, 200, scale=1.5)
    paths = root / "base", root / "target"
    for key, seconds in keys(lambda: diff_app(paths), DIFF_KEYS, repeat).items():
        row(f"key {key}, 640 sites x 200 steps of two runs", f"{1000 * seconds:.0f} ms", "30 ms")
    row(
        "compare 640 sites x 200 steps",
        f"{cpu(lambda: DiffSource.open(paths, CompareOptions()).close(), repeat):.2f} s",
        "",
    )
    source = DiffSource.open(paths, CompareOptions())
    for what, way in (
        ("by rtol 1e-3", CompareSettings(tolerance=(1e-3, 0.0))),
        ("by the floor", CompareSettings(tolerance="floor")),
        ("with swapped sides", CompareSettings(swapped=True)),
    ):
        seconds = cpu(lambda way=way: source.again(way), repeat)
        row(f"the same {what}", f"{seconds:.2f} s", "0.5 s")
    row("their page with all scripts and data, compressed", f"{page_bytes(paths) / 1000:.0f} kB", "200 kB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--run", type=Path, help="measure this run instead, for example one of open_run.py --keep")
    parser.add_argument("--skip", action="append", default=[], choices=PARTS)
    parser.add_argument("--only", action="append", default=[], choices=PARTS)
    args = parser.parse_args()
    parts = {each for each in args.only or PARTS if each not in args.skip}

    def row(what: str, value: str, limit: str) -> None:
        print(f"| {what:<58} | {value:>10} | {limit:>9} |", flush=True)

    row("figure", "measured", "limit")
    print(f"|{'-' * 60}|{'-' * 11}:|{'-' * 10}:|")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if "paint" in parts:
            more = child(PAINT, args.repeat) - child("import textual.app", args.repeat)
            row("first paint, more than `import textual.app`", f"{more:.2f} s", "0.3 s")
        if "quit" in parts:
            quit_rows(root, args.repeat, row)
        run = args.run or root / "run"
        if args.run is None and parts & {"open", "keys"}:
            write(run, args.sites, args.steps)
        if parts & {"open", "keys"}:
            first = cpu(lambda: RunSource.open(run), 1)
            whole = RunSource.open(run)
            what = f"{len(whole.run.records):,} records of {whole.num_sites:,} sites"
        if "open" in parts:
            row(f"open {what} for the first time", f"{first:.2f} s", "")
            row(f"open {what} again", f"{cpu(lambda: RunSource.open(run), args.repeat):.2f} s", "")
            page = cpu(lambda: to_json(run_view(whole, "run")), args.repeat)
            row(f"page of {what}, as JSON", f"{1000 * page:.0f} ms", "150 ms")
        if "keys" in parts:
            for key, seconds in keys(lambda: TapscopeApp(lambda: RunSource.open(run)), KEYS, args.repeat).items():
                row(f"key {key}, {what}", f"{1000 * seconds:.0f} ms", "30 ms")
        if "diff" in parts:
            diff_rows(root, args.repeat, row)
        if "grid" in parts:
            grid = large_grid(60_000, 500)
            layers = layer_grid(grid)
            row(
                "grid of 60,000 sites x 500 steps: layers",
                f"{1000 * cpu(lambda: layer_grid(grid), 3):.0f} ms",
                "150 ms",
            )
            sent = cpu(lambda: to_json(layers.binned(200).packed()), 3)
            row("grid of 60,000 sites x 500 steps: JSON of the layers", f"{1000 * sent:.0f} ms", "150 ms")
        if "tile" in parts:
            big = np.random.default_rng(0).standard_normal((4096, 4096)).astype(np.float32)
            write_run(root / "big", 1, iter([(4096, iter([("model.norm:out", ("t h", {0: big}))]))]))
            source = RunSource.open(root / "big")
            table = source.table(source.run.records[0])
            read = cpu(lambda: to_json(tile(table, 2000, 2000, 24, 12)), 9)
            row("tile of 24 x 12 of a tensor of 67 MB, as JSON", f"{1000 * read:.1f} ms", "30 ms")
        if "report" in parts:
            row("report of 600 sites x 200 steps", f"{report_bytes(root) / 1e6:.2f} MB", "1 MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
