"""Notebook output of runs, records and reports: small tables without markup from files."""

from html.parser import HTMLParser

import numpy as np
import pytest
from factories import RunFactory
from hypothesis import given
from hypothesis import strategies as st

from tapscope import open_run
from tapscope.comparator import compare
from tapscope.core.html_table import html_table

EVIL = '<img src=x onerror="alert(1)">\x1b[31m'


class Cells(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.strings = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.strings.append(data)


@given(st.text())
def test_html_table_shows_any_text_as_text(text):
    assert set(Cells(html_table([(text, "x")], (text, "b"), text)).tags) <= {
        "table", "caption", "thead", "tbody", "tr", "th", "td"
    }  # fmt: skip


@pytest.fixture
def runs(tmp_path):
    for name, scale in (("base", 1), ("target", 3)):
        with RunFactory(tmp_path / name, model=EVIL, dtype="float32", mesh={"tp": 2}) as run:
            run.step()
            run.put(f"layers.0.{EVIL}:out", dict.fromkeys(range(2), scale * np.ones((2, 4), np.float32)))
    return tmp_path


def test_run_and_record_are_tables(runs):
    with open_run(runs / "base") as run:
        shown = Cells(run._repr_html_())
        assert {"model", "tp=2", "closed", "records", "2"} <= set(shown.strings)
        assert "img" not in shown.tags
        assert "<img" in "".join(shown.strings)
        assert "\x1b" not in run._repr_html_()
        record = Cells(run.records[0]._repr_html_())
        assert {"2×4", "float32", "rms", "1.0e+00", "0 of 8"} <= set(record.strings)
        assert "img" not in record.tags


def test_report_is_its_answer_and_the_bad_findings(runs):
    report = compare(runs / "base", runs / "target")
    shown = Cells(report._repr_html_())
    assert {"what", "where", "why", "next", "bad findings", "error ÷ floor", "differs"} <= set(shown.strings)
    assert "img" not in shown.tags
    equal = Cells(compare(runs / "base", runs / "base")._repr_html_())
    assert equal.tags.count("table") == 1
