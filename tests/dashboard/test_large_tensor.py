"""A tensor of 2 GiB on the screen: only visible values are read, and memory stays far below the size of the tensor."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from factories import RunFactory

ROWS, COLUMNS = 32_768, 16_384
MEMORY = 1 << 30
"""Limit of the process's own memory, in bytes: half of the tensor. Mapped files do not count."""

BROWSE = """
import asyncio, resource, sys
from tapscope.dashboard.app import TapscopeApp
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.screens.tensor import TensorScreen

resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[2]),) * 2)

async def main():
    app = TapscopeApp(lambda: RunSource.open(sys.argv[1]))
    async with app.run_test(size=(120, 40)) as pilot:
        async def until(holds):
            for _ in range(20_000):
                await pilot.pause(0.01)
                if holds():
                    return
            raise SystemExit("no answer")
        await until(lambda: app.screen_stack[1].settled)
        await pilot.press("c")
        await until(lambda: isinstance(app.screen, TensorScreen) and app.screen.settled)
        value = lambda: str(app.screen.query_one("#value").content)
        await pilot.press("G", "end")
        print(value())
        await pilot.press("g", "home", "n")
        await until(lambda: app.screen.settled)
        print(value())
        await pilot.press("x", "5", "enter")
        await until(lambda: app.screen.settled)
        print(value())

asyncio.run(main())
"""


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_tensor_of_two_gigabytes_is_viewed_with_bounded_memory(tmp_path: Path):
    values = np.zeros((ROWS, COLUMNS), np.float32)
    values[-1, -1], values[2_000, 123], values[3_000, 456] = 3.0, np.nan, 7.0
    with RunFactory(tmp_path / "run") as run:
        run.step()
        run.put("model.norm:out", values)
    assert values.nbytes == 2 << 30
    del values
    words = [sys.executable, "-c", BROWSE, str(tmp_path / "run"), str(MEMORY)]
    found = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr[-3000:]
    last, nan, above = found.stdout.splitlines()
    assert f"[{ROWS - 1},{COLUMNS - 1}]" in last
    assert "3" in last.rpartition("·")[2]
    assert "[2000,123]" in nan
    assert "nan" in nan
    assert "[3000,456]" in above
    assert "7" in above.rpartition("·")[2]
