"""One view model: for random runs, `diff`, `--json`, HTML, the web API and both screens show the same numbers."""

import asyncio
import io
import json
import re
import tempfile
import time
from contextlib import contextmanager, redirect_stdout
from html.parser import HTMLParser
from pathlib import Path

import pytest
from dashboard_driver import Driver
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_pairs import SITES, pairs, write_pair
from starlette.testclient import TestClient

from tapscope.cli import main
from tapscope.comparator import CompareOptions
from tapscope.core import formatting
from tapscope.dashboard.app import TapscopeApp
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.diff_source import DiffSource
from tapscope.dashboard.live_run import LiveRun
from tapscope.dashboard.model.live import view_at
from tapscope.dashboard.model.series import metric_series
from tapscope.dashboard.screens.live import LivePane
from tapscope.dashboard.series_text import series_lines
from tapscope.dashboard.web.app import create_app
from tapscope.dashboard.web.login import Login
from tapscope.dashboard.web.roots import Roots

pytestmark = pytest.mark.usefixtures("no_rest")


class Cells(HTMLParser):
    """Parser for the rows of the findings table, as lists of cell texts."""

    def __init__(self, text):
        super().__init__()
        self.rows, self._cell, self._in = [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._in |= tag == "table" and dict(attrs).get("id") == "findings"
        if self._in and tag == "tr":
            self.rows.append([])
        if self._in and tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self._in &= tag != "table"

    def handle_data(self, data):
        if self._in and self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip("\n")


def printed(*words):
    out = io.StringIO()
    with redirect_stdout(out):
        main([str(word) for word in words])
    return out.getvalue()


def served(root):
    """Return the view of the comparison from the web API, and its pages of findings."""
    login = Login()
    with TestClient(create_app(Roots([root]), login), base_url="http://127.0.0.1") as client:
        client.get(f"/login?token={login.link}")
        runs = {run["name"]: run["id"] for run in client.get("/api/runs").json()["runs"]}
        job = client.post(f"/api/diffs?baseline={runs['base']}&target={runs['target']}").json()
        for _ in range(1000):
            if job["state"] != "running":
                break
            time.sleep(0.01)
            job = client.get(f"/api/diffs/{job['id']}").json()
        return client.get(f"/api/diffs/{job['id']}/view").json()["view"]


async def rows_on_screen(root):
    """Return every row of the finding table and the answer as the terminal shows them."""

    def open_source(way, progress):
        return DiffSource.open((root / "base", root / "target"), way.of(CompareOptions()), progress)

    app = TapscopeApp(open_diff=(open_source, "base → target"))
    async with app.run_test(size=(200, 60)) as pilot:
        driver = Driver(app, pilot)
        await driver.settle()
        table = app.screen.query_one("FindingTable")
        table.set_findings(app.screen.source.report.findings, 0)
        width = table.size.width
        return [table.format_row(i, width).plain for i in range(len(table.findings))]


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs())
def test_every_front_end_shows_the_same_numbers(pair):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_pair(root, *pair)
        text = printed("diff", root / "base", root / "target", "--all", "--html", root / "a.html")
        lines = list(map(json.loads, printed("diff", root / "base", root / "target", "--json").splitlines()))
        view = served(root)
        report = Cells((root / "a.html").read_text())
        screen = asyncio.run(rows_on_screen(root))
    raw = {line["site"]: line for line in lines if line["type"] == "finding"}
    html = {row[1]: row for row in report.rows[1:]}
    assert len(view["findings"]) == len(raw) == len(html) == len(screen)
    for finding, on_screen in zip(sorted(view["findings"], key=lambda f: f["order"]), screen, strict=True):
        line, site = raw[finding["site"]], finding["site"]
        # raw numbers: the web API returns those of --json
        assert finding["verdict"] == line["verdict"]
        assert finding["ratio"]["value"] in (line["ratio"], None)
        if line["metrics"]:
            for name in ("max_abs", "rel_l2", "mean_abs", "cosine"):
                assert finding[name]["value"] in (line["metrics"][name], None), name
        if finding["max_abs"]["value"] is not None:
            assert finding["max_abs"]["text"] == formatting.number(line["metrics"]["max_abs"])
        # formatted numbers: report, screen and API show the same strings
        shown = [finding[name]["text"] for name in ("ratio", "max_abs", "rel_l2")]
        assert html[site][2:5] == shown
        assert re.split(r"\s{2,}", on_screen)[1:4] == shown, on_screen
        assert finding["where"] == html[site][5]
    for fact in view["answer"]:
        for part in fact["text"].split("\n"):
            assert part in text
    assert view["exit_code"] == lines[-1]["exit_code"]


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs())
def test_show_and_the_web_have_the_same_statistics(pair):
    with tempfile.TemporaryDirectory() as folder:
        root, login = Path(folder), Login()
        write_pair(root, *pair)
        with TestClient(create_app(Roots([root]), login), base_url="http://127.0.0.1") as client:
            client.get(f"/login?token={login.link}")
            runs = {run["name"]: run["id"] for run in client.get("/api/runs").json()["runs"]}
            for site in SITES:
                found = client.get(f"/api/runs/{runs['target']}/tensor", params={"site": site, "step": 0}).json()
                text = printed("show", root / "target", site, "--step", 0)
                for line in found["statistics"]:
                    for number in re.findall(r"-?\d[\d.e+-]*", line):
                        assert number in text
                histogram = json.loads(printed("show", root / "target", site, "--step", 0, "--json").splitlines()[0])
                counts = histogram.get("histogram", {}).get("counts", [])
                assert sum(counts) == sum(each["count"] for each in found["histogram"])


@contextmanager
def session(root):
    """Return a logged-in client, and the ids of the runs below ``root``."""
    login = Login()
    with TestClient(create_app(Roots([root]), login), base_url="http://127.0.0.1") as client:
        client.get(f"/login?token={login.link}")
        yield client, {run["name"]: run["id"] for run in client.get("/api/runs").json()["runs"]}


@settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs())
def test_series_of_the_web_have_the_numbers_of_show_and_its_plot(pair):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_pair(root, *pair)
        with session(root) as (client, runs):
            for site in SITES:
                found = client.get(f"/api/runs/{runs['target']}/series", params={"site": site}).json()["series"]
                plot = printed("show", root / "target", site, "--plot")
                assert [each["name"] for each in found] == ["rms", "|max|"]
                for each in found:
                    (line,) = [line for line in plot.splitlines() if line.startswith(f"{each['name']} rank 0")]
                    assert line.endswith(f"  {each['text']}")
                for at, (rms, top) in enumerate(zip(*(each["points"] for each in found), strict=True)):
                    shown = json.loads(printed("show", root / "target", site, "--step", at, "--json").splitlines()[0])
                    stats = shown["stats"]
                    bad = bool(stats["nan"] + stats["posinf"] + stats["neginf"])
                    assert (rms["step"], rms["text"] == "not finite", top["value"] is None) == (at, bad, bad)
                    if not bad:
                        assert top["value"] == stats["absmax"]
                        assert top["text"] == formatting.number(stats["absmax"])
                        assert rms["value"] == pytest.approx((stats["sumsq"] / stats["count"]) ** 0.5)


_METRICS = st.dictionaries(
    st.sampled_from(["latency_s", "queue_bytes", "kv_pages_used", "num_tokens", "loss"]),
    st.floats(0, 1e12) | st.none(),
    max_size=5,
)


@settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs(), st.lists(_METRICS, min_size=3, max_size=3))
def test_live_views_have_the_numbers_of_info_and_of_the_finished_run(pair, metrics):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_pair(root, *pair, metrics=metrics)
        info = list(map(json.loads, printed("info", root / "target", "--json").splitlines()))
        known = {line["name"]: line for line in info if line["type"] == "metric"}
        view, pane = LiveRun(root / "target").read(), LivePane(is_controlled=False)
        source = RunSource.open(root / "target")
        whole = [line.plain for line in series_lines([metric_series(source)], 200)]
        with session(root) as (client, runs):
            for step in (None, *(point.step for point in view.points)):
                words = {"poll": True} | ({} if step is None else {"step": step})
                page = client.get(f"/api/runs/{runs['target']}/live", params=words).json()
                pane.shown = view if step is None else view_at(view, step)
                screen = [line.plain for line in pane.lines(200, 60)]
                for fact in page["facts"]:
                    if fact["label"] != "records/s":
                        assert re.search(rf"{re.escape(fact['label'])} +{re.escape(fact['text'])}", screen[0]), screen
                for each in page["series"]:
                    (line,) = [line for line in screen if line.startswith(f"{each['name']} ")]
                    assert line.endswith(f"  {each['text']}")
        found = {each["name"]: each for each in client_series(page)}
        assert page["steps"] == [point.step for point in view.points] == list(source.steps)
        assert (view.num_records, view.num_steps) == (info[0]["num_records"], len(source.steps))
        for name, line in known.items():
            values = [point["value"] for point in found[name]["points"]]
            finite = [value for value in values if value is not None]
            assert (len(values), min(finite, default=None), max(finite, default=None)) == (
                line["num_steps"],
                line["min"],
                line["max"],
            )
            assert any(each.startswith(f"{name} rank 0") and each.endswith(found[name]["text"]) for each in whole)


def client_series(page):
    """Return the series of the metrics only."""
    return [each for each in page["series"] if each["name"] not in ("records", "dropped")]
