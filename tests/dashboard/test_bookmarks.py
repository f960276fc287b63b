"""Bookmarks: the file, and the keys that set, list, open and delete them on every screen."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import parse_qsl

import pytest
from chromium import page_of
from dashboard_driver import Driver
from dashboard_runs import toy_run
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from toy_pair import SITE, toy_pair
from web_server import serving

from tapscope.comparator import CompareOptions
from tapscope.core.errors import ConfigError
from tapscope.dashboard.app import TapscopeApp
from tapscope.dashboard.bookmarks import Bookmark, Bookmarks, bookmarks_path
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.diff_source import DiffSource
from tapscope.dashboard.model.permalink import parse_permalink
from tapscope.dashboard.model.value_table import parse_index
from tapscope.dashboard.screens.bookmarks import BookmarksScreen
from tapscope.dashboard.screens.tensor import TensorScreen
from tapscope.dashboard.web.app import create_app
from tapscope.dashboard.web.login import Login
from tapscope.dashboard.web.roots import Roots

pytestmark = pytest.mark.usefixtures("no_rest")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return toy_run(tmp_path_factory.mktemp("bookmarks") / "base")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return toy_pair(tmp_path_factory.mktemp("pairs"))


def browsing(run, file, **options):
    return TapscopeApp(lambda: RunSource.open(run), bookmarks=file, **options)


def comparing(root, file):
    def open_source(way, progress):
        return DiffSource.open((root / "base", root / "target"), way.of(CompareOptions()), progress)

    return TapscopeApp(open_diff=(open_source, "base → target"), bookmarks=file)


def check(app, test, size=(110, 36)):
    async def run():
        async with app.run_test(size=size) as pilot:
            driver = Driver(app, pilot)
            await driver.settle()
            await test(driver)

    asyncio.run(run())


async def until(driver, condition):
    for _ in range(500):
        await driver.pilot.pause(0.01)
        if condition():
            return
    raise AssertionError("timed out")


async def named(driver, name):
    """Replace the proposed name in the input line."""
    await driver.pilot.pause()
    driver.app.screen.query_one("#line").value = name
    await driver.press("enter")


def said(driver):
    return driver.app.screen.query_one("KeyBar").said


# --- the file ----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from("abc"), st.text(max_size=30)), max_size=6))
def test_bookmarks_are_read_as_they_were_set_and_names_are_unique(tmp_path_factory, given_bookmarks):
    store = Bookmarks(tmp_path_factory.mktemp("state") / "tapscope" / "bookmarks.json")
    for name, link in given_bookmarks:
        store.add(Bookmark(name, link, ("/runs/a",)))
    latest = dict(given_bookmarks)
    assert {each.name: each.link for each in store.read()} == latest
    assert [each.name for each in store.read()][-1:] == [name for name, _ in given_bookmarks][-1:]
    store.remove("a")
    assert "a" not in [each.name for each in store.read()]


def test_bookmarks_of_several_writers_are_all_kept(tmp_path):
    file = tmp_path / "bookmarks.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: Bookmarks(file).add(Bookmark(str(i), "run/a:out@0.0", ())), range(40)))
    assert sorted(int(each.name) for each in Bookmarks(file).read()) == list(range(40))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ('{"schema": "tapscope.bookmarks/9", "bookmarks": []}', "unknown schema 'tapscope.bookmarks/9'"),
        ('{"schema": "tapscope.bookmarks/1", "bookmarks": [{"name": 1}]}', "Expected `str`"),
    ],
)
def test_a_file_that_is_not_bookmarks_is_reported_and_left_alone(tmp_path, text, problem):
    file = tmp_path / "bookmarks.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        Bookmarks(file).add(Bookmark("a", "run/a:out@0.0", ()))
    assert file.read_text() == text


def test_bookmarks_are_in_the_state_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert bookmarks_path() == tmp_path / "tapscope" / "bookmarks.json"


# --- the screens -------------------------------------------------------------------------------------


def test_bookmark_of_a_record_is_set_listed_opened_and_deleted(run, tmp_path):
    file = tmp_path / "bookmarks.json"

    async def test(driver):
        screen = driver.screen
        await driver.press("n")
        odd = screen.table.record.key
        await driver.press("M")
        await named(driver, "zeros")
        assert said(driver) == "bookmarked: zeros"
        await driver.press("right_square_bracket", "g", "apostrophe")
        assert isinstance(driver.app.screen, BookmarksScreen)
        listed = driver.app.screen.list.format_row(0, 90).plain
        assert listed.split() == ["zeros", f"base/{odd.site}@{odd.step}.{odd.rank}"]
        await driver.press("enter")
        assert screen.table.record.key == odd
        await driver.press("apostrophe", "d")
        assert driver.app.screen.list.num_rows == 0
        assert "M sets one" in driver.app.screen.list.empty_text
        await driver.press("escape")
        assert driver.app.screen is screen

    check(browsing(run, file), test)
    assert Bookmarks(file).read() == ()


def test_bookmark_of_a_value_returns_to_it_from_every_screen(run, tmp_path):
    file = tmp_path / "bookmarks.json"

    async def test(driver):
        screen = driver.screen
        await driver.press("n", "n", "c")
        await until(driver, lambda: isinstance(driver.app.screen, TensorScreen))
        values = driver.app.screen
        await until(driver, lambda: (values.grid.row, values.grid.column) == (1, 7))
        await driver.press("M")
        await named(driver, "value")
        await driver.press("g", "home", "apostrophe", "enter")
        assert (values.grid.row, values.grid.column) == (1, 7)
        await driver.press("escape", "left_square_bracket", "apostrophe", "enter")
        await until(driver, lambda: isinstance(driver.app.screen, TensorScreen))
        assert (driver.app.screen.grid.row, driver.app.screen.grid.column) == (1, 7)
        await driver.press("escape")
        assert screen.query_now.step == 1
        other = Bookmark("other", "base/lm_head:out@0.0", tuple(screen.runs))
        Bookmarks(file).add(other)
        await driver.press("c")
        await until(driver, lambda: isinstance(driver.app.screen, TensorScreen))
        await driver.press("apostrophe", "G", "enter")  # a link to another tensor: the screen below opens it
        await until(driver, lambda: driver.app.screen is screen and screen.table.record.key.site == "lm_head:out")

    check(browsing(run, file), test)


def test_bookmark_of_a_finding_opens_its_worst_value(pair, tmp_path):
    file = tmp_path / "bookmarks.json"

    async def test(driver):
        screen = driver.screen
        await driver.press("M")
        await named(driver, "culprit")
        (bookmark,) = Bookmarks(file).read()
        # the error is 0.5 in every step; rounding of the processor decides which is worst
        worst = screen.table.finding.worst
        assert bookmark.link.startswith(f"target/{SITE}@{worst.step}.0[")
        assert bookmark.link.endswith(f",{worst.index[0]}]")
        assert bookmark.runs == (str(pair / "base"), str(pair / "target"))
        await driver.press("b", "apostrophe", "enter")
        await until(driver, lambda: isinstance(driver.app.screen, TensorScreen))
        grid = driver.app.screen.grid
        assert driver.app.screen.values.link(grid.row, grid.column) == bookmark.link
        await driver.press("escape")
        assert screen.table.finding.site == SITE

    check(comparing(pair, file), test)


def test_bookmark_of_another_run_is_copied_as_a_command(run, tmp_path):
    file = tmp_path / "bookmarks.json"
    Bookmarks(file).add(Bookmark("elsewhere", "other/a:out@0.0[1,2]", ("/runs/other",)))

    async def test(driver):
        await driver.press("apostrophe")
        assert driver.app.screen.list.format_row(0, 90).spans[-1].style == "dim"
        await driver.press("y")
        assert driver.app.clipboard == "other/a:out@0.0[1,2]"
        await driver.press("enter")
        assert driver.app.clipboard == "tapscope view /runs/other --at 'other/a:out@0.0[1,2]'"
        assert "of another run" in said(driver)

    check(browsing(run, file), test)


def test_bookmarks_report_what_is_wrong(run, tmp_path):
    file = tmp_path / "bookmarks.json"

    async def test(driver):
        await driver.press("M")
        await named(driver, "")
        assert "a name of 1 to 100 characters" in said(driver)
        await driver.press("escape")
        file.write_text("not JSON")
        await driver.press("M", "enter")
        assert "cannot read" in said(driver)
        await driver.press("escape", "apostrophe")
        assert "cannot read" in driver.app.screen.list.empty_text

    check(browsing(run, file), test)


def test_every_bookmark_key_can_be_changed(run, tmp_path):
    file = tmp_path / "bookmarks.json"
    Bookmarks(file).add(Bookmark("a", "base/lm_head:out@1.0", (str(run),)))
    keys = ["bookmarks=ctrl+b", "delete_bookmark=ctrl+d"]

    async def test(driver):
        await driver.press("ctrl+b")
        assert "^d delete" in driver.app.screen.list.border_subtitle
        await driver.press("ctrl+d")
        assert driver.app.screen.list.num_rows == 0

    check(browsing(run, file, keys=keys), test)


# --- the web page ------------------------------------------------------------------------------------


def test_a_link_opens_the_same_place_on_the_web(pair):
    roots, login = Roots([pair]), Login()
    with TestClient(create_app(roots, login), base_url="http://127.0.0.1") as client:
        client.get(f"/login?token={login.link}")
        (place,) = client.get("/api/link", params={"link": f"target/{SITE}@2.0[0,48]"}).json()
        page, _, index = place["address"].partition("#")
        words = dict(parse_qsl(page.partition("?")[2]))
        table = roots.table(words["run"], words["site"], int(words["step"]), int(words["rank"]))
        assert table.link(*table.place(parse_index(index))) == f"target/{SITE}@2.0[0,48]"
        for link, sentence in (
            ("none/a:out@0.0", "no run of that name"),
            ("base/a:out@9.0", "no record of a:out in step 9"),
            ("base", "invalid link 'base': expected RUN/SITE@STEP.RANK"),
        ):
            response = client.get("/api/link", params={"link": link})
            assert response.status_code in (400, 404)
            assert sentence in response.json()["error"]


def test_a_link_lists_every_run_of_its_name(tmp_path):
    for folder in ("a", "b"):
        toy_run(tmp_path / folder / "same")
    roots = Roots([tmp_path / "a", tmp_path / "b"])
    places = roots.places_of(parse_permalink("same/lm_head:out@0.0"))
    assert sorted(each.path for each in places) == [str(tmp_path / name / "same") for name in ("a", "b")]


def test_page_opens_a_pasted_link_and_shows_one(chromium, pair):
    with serving(pair) as (_, link, _), page_of(chromium, link) as page:
        page.fill("input[name=link]", f"target/{SITE}@2.0[0,48]")
        page.click("button:text-is('Open')")
        page.wait_for_selector("p.mono:has-text('[0,48] ·')")
        address = page.get_attribute(".dim.mono a", "href")
        page.goto("/".join(page.url.split("/")[:3]) + address)
        page.wait_for_selector("p.mono:has-text('[0,48] ·')")
