"""W chooses the columns of a list; the choice is kept."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from dashboard_driver import Driver
from dashboard_runs import toy_run
from toy_pair import toy_pair

from tapscope.comparator import CompareOptions
from tapscope.core.errors import ConfigError
from tapscope.dashboard.app import TapscopeApp
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.column_choice import ColumnChoice, columns_path
from tapscope.dashboard.compare_settings import CompareSettings
from tapscope.dashboard.diff_source import DiffSource


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = toy_pair(tmp_path_factory.mktemp("columns"))
    toy_run(root / "run")
    return root


def check(app: TapscopeApp, test: Callable[[Driver], Coroutine[Any, Any, None]], size: tuple[int, int]) -> None:
    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            driver = Driver(app, pilot)
            await driver.settle()
            await test(driver)

    asyncio.run(run())


def header(driver: Driver) -> list[str]:
    table = driver.screen.table
    return str(table.header(table.room)).split()


def app_of_run(root: Path, file: Path | None) -> TapscopeApp:
    return TapscopeApp(lambda: RunSource.open(root / "run"), columns=file)


def app_of_pair(root: Path, file: Path | None) -> TapscopeApp:
    def open_source(way: CompareSettings, progress: Callable[[int, int], None]) -> DiffSource:
        return DiffSource.open((root / "base", root / "target"), way.of(CompareOptions()), progress)

    return TapscopeApp(open_diff=(open_source, "base → target"), columns=file)


def test_columns_of_records_are_chosen_and_kept(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "state" / "columns.json"

    async def choose(driver: Driver) -> None:
        assert header(driver) == ["site", "step", "rank", "shape", "dtype", "rms", "|max|", "nan+inf"]
        await driver.press("W", "space", "j", "space", "G", "space", "escape")
        assert header(driver) == ["site", "shape", "dtype", "rms", "|max|", "nan+inf", "bytes"]
        table = driver.screen.table
        assert str(table.format_row(0, table.room - 2)).split()[-1] in ("B", "kB")

    async def again(driver: Driver) -> None:
        assert header(driver) == ["site", "shape", "dtype", "rms", "|max|", "nan+inf", "bytes"]
        await driver.press("W", "d", "escape")
        assert header(driver) == ["site", "step", "rank", "shape", "dtype", "rms", "|max|", "nan+inf"]

    check(app_of_run(root, file), choose, (160, 36))
    assert json.loads(file.read_text())["lists"] == {"records": ["shape", "dtype", "rms", "|max|", "nan+inf", "bytes"]}
    check(app_of_run(root, file), again, (160, 36))
    assert json.loads(file.read_text())["lists"] == {}


def test_columns_of_findings_are_chosen_and_those_that_do_not_fit_are_left_out(root: Path) -> None:
    async def wide(driver: Driver) -> None:
        usual = header(driver)
        await driver.press("W", "j", "space", "escape")
        assert header(driver) == [*usual[:3], "error", *usual[3:]]
        await driver.press("m")
        assert "The columns were chosen" in str(driver.screen.bar.render())

    async def narrow(driver: Driver) -> None:
        await driver.press("W", "j", "space", "j", "space", "escape")
        assert header(driver)[:6] == ["site", "÷", "floor", "error", "floor", "max"]
        assert "matched" not in header(driver)
        await driver.press("full_stop")
        assert header(driver)[:4] == ["site", "÷", "floor", "error"]

    check(app_of_pair(root, None), wide, (200, 36))
    check(app_of_pair(root, None), narrow, (120, 36))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "Input data was truncated"),
        ('{"schema": "tapscope.columns/9", "lists": {}}', "unknown schema 'tapscope.columns/9'"),
        ('{"schema": "tapscope.columns/1", "lists": {"records": "rms"}}', "Expected `array`"),
    ],
)
def test_a_file_that_is_not_a_choice_of_columns_is_reported(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "columns.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="cannot read .*columns.json") as error:
        ColumnChoice(file)
    assert problem in str(error.value)


def test_columns_of_another_version_are_left_out(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "columns.json"
    ColumnChoice(file).set("records", ["rms", "median"])

    async def test(driver: Driver) -> None:
        assert header(driver) == ["site", "rms"]

    check(app_of_run(root, file), test, (120, 36))


def test_columns_that_cannot_be_kept_are_chosen_for_now(root: Path, tmp_path: Path) -> None:
    app = app_of_run(root, tmp_path / "file" / "columns.json")
    (tmp_path / "file").write_text("")

    async def test(driver: Driver) -> None:
        await driver.press("W", "space", "escape")
        assert "step" not in header(driver)
        assert any("chosen for now: cannot write" in each.message for each in driver.app._notifications)

    check(app, test, (160, 36))


def test_columns_are_in_the_state_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert columns_path() == tmp_path / "tapscope" / "columns.json"
