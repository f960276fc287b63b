"""Calls of one site are matched by the tags of explicit dumps, as SGLang's comparator matches them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compare_runs import diff
from sglang_dumps import SglangDump

VALUES = {"pre": 0.3, "mid": 0.7, "post": 1.1}


def dumped(folder: Path, steps: list[list[str]], *, bug: str = "", **tags: Any) -> Path:
    """``x`` is dumped once per stage in each step; ``bug``: a stage whose values are 5 % off."""
    dump = SglangDump(folder)
    for step, stages in enumerate(steps):
        ids = torch.arange(5) + 5 * step
        dump.step(input_ids=ids, positions=ids, seq_lens=[5 * step + 5], rids=["r"])
        for stage in stages:
            values = torch.sin(ids[:, None] * torch.arange(1.0, 9.0) * VALUES[stage] + 1.0)
            dump.dump("x", values * (1.05 if stage == bug else 1.0), dims="t h", layer_id=1, stage=stage, **tags)
    return folder


@pytest.mark.parametrize("order", [["post", "mid", "pre"], ["mid", "pre", "post"]])
def test_calls_in_another_order_match_by_tag(tmp_path: Path, order: list[str]) -> None:
    base = dumped(tmp_path / "base", [["pre", "mid", "post"]] * 2)
    report = diff(base, dumped(tmp_path / "same", [order] * 2, run="two"))
    assert (report.num_bad, report.exit_code) == (0, 0)
    assert report.coverage.num_sites_matched == 6
    divergence = diff(base, dumped(tmp_path / "bug", [order] * 2, bug="pre")).first_divergence
    assert divergence is not None
    number = order.index("pre")
    assert divergence.site == ("layers.1:tap[x]" if not number else f"layers.1:tap[x]#{number}")


def test_calls_that_only_some_steps_make_match_by_tag(tmp_path: Path) -> None:
    base = dumped(tmp_path / "base", [["pre", "mid", "post"], ["mid", "post"]])
    report = diff(base, dumped(tmp_path / "one", [["post"], ["post"]]))
    assert report.num_bad == 0
    assert any("lack" in sentence for sentence in report.coverage.partial)
    report = diff(base, dumped(tmp_path / "bug", [["post"], ["post"]], bug="post"))
    assert report.num_bad == 1


def test_calls_with_tags_of_one_run_match_by_number(tmp_path: Path) -> None:
    base = dumped(tmp_path / "base", [["pre", "pre"]])
    dump = SglangDump(tmp_path / "other")
    dump.step(input_ids=list(range(5)), positions=list(range(5)), seq_lens=[5], rids=["r"])
    for where in ("a", "b"):
        values = torch.sin(torch.arange(5)[:, None] * torch.arange(1.0, 9.0) * VALUES["pre"] + 1.0)
        dump.dump("x", values, dims="t h", layer_id=1, where=where)
    report = diff(base, tmp_path / "other")
    assert (report.num_bad, report.exit_code) == (0, 0)
