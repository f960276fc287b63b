"""Report files: HTML, Markdown and JUnit XML, of ordinary and of hostile runs."""

import dataclasses
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_pair import SITE, toy_pair

from tapscope.cli import main
from tapscope.comparator import Verdict, compare_open_runs
from tapscope.core.formatting import printable
from tapscope.dashboard.model.diff import DiffView, HashedSteps, diff_view
from tapscope.dashboard.model.grid import Grid, GridColumn, GridRow
from tapscope.dashboard.model.permalink import parse_permalink
from tapscope.dashboard.report.html import html_report, render
from tapscope.dashboard.report.junit import junit_report
from tapscope.dashboard.report.markdown import markdown_report
from tapscope.sources import open_run

HOSTILE = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "<!--<script>",
    "{{7*7}}{% raw %}",
    "\x1b]0;title\x07\x1b[31m",
    "a\u202eb\u2066c\u200f",
    "\u2028\u2029\x00\x85",
    "](javascript:alert(1)) @everyone #1 | `code`",
    "]]>&lt;!ENTITY x>",
)
STRINGS = st.sampled_from(HOSTILE) | st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return toy_pair(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def compared(root):
    with open_run(root / "base") as baseline, open_run(root / "target") as target:
        yield (baseline, target), compare_open_runs(baseline, target)


class Page(HTMLParser):
    """Parser for elements, attributes and text of a page, and for the data of its heat map."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.strings, self._open = [], [], [], ""
        self.data = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self._open = dict(attrs).get("id", tag) if tag == "script" else ""

    def handle_endtag(self, tag):
        self._open = ""

    def handle_data(self, data):
        if self._open == "data":
            self.data += data
        else:
            self.strings.append(data)


def test_html_report_holds_answer_causes_and_values(compared):
    runs, comparison = compared
    page = Page(html_report(comparison, runs, equal_steps=HashedSteps.of(runs), made="2026-01-02 03:04 UTC"))
    text = "".join(page.strings)
    view = diff_view(comparison.report, runs)
    for fact in (*view.answer, *view.account):
        assert fact.text in text
    assert "1 cause" in text
    assert f"{len(view.causes[0].downstream)} downstream" in text
    for finding in view.findings:
        assert finding.site in text
    data = json.loads(page.data)
    assert [row["label"] for row in data["layers"]["rows"] if row["is_cause"]] == ["layer 2"]
    assert len(data["sites"]["rows"]) == len(view.findings)


def test_html_report_loads_nothing(compared):
    runs, comparison = compared
    text = html_report(comparison, runs)
    page = Page(text)
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    assert not [each for each in page.attributes if each[1] in ("src", "href", "action", "srcset")]
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|WebSocket|import\(", text)
    policy = next(value for _, name, value in page.attributes if name == "content" and "default-src" in value)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")


def replaced(view, text):
    """Return the view with every name and sentence replaced by ``text``."""
    if isinstance(view, str):
        return text
    if isinstance(view, tuple):
        return tuple(replaced(each, text) for each in view)
    if dataclasses.is_dataclass(view):
        kept = {"state", "verdict", "glyph", "glyphs", "role"}
        members = {f.name: getattr(view, f.name) for f in dataclasses.fields(view)}
        return dataclasses.replace(view, **{n: v if n in kept else replaced(v, text) for n, v in members.items()})
    return view


def hostile_grid(view, text):
    num = max(finding.order for finding in view.findings) + 1
    rows = tuple(GridRow(text, text, Verdict.DIFFERS, (i,)) for i in range(num))
    return Grid(rows, (GridColumn(0, 0),), np.full((num, 1), 7.0), np.full((num, 1), 6, np.uint8))


def test_html_report_shows_hostile_names_as_text(compared):
    @settings(deadline=None, max_examples=25)
    @given(STRINGS)
    def check(text):
        runs, comparison = compared
        view = diff_view(comparison.report, runs)
        view = dataclasses.replace(view, findings=view.findings[60:75])
        plain = Page(render(replaced(view, "name"), hostile_grid(view, "name")))
        html = render(replaced(view, text), hostile_grid(view, text))
        page = Page(html)
        assert page.tags == plain.tags
        assert [(tag, name) for tag, name, _ in page.attributes] == [(tag, name) for tag, name, _ in plain.attributes]
        for tag, name, value in page.attributes:
            if not name.startswith("aria-"):
                assert (tag, name, value) in plain.attributes
        assert printable(html.replace("\n", "")) == html.replace("\n", "")
        assert json.loads(page.data)["sites"]["rows"][0]["label"] == printable(text)

    check()


def test_markdown_report_shows_hostile_names_as_text(compared):
    @settings(deadline=None, max_examples=25)
    @given(STRINGS)
    def check(text):
        runs, comparison = compared
        view = dataclasses.replace(diff_view(comparison.report, runs), findings=())
        written = markdown_report(replaced(view, text))
        outside = re.sub(r"```text\n.*?\n```", "", written, flags=re.DOTALL)
        outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", outside)
        for line in outside.splitlines():
            assert not re.search(r"<(?!/?(?:details|summary)>)", line)
            assert not re.search(r"(?<!\\)\]\(|(?<![&;\w])@\w", line)
        assert printable(written.replace("\n", "")) == written.replace("\n", "")

    check()


def test_markdown_report_links_to_the_worst_value_of_every_cause(compared):
    runs, comparison = compared
    view = diff_view(comparison.report, runs)
    written = markdown_report(view)
    assert view.causes
    for cause in view.causes:
        assert f"value `{cause.link}`" in written
        assert parse_permalink(cause.link).site == cause.site


def test_junit_report_is_well_formed_for_hostile_names(compared):
    @settings(deadline=None, max_examples=25)
    @given(STRINGS)
    def check(text):
        runs, comparison = compared
        view: DiffView = diff_view(comparison.report, runs)
        suites = ElementTree.fromstring(junit_report(replaced(view, text)))
        assert len(list(suites.iter("testcase"))) >= len(view.findings)
        assert int(suites.get("failures")) == sum(finding.is_bad for finding in view.findings)

    check()


def test_html_report_of_600_sites_and_200_steps_is_below_1_mb(compared):
    runs, comparison = compared
    view = diff_view(comparison.report, runs)
    rng = np.random.default_rng(0)
    findings = tuple(
        dataclasses.replace(view.findings[69 + i % 30], order=i, site=f"model.layers.{i // 10}.attn.o_proj_{i}:out")
        for i in range(600)
    )
    ratios = 10 ** rng.uniform(-2, 6, (600, 200))
    codes = np.where(ratios > 1, 6, 4).astype(np.uint8)
    rows = tuple(GridRow(f.site, f.site, Verdict.DIFFERS, (i,)) for i, f in enumerate(findings))
    grid = Grid(rows, tuple(GridColumn(i, i) for i in range(200)), ratios, codes)
    text = render(dataclasses.replace(view, findings=findings, num_findings=600), grid)
    assert len(text.encode()) <= 1_000_000
    data = json.loads(Page(text).data)
    assert len(data["sites"]["columns"]) == 200
    assert len(data["sites"]["rows"]) == 600


def test_diff_writes_every_report_file(root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["diff", str(root / "base"), str(root / "target")]
    code = main([*words, "--html", "a.html", "--markdown", "a.md", "--junit", "a.xml"])
    assert code == 1
    printed = capsys.readouterr().out
    assert main(words) == 1
    assert capsys.readouterr().out == printed  # the files are written in addition to the text
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.html", "a.md", "a.xml"]
    assert "down\\_proj" in (tmp_path / "a.md").read_text()
    suite = ElementTree.parse(tmp_path / "a.xml").getroot()
    assert suite.get("tests") == "100"


def test_diff_names_the_directory_that_does_not_exist(root, tmp_path, capsys):
    file = tmp_path / "missing" / "a.html"
    assert main(["diff", str(root / "base"), str(root / "target"), "--html", str(file)]) != 0
    assert f"cannot write {file}: no directory {file.parent}" in capsys.readouterr().err


def test_show_writes_one_tensor_as_html(root, tmp_path, capsys):
    file = tmp_path / "tensor.html"
    assert main(["show", str(root / "base"), SITE, "--html", str(file)]) == 0
    page = Page(file.read_text())
    text = "".join(page.strings)
    assert SITE in text
    assert "fp32 22×64" in text
    assert "script" not in page.tags
    assert page.tags.count("svg") == 2
