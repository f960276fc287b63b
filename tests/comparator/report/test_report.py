"""The report: the table, the JSON lines and the exit code tell one story, byte for byte."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparator_toy import Toy, damaged, prompts, weights
from compare_runs import diff
from factories import RunFactory
from rich.cells import cell_len

from tapscope.cli import main
from tapscope.comparator import Report, compare, compare_open_runs
from tapscope.comparator.report.answer import answer
from tapscope.comparator.report.table import render
from tapscope.core.errors import RunNotFoundError
from tapscope.core.observe import RowSpan
from tapscope.sources import open_run

GOLDEN = Path(__file__).parents[1] / "golden"
TABLES = weights(layers=3)
CULPRIT = "model.layers.1.self_attn.o_proj"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    Toy(TABLES).write(path / "base", prompts((6, 4))).close()
    Toy(damaged(TABLES, CULPRIT, "noise"), dtype="bfloat16", tp=2).write(path / "bad", prompts((6, 4))).close()
    Toy(TABLES, dtype="bfloat16", tp=2).write(path / "good", prompts((6, 4))).close()
    return path


def written(path: Path, values: dict[str, Sequence[Any]]) -> None:
    """A run of powers of two, so that every number in the report is exact on any machine."""
    with RunFactory(path, dtype="float32") as run:
        run.step(grid=(4,), rows=[RowSpan("chat-1", 0, 4, 0, 0)], token_ids=[5, 6, 7, 8])
        for site, (value, dims) in values.items():
            run.put(site, value, dims=dims)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("exact")
    ones, ids = np.ones((4, 8), np.float32), np.arange(4)
    spoiled = ones.copy()
    spoiled[2, 3] = np.nan
    base = {f"model.layers.{i}.mlp:out": (ones, "t h") for i in range(3)}
    base = {":in[input_ids]": (ids, "t"), **base, "model.norm:out": (ones, "t h"), "lm_head:out": (ones, "t h")}
    written(path / "base", {**base, "extra:out": (ones, "t h")})
    target = {
        **base,
        "model.layers.1.mlp:out": (ones * 2, "t h"),
        "model.layers.2.mlp:out": (ones * 2, "t h"),
        "model.norm:out": (ones[:, :4], "t h"),
        "lm_head:out": (spoiled, "t h"),
        "sampler:out": (ids, "t"),
    }
    written(path / "target", target)
    return path / "base", path / "target"


def report(baseline: Path, target: Path, **options: Any) -> Report:
    return diff(baseline, target, **options)


def lines(found: Report, **how: Any) -> list[str]:
    return [line.plain for line in render(found, **how)]


def check_golden(name: str, text: str, root: Path) -> None:
    text = text.replace(str(root), "RUNS")
    path = GOLDEN / name
    if not path.exists():
        path.write_text(text)
        pytest.fail(f"{path} was missing and has been written; look at it and run again")
    assert text == path.read_text()


def test_report_table_golden(exact: tuple[Path, Path]) -> None:
    text = "\n".join(lines(report(*exact), width=100)) + "\n"
    check_golden("comparator_table.txt", text, exact[0].parent)


def test_report_json_lines_golden(exact: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", *map(str, exact), "--json"]) == 1
    out = capsys.readouterr().out
    for line in out.splitlines():
        assert {"type", "schema"} <= json.loads(line).keys()
    check_golden("comparator_lines.jsonl", out, exact[0].parent)


def test_report_json_schema_1_golden(exact: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", *map(str, exact), "--json", "--json-schema", "1"]) == 1
    check_golden("comparator_lines_schema_1.jsonl", capsys.readouterr().out, exact[0].parent)


def test_report_table_and_json_agree_on_every_number(runs: Path) -> None:
    found = report(runs / "base", runs / "bad")
    rows = lines(found, width=200, top=None)
    for item in (line for line in found.to_json() if line["type"] == "finding"):
        row = next(r for r in rows if r[2:].startswith(f"{item['site']} "))
        if item["metrics"] and item["verdict"] == "differs":
            assert f"{item['metrics']['max_abs']:.1e}" in row
            assert f"{item['metrics']['rel_l2']:.1e}" in row


def test_report_last_four_lines_are_the_answer(runs: Path) -> None:
    what, where, why, following = lines(report(runs / "base", runs / "bad"))[-4:]
    assert re.match(rf"what      {CULPRIT} \(seen at {CULPRIT}.partial:out\) differs: [\d.]+ × the floor \(", what)
    assert why == "why       inputs close; no tested hypothesis explains it"
    assert re.match(r"where     step 0, layer 1; most tokens, worst in request 0, position \d, column \d+$", where)
    assert following == f"next      tapscope show {runs / 'bad'} {CULPRIT}.partial:out --step 0"


def test_report_answer_has_cause_and_command(runs: Path, tmp_path: Path) -> None:
    Toy(TABLES, tp=2, hooks={f"{CULPRIT}:out": lambda x: x * 2}).write(tmp_path / "twice", prompts((6, 4))).close()
    found = report(runs / "base", tmp_path / "twice")
    cause = "target = 2 × baseline, as if summed over tp=2 once too often (a doubled all-reduce)"
    cause += " (removes 100 % of the error)"
    shown = f"next      tapscope show {tmp_path / 'twice'} {CULPRIT}:out --step 0"
    assert lines(found)[-2:] == [
        f"why       {cause}; inputs and everything inside it close",
        shown,
    ]
    summary = list(found.to_json())[-1]
    assert summary["first_divergence"]["explanation"]["name"] == "all-reduce"
    assert summary["first_divergence"]["explanation"]["text"] == cause


def test_report_agreement_states_the_largest_ratio(runs: Path) -> None:
    found = report(runs / "base", runs / "good")
    verdicts, what, where, why, following = lines(found)[-5:]
    assert "0 differs" in verdicts
    assert found.max_ratio_finding is not None
    assert what == "what      agrees"
    assert why.startswith(
        f"why       the largest error is {found.max_ratio_finding.ratio:.2f} of what rounding explains, at "
    )
    assert found.max_ratio_finding.site in why
    assert where == f"where     {found.coverage.num_sites_matched} sites, 10 token rows"
    assert following == f"next      tapscope view {runs / 'base'} {runs / 'good'}"


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_report_numbers_are_not_truncated_and_sites_keep_their_tail(runs: Path, width: int) -> None:
    found = report(runs / "base", runs / "bad")
    rows = lines(found, width=width, top=None)
    culprit = next(r for r in rows if r.startswith("! "))
    numbers = next(f.metrics for f in found.findings if f.verdict.is_bad)
    assert numbers is not None
    assert f"{numbers.max_abs:.1e}" in culprit
    assert "artial:out" in culprit
    assert all(cell_len(r) <= width for r in rows if r[:2] in ("= ", "~ ", "! "))


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_report_wraps_sentences_but_not_commands(runs: Path, width: int) -> None:
    found = report(runs / "base", runs / "bad")
    whole, broken = lines(found, width=width), lines(found, width=width, wrap=True)
    start = next(i for i, line in enumerate(whole) if line.startswith("coverage"))
    ending = broken[next(i for i, line in enumerate(broken) if line.startswith("coverage")) :]
    *_, command = ending
    assert command == whole[-1]
    assert all(cell_len(line) <= width or " " not in line[10:] for line in ending[:-1])
    assert all(line[:10].strip() in ("", line.split()[0]) for line in ending)
    assert " ".join(" ".join(ending).split()) == " ".join(" ".join(whole[start:]).split())


@pytest.mark.parametrize("width", [40, 50, 60, 200])
def test_report_shortened_names_stay_distinct(tmp_path: Path, width: int) -> None:
    names = [f"model.layers.{i}.self_attn.{part}_proj:in[hidden_states]" for i in (0, 1, 10) for part in "qkv"]
    for name, scale in (("a", 1), ("b", 2)):
        with RunFactory(tmp_path / name) as run:
            run.step()
            for i, site in enumerate(names):
                run.put(site, np.full((4, 6), scale * (i + 1), np.float32), dims="t h")
    rows = [row for row in lines(report(tmp_path / "a", tmp_path / "b"), width=width) if row.startswith("! ")]
    assert len({row.split()[1] for row in rows}) == len(names)


def test_report_downstream_findings_are_folded_and_counted(runs: Path) -> None:
    found = report(runs / "base", runs / "bad", rtol=0.0, atol=1e-6)
    rows = lines(found, top=3)
    hidden = next(r for r in rows if r.startswith("   … "))
    assert hidden == f"   … {found.num_bad - 3} more differ, all downstream; --all lists them"
    assert sum(r.startswith("! ") for r in rows) == 3
    assert sum(r.startswith("! ") for r in lines(found, top=None)) == found.num_bad


def test_report_brackets_in_a_site_are_not_markup(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(runs / "base"), str(runs / "good"), "--all"]) == 0
    assert ":in[input_ids]" in capsys.readouterr().out


def test_report_exit_codes_and_streams(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = str(runs / "base")
    assert main(["diff", base, str(runs / "good")]) == 0
    assert main(["diff", base, str(runs / "bad")]) == 1
    capsys.readouterr()
    assert main(["diff", base, base, "--site", "layers.77.*"]) == 2
    assert main(["diff", base, base, "--layers", "x"]) == 2
    assert main(["diff", base, base, "--top", "0"]) == 2
    assert main(["diff", base, str(tmp_path / "none")]) == 3
    Toy(TABLES).write(tmp_path / "other", {"z": [1, 2]}).close()
    assert main(["diff", base, str(tmp_path / "other")]) == 3
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "layers are 0-2" in streams.err
    assert "no token row in common" in streams.err


def test_report_partial_data_is_reported_and_can_be_allowed(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Toy(TABLES).write(tmp_path / "half", {"0": prompts((6, 4))["0"]}).close()
    assert main(["diff", str(runs / "base"), str(tmp_path / "half")]) == 1
    out = capsys.readouterr().out
    assert "missing   request 1 is only in base" in out
    assert "\nwhat      agrees where compared, but the data are partial\n" in out
    assert "\nwhy       request 1 is only in base" in out
    assert main(["diff", str(runs / "base"), str(tmp_path / "half"), "--allow-partial"]) == 0


def test_report_unfinished_run_is_compared_with_a_warning(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    still = tmp_path / "open"
    Toy(TABLES).write(still, prompts((6, 4))).close()
    index = still / "rank-00000" / "records.jsonl"
    index.write_text("".join(line for line in index.read_text().splitlines(True) if '"close"' not in line))
    assert main(["diff", str(runs / "base"), str(still)]) == 0
    streams = capsys.readouterr()
    assert streams.err.count("was never closed by its recorder") == 1
    (still / "recorder.json").write_text('{"host": "another"}')
    assert main(["diff", str(still), str(still)]) == 0
    assert capsys.readouterr().err.count("is still being recorded") == 1
    assert "still recording, or killed with its recorder: rank 0" in streams.out


def test_report_diff_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "--help"]) == 0
    out = capsys.readouterr().out
    flags = {word.strip(",[]") for word in out.split() if word.strip(",[]").startswith("--")}
    expected = [
        "--site",
        "--skip",
        "--layers",
        "--steps",
        "--shift-steps",
        "--ranks",
        "--map",
        "--dims",
        "--mesh",
        "--rtol",
        "--atol",
        "--noise-run",
        "--margin",
        "--detail",
        "--rule",
        "--allow-partial",
        "--top",
        "--all",
        "--json",
    ]
    assert set(expected) <= flags


def test_report_runs_of_different_models_are_one_sentence(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"model.layers.{i}.{part}:out" for i in range(3) for part in ("self_attn", "mlp")]
    for name, width, layers in (("narrow", 8, 3), ("wide", 16, 2)):
        with RunFactory(tmp_path / name, model_config={"hidden_size": width, "num_hidden_layers": layers}) as run:
            run.step(grid=(4,), rows=[RowSpan("a", 0, 4, 0, 0)], token_ids=range(4))
            run.put(":in[input_ids]", np.arange(4), dims="t")
            for site in names[: 2 * layers]:
                run.put(site, np.ones((4, width), np.float32), dims="t h")
    assert main(["diff", str(tmp_path / "narrow"), str(tmp_path / "wide")]) == 3
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.count("\n") == 1
    assert "are of different models (hidden_size 8 against 16, num_hidden_layers 3 against 2)" in streams.err
    assert "4 of the 4 tensors they share have different widths, e.g. model.layers.0.self_attn:out" in streams.err


def test_report_lists_hyperparameters_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, eps in (("a", 1e-6), ("b", 1e-5)):
        with RunFactory(tmp_path / name, model_config={"hidden_size": 8, "rms_norm_eps": eps}) as run:
            run.step(grid=(4,), rows=[RowSpan("a", 0, 4, 0, 0)], token_ids=range(4))
            run.put("norm:out", np.ones((4, 8), np.float32), dims="t h")
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    said = "note      the models are configured differently: rms_norm_eps 1e-06 against 1e-05\n"
    assert said in capsys.readouterr().out


def test_report_repr_is_one_line_and_str_is_the_answer(runs: Path) -> None:
    report = compare(str(runs / "base"), runs / "bad")
    assert str(report).splitlines() == answer(report)
    assert [line.split()[0] for line in str(report).splitlines()] == ["what", "where", "why", "next"]
    with open_run(runs / "base") as run:
        shown = [report, report.first_divergence, report.findings[0], run, run.steps, run.records]
        shown += [run.steps[0][0], compare_open_runs(run, run).report]
        assert [text for text in map(repr, shown) if len(text) > 300 or "\n" in text or text[0] != "<"] == []
        assert repr(run) == f"<Run {run.path}: {len(run.records):,} records, 1 step, 1 rank>"
    assert report.first_divergence.module in repr(report)
    assert "exit code 1>" in repr(report)


def test_report_path_without_a_run_is_one_sentence(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match="nowhere"):
        compare(runs / "base", tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("fail_on", "code", "said"),
    [
        ("default", 1, ""),
        ("differs", 1, ""),
        ("shape", 1, ""),
        ("missing", 1, "; fails on missing"),
        ("inexact", 1, "; fails on inexact"),
        ("partial", 0, "; not in --fail-on: differs, nonfinite, shape"),
        ("none", 0, "; not in --fail-on: differs, nonfinite, shape"),
    ],
)
def test_fail_on_decides_the_exit_code(
    exact: tuple[Path, Path], capsys: pytest.CaptureFixture[str], fail_on: str, code: int, said: str
) -> None:
    assert main(["diff", *map(str, exact), "--fail-on", fail_on]) == code
    what = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("what "))
    assert what.endswith(said) if said else "; fails" not in what and "--fail-on" not in what


def test_fail_on_inexact_fails_runs_that_differ_by_rounding(runs: Path) -> None:
    both = runs / "base", runs / "good"
    assert report(*both).exit_code == 0
    found = report(*both, fail_on=frozenset({"inexact"}))
    assert (found.exit_code, found.failed) == (1, {"inexact"})
    assert report(*both, fail_on=frozenset({"inexact"}), allow_differ=("*",)).exit_code == 0


def test_fail_on_missing_respects_allow_missing(exact: tuple[Path, Path]) -> None:
    only = {"fail_on": frozenset({"missing"}), "skip": ("lm_head*",)}
    assert report(*exact, **only).exit_code == 1
    assert report(*exact, **only, allow_missing=("extra*", "sampler*")).exit_code == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("difers", "unknown condition 'difers' (did you mean differs?); use default"),
        ("none,shape", "'none' excludes other conditions"),
        ("", "unknown condition ''"),
    ],
)
def test_fail_on_refuses_unknown_conditions(
    exact: tuple[Path, Path], capsys: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    assert main(["diff", *map(str, exact), "--fail-on", text]) == 2
    assert reason in capsys.readouterr().err


def test_sqnr_ranks_outputs_and_rules_may_use_it(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = [str(runs / "base"), str(runs / "bad")]
    main(["diff", *both, "--sqnr", "3"])
    ranked = [line for line in capsys.readouterr().out.splitlines() if " dB  " in line]
    levels = [float(line.replace("sqnr", "").split()[0]) for line in ranked]
    assert ranked[0].startswith("sqnr ")
    assert len(levels) == 3
    assert levels == sorted(levels)
    found = report(*map(Path, both))
    metrics = next(f.metrics for f in found.findings if f.site == f"{CULPRIT}:out")
    assert metrics is not None
    assert metrics.sqnr == pytest.approx(-20 * np.log10(metrics.rel_l2))
    good = [str(runs / "base"), str(runs / "good")]
    assert main(["diff", *good, "--rule", ":out=sqnr > 20"]) == 0
    assert main(["diff", *good, "--rule", ":out=sqnr > 90"]) == 1
