"""The diff screen: every key, pressed on a real screen over two runs on disk."""

import asyncio
import itertools
import json
import shutil
import threading
from contextlib import asynccontextmanager
from contextvars import copy_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from comparator_toy import Toy, weights
from dashboard_driver import Driver
from factories import RunFactory
from textual.widgets import Input
from textual.worker import active_worker

from tapscope.cli import main
from tapscope.comparator import CompareOptions, Verdict, compare_open_runs
from tapscope.comparator.options.overrides import parse_dims
from tapscope.core.errors import NothingInCommonError
from tapscope.dashboard import messages
from tapscope.dashboard.app import TapscopeApp
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.compare_settings import CompareSettings
from tapscope.dashboard.diff_source import DiffSource
from tapscope.dashboard.keymap import DIFF_KEYS
from tapscope.dashboard.model.diff import diff_view
from tapscope.dashboard.model.finding_grid import step_verdict
from tapscope.dashboard.model.permalink import parse_permalink
from tapscope.dashboard.screens.diff import DiffScreen
from tapscope.dashboard.screens.help import DIFF_WORDS, HelpScreen, help_text
from tapscope.dashboard.screens.tensor import TensorScreen
from tapscope.dashboard.theme import NAMES
from tapscope.dashboard.widgets.status_bar import KeyBar, status_line
from tapscope.sources import open_run

pytestmark = pytest.mark.usefixtures("no_rest")

PROMPTS = {"0": list(range(3, 20)), "1": list(range(40, 51))}
SITE = "model.layers.2.mlp.down_proj:out"


def spoil(values):
    values = values.copy()
    if len(values) > 5:  # the first step
        values[5] *= 1.5
    return values


def spoiling(step):
    """Return a function that damages the values of one step; it is called once per step, in order."""
    steps = itertools.count()
    return lambda values: values * 1.5 if next(steps) == step else values


SHARDED = "model.layers.2.mlp.gate_proj:out"


def spoil_both(values):
    """Damage values on both ranks, more on the second."""
    values = values.copy()
    values[:, 3] += 4
    values[:, -3] += 9
    return values


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root, tables = tmp_path_factory.mktemp("diff"), weights()
    Toy(tables).write(root / "base", PROMPTS, steps=(11, 14)).close()
    Toy(tables, hooks={SITE: spoil}).write(root / "damaged", PROMPTS, steps=(11, 14)).close()
    Toy(tables, tp=2).write(root / "sharded", PROMPTS, steps=(11, 14)).close()
    Toy(tables, hooks={SITE: spoiling(1)}).write(root / "late", PROMPTS, steps=(11, 14)).close()
    Toy(tables, tp=2, hooks={SHARDED: spoil_both}).write(root / "split", PROMPTS, steps=(11, 14)).close()
    return root


class Viewer(Driver):
    """Test driver of the diff screen."""

    def text(self, widget):
        return str(self.screen.query_one(widget).render())

    def lines(self, widget):
        lines = self.screen.query_one(widget)
        return ["".join(s.text for s in lines.render_line(y)) for y in range(lines.size.height)]


def app_of(root, target="damaged", at=None, **options):
    def open_source(way, progress):
        paths = [root / "base", root / target]
        return DiffSource.open(
            tuple(paths[::-1] if way.swapped else paths), way.of(CompareOptions(**options)), progress
        )

    return TapscopeApp(open_diff=(open_source, f"base → {target}"), at=at)


@asynccontextmanager
async def running(app, size=(110, 36)):
    async with app.run_test(size=size) as pilot:
        driver = Viewer(app, pilot)
        await driver.settle()
        yield driver


def check(test, app, size=(110, 36)):
    async def run():
        async with running(app, size) as driver:
            await test(driver)

    asyncio.run(run())


def test_diff_screen_opens_at_the_culprit_with_the_answer(runs):
    async def test(driver):
        screen = driver.screen
        assert screen.table.finding.site == SITE
        assert all(f.verdict.is_bad for f in screen.table.findings)
        shown = " ".join(driver.screen.pair.text.split())  # long lines are wrapped at word boundaries
        for fact in screen.source.answer:
            assert " ".join(fact.text.split()) in shown
        answer = driver.text("#answer").splitlines()
        assert [line.split()[0] for line in answer] == ["what", "where", "why", "next"]
        assert answer[0].split()[1] == "model.layers.2.mlp.down_proj"
        assert "tokens" in shown
        assert "DIFFERS" in driver.text("#status")
        assert any("layer 2" in line and "◂" in line for line in driver.lines("#layers"))

    check(test, app_of(runs))


def test_layer_of_the_finding_is_in_sight_on_a_low_terminal(runs):
    async def test(driver):
        def shows_layer():
            return any("layer 2" in line and "◂" in line for line in driver.lines("#layers"))

        assert driver.screen.strip.cursor == 0
        assert shows_layer()
        await driver.press("d", "g")  # the first of all findings
        assert not shows_layer()
        await driver.press("f")
        assert shows_layer()
        await driver.pilot.resize_terminal(80, 9)
        assert shows_layer()
        await driver.press("shift+tab", "j")  # moving the cursor ends the follow mode
        assert any(line.startswith(">") for line in driver.lines("#layers"))

    check(test, app_of(runs), size=(80, 10))


def test_labels_of_the_heat_map_end_before_its_cells(runs):
    async def test(driver):
        lines = driver.lines("#layers")
        header = next(line for line in lines if line.strip().startswith("0"))
        cells = header.index("0")
        row = next(line for line in lines if "embed_tokens" in line or "emb…kens" in line)
        assert row[cells - 1] == " "
        assert row[cells] in "=~"
        assert any("all" in line.split() or "everything" in line for line in lines)

    for size in ((80, 24), (110, 36), (200, 60)):
        check(test, app_of(runs), size)


def test_report_continues_its_lines_behind_the_labels(runs):
    async def test(driver):
        def lines():
            return driver.app.screen.query_one("#help-text").content.plain.splitlines()

        await driver.press("i")
        narrow = lines()
        assert max(map(len, narrow)) <= 80
        assert all(line[:9].strip() in ("", *(line.split()[:1])) for line in narrow)
        at = next(i for i, line in enumerate(narrow) if line.startswith("what"))
        assert narrow[at + 1].startswith(" " * 10 + narrow[at + 1].split()[0])
        await driver.pilot.resize_terminal(300, 30)
        await driver.until(lambda: len(lines()) < len(narrow))

    check(test, app_of(runs), size=(80, 24))


def test_finding_pane_has_the_answer_only_while_the_bar_cuts_it(runs, monkeypatch):
    """Findings that arrive before the bar has been laid out, and a terminal that is resized."""

    def load_findings(self, source, query):
        worker = SimpleNamespace(is_cancelled=False)
        with_worker = copy_context()
        with_worker.run(active_worker.set, worker)
        self.post_message(with_worker.run(messages.FindingsReady, source.findings(query)))
        return worker

    monkeypatch.setattr(DiffScreen, "load_findings", load_findings)

    async def test(driver):
        for width, height, is_cut in ((160, 40, False), (90, 40, True), (160, 40, False), (160, 19, True)):
            await driver.pilot.resize_terminal(width, height)
            await driver.settle()
            await driver.until(lambda is_cut=is_cut: driver.screen.pair.text.startswith("what") is is_cut)

    check(test, app_of(runs), size=(160, 40))


def test_finding_pane_shows_the_damaged_row_in_tokens_and_values(runs):
    async def test(driver):
        await driver.press("v")
        worst = driver.screen.pair.text.splitlines()[2]
        assert worst.split()[:2] == ["0", "0:5"]
        await driver.press("v")
        shown = driver.screen.pair.text.splitlines()
        assert shown[0].startswith("step 0, row 0:5")
        base, target, delta = ([float(x) for x in line.split()[1:]] for line in shown[2:5])
        assert [1.5 * x for x in base] == pytest.approx(target, rel=1e-3, abs=1e-3)
        assert [t - b for b, t in zip(base, target, strict=True)] == pytest.approx(delta, rel=1e-2, abs=1e-3)

    check(test, app_of(runs))


def test_finding_table_filters_by_step_layer_and_search(runs):
    async def test(driver):
        screen = driver.screen
        every = len(screen.source.report.findings)
        await driver.press("d")
        assert screen.table.num_rows == every
        assert screen.table.finding.site == SITE  # the cursor stays
        await driver.press("right_square_bracket")
        assert screen.query_now.step == screen.source.steps[0]
        await driver.press("left_square_bracket", "left_square_bracket")
        assert screen.query_now.step is None
        assert "All steps" in screen.bar.said
        await driver.press("shift+tab", "g", "j")
        assert 0 < screen.table.num_rows < every
        await driver.press("f")
        assert screen.table.num_rows == every
        await driver.press("slash", *"gate_proj")
        assert {f.site.split(".")[-1].split(":")[0] for f in screen.table.findings} == {"gate_proj"}
        screen.query_one("#find", Input).value = "no such site"
        await driver.settle()
        assert "No site matches" in screen.table.empty_text
        await driver.press("enter", "escape")
        assert screen.table.num_rows == every

    check(test, app_of(runs))


def test_b_key_visits_bad_findings_and_wraps_around(runs):
    async def test(driver):
        screen = driver.screen
        await driver.press("d")
        orders = []
        for _ in range(screen.source.report.num_bad):
            orders.append(screen.table.finding.order)
            await driver.press("b")
        assert orders == sorted(orders)
        assert screen.table.finding.order == orders[0]
        await driver.press("B")
        assert screen.table.finding.order == orders[-1]

    check(test, app_of(runs))


def test_diff_screen_sorts_changes_measures_zooms_and_copies(runs):
    async def test(driver):
        screen = driver.screen
        await driver.press("s")
        ratios = [f.ratio for f in screen.table.findings]
        assert ratios == sorted(ratios, reverse=True)
        before = screen.table.measures
        await driver.press("m")
        assert screen.table.measures != before
        await driver.press("enter")
        assert not screen.query_one("#layers").display
        await driver.press("escape")
        assert screen.query_one("#layers").display
        await driver.press("y")
        assert driver.app.clipboard.startswith("tapscope diff ")

    check(test, app_of(runs))


def test_swap_key_exchanges_baseline_and_target(runs):
    async def test(driver):
        await driver.press("x")
        report = driver.screen.source.report
        assert (report.baseline.name, report.target.name) == ("damaged", "base")
        assert driver.screen.table.finding.site == SITE

    check(test, app_of(runs))


def test_export_key_writes_the_report_and_never_overwrites(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    async def test(driver):
        await driver.press("e", "e")
        first, second = sorted(tmp_path.glob("*.jsonl"), key=lambda p: len(p.name))
        assert first.read_text() == second.read_text()
        lines = [json.loads(line) for line in first.read_text().splitlines()]
        assert [lines[0]["type"], lines[-1]["type"]] == ["header", "summary"]
        assert driver.screen.bar.said == f"wrote {second}"

    check(test, app_of(runs))


def test_tolerance_line_rejudges_and_empty_restores_the_floor(runs):
    async def test(driver):
        screen = driver.screen
        await driver.press("colon", "7", "enter")
        assert screen.bar.said == "Step '7' was not compared; compared steps: 0-2."
        await driver.press("backspace", "1", "enter")
        assert screen.query_now.step == 1
        await driver.press("colon", "enter")
        assert screen.query_now.step is None
        await driver.press("equals_sign", *"5 x", "enter")
        assert "invalid tolerance '5 x'" in screen.bar.said
        await driver.press("backspace", "1", "enter")
        assert screen.source.report.options.tolerance == (1.0, 5.0)
        assert "AGREES" in driver.text("#status")
        assert "rtol 5 atol 1" in driver.text("#status")
        await driver.press("y")
        assert "--rtol 5.0 --atol 1.0" in driver.app.clipboard
        await driver.press("equals_sign")
        assert screen.query_one("#line", Input).value == "5 1"
        await driver.press("escape")
        assert screen.table.has_focus
        await driver.press("equals_sign", *["backspace"] * 3, "enter")
        assert screen.source.report.options.tolerance is None
        assert "DIFFERS" in driver.text("#status")

    check(test, app_of(runs))


def test_brace_keys_filter_findings_by_worst_rank(runs):
    async def test(driver):
        screen = driver.screen
        assert screen.table.finding.site == SHARDED
        await driver.press("left_curly_bracket")
        assert "All ranks" in screen.bar.said
        while screen.query_now.rank != 1:
            await driver.press("right_curly_bracket")
        assert SHARDED in {f.site for f in screen.table.findings}
        assert {f.worst.rank for f in screen.table.findings} == {1}
        await driver.press("right_curly_bracket")
        assert "Rank 1 is the last" in screen.bar.said
        await driver.press("f")
        assert screen.query_now.rank is None

    check(test, app_of(runs, "split"))


def test_finding_pane_measures_details_on_demand(runs):
    async def test(driver):
        await driver.press("v", "v", "v")
        shown = driver.screen.pair.text
        assert "ULP p99" in shown
        assert "channels with the largest errors" in shown
        assert "|Δ| from 2^" in shown
        await driver.press("d", "g")
        assert driver.screen.table.finding.site == ":in[input_ids]"
        assert "Nothing to measure" in driver.screen.pair.text

    check(test, app_of(runs))


def test_i_key_shows_the_report_without_findings(runs):
    async def test(driver):
        await driver.press("i")
        shown = driver.app.screen.query_one("#help-text").render().plain
        assert "coverage  100 sites matched" in shown
        assert "judged    " in shown
        words = " ".join(shown.split())  # long lines are wrapped at word boundaries
        for fact in driver.screen.source.answer:
            assert " ".join(fact.text.split()) in words
        driver.app.simulate_key("i")
        await driver.pilot.pause()
        assert driver.app.screen is driver.screen

    check(test, app_of(runs))


def test_swap_key_moves_one_sided_options_along(runs):
    options = {"dims": (parse_dims("target:*gate_proj:out=t h[tp]"),), "shift_steps": 1, "steps": frozenset({0})}
    turned = CompareSettings(swapped=True).of(CompareOptions(**options))
    assert [entry.side for entry in turned.dims] == ["baseline"]
    assert (turned.shift_steps, turned.steps) == (-1, {1})

    async def test(driver):
        await driver.press("x")
        assert driver.screen.source.report.baseline.name == "sharded"
        await driver.press("y")
        assert "--dims 'baseline:*gate_proj:out=t h[tp]'" in driver.app.clipboard

    check(test, app_of(runs, "sharded", dims=options["dims"]))


def test_diff_screen_keeps_the_last_result_when_a_comparison_fails(runs, tmp_path):
    for name in ("base", "damaged"):
        shutil.copytree(runs / name, tmp_path / name)

    async def test(driver):
        screen = driver.screen
        (tmp_path / "damaged" / "run.json").unlink()
        await driver.press("r")
        assert "comparison failed, showing the previous one: " in screen.bar.said
        assert screen.table.finding.site == SITE
        await driver.press("v", "v")
        assert "row 0:5" in driver.screen.pair.text

    check(test, app_of(tmp_path))


def test_diff_screen_reports_agreement(runs):
    async def test(driver):
        screen = driver.screen
        assert "AGREES" in driver.text("#status")
        await driver.press("f")
        assert "no culprit" in screen.bar.said
        await driver.press("d")
        assert "No differences" in screen.table.empty_text

    check(test, app_of(runs, "sharded"))


def test_diff_screen_shows_one_pane_on_a_small_terminal(runs):
    async def test(driver):
        assert driver.screen.table.finding.site == SITE
        await driver.press("tab", "v", "tab")
        assert driver.screen.pane == "layers"

    check(test, app_of(runs), size=(58, 20))


def test_help_lists_every_key_of_the_diff_screen(runs):
    async def test(driver):
        await driver.press("question_mark")
        assert isinstance(driver.app.screen, HelpScreen)

    check(test, app_of(runs))
    text = " ".join(help_text(DIFF_KEYS, "findings", DIFF_WORDS).plain.split())
    for spec in DIFF_KEYS:
        assert text.count(f"{spec.shown} {spec.help} ({spec.id})") == 1, spec.id
    keys = [key for spec in DIFF_KEYS for key in spec.keys]
    assert len(keys) == len(set(keys))
    for binding in DiffScreen.BINDINGS:
        name = binding.action.partition("(")[0]
        assert name == "app.command_palette" or hasattr(DiffScreen, f"action_{name}"), binding


@pytest.mark.parametrize("key", ["f", "n", "N", "colon", "e", "y", "i"])
def test_diff_screen_reports_nothing_while_comparing(runs, key):
    go_on = threading.Event()

    def open_source(way, progress):
        assert go_on.wait(60)
        return DiffSource.open((runs / "base", runs / "damaged"), CompareOptions(), progress)

    async def run():
        async with TapscopeApp(open_diff=(open_source, "base → damaged")).run_test(size=(110, 36)) as pilot:
            try:
                await pilot.pause()
                await pilot.press(key)
                assert pilot.app.screen.query_one(KeyBar).said == "Still comparing the runs."
            finally:
                go_on.set()
            driver = Viewer(pilot.app, pilot)
            await driver.settle()
            assert driver.screen.table.finding.site == SITE

    asyncio.run(run())


def test_diff_screen_exits_with_the_error_of_the_comparison(tmp_path):
    tables = weights()
    Toy(tables).write(tmp_path / "base", {"0": [1, 2, 3]}).close()
    Toy(tables).write(tmp_path / "damaged", {"0": [9, 8, 7]}).close()
    app = app_of(tmp_path)

    async def run():
        async with app.run_test() as pilot:
            for _ in range(1000):
                if app.return_value is not None:
                    break
                await asyncio.sleep(0.01)
                await pilot.pause()

    asyncio.run(run())
    assert isinstance(app.return_value, NothingInCommonError)
    assert "no token row in common" in str(app.return_value)


def glyph(driver):
    """Return the glyph of the finding under the cursor."""
    return next(line for line in driver.lines("#findings") if line.startswith(("> ", "› "))).split()[1]


def test_layer_grid_shows_steps_with_equal_hashes_as_compared(runs):
    async def test(driver):
        screen = driver.screen
        assert screen.source.steps == (0, 1, 2)
        lines = {line.split()[1]: line.split()[2:5] for line in driver.lines("#layers")[2:] if line.split()}
        assert lines["lm_head"][0] == "="
        assert all(cell.isdecimal() for cell in lines["lm_head"][1:])  # decades above the floor
        assert lines["embed_tokens"] == ["="] * 3
        await driver.press("d", "colon", "0", "enter")
        assert screen.table.num_rows == 100
        assert glyph(driver) == "="
        await driver.press("colon", "1", "enter")
        assert screen.table.finding.site == SITE
        assert glyph(driver) == "!"

    check(test, app_of(runs, "late"))


def test_layer_grid_shows_the_steps_in_which_a_bad_site_agrees(runs):
    with_source = DiffSource.open((Path(runs / "base"), Path(runs / "damaged")), CompareOptions())
    try:
        finding = with_source.culprit
        found = {s.step: step_verdict(finding, s) for s in finding.steps}
        assert found[0] is Verdict.DIFFERS
    finally:
        with_source.close()


def test_finding_table_folds_downstream_findings_until_asked(runs):
    async def test(driver):
        screen = driver.screen
        num_bad = screen.source.report.num_bad
        assert screen.table.num_rows == 2
        folded = driver.lines("#findings")[2]
        assert f"{num_bad - 1} downstream" in folded
        await driver.press("o")
        assert screen.table.num_rows == num_bad
        assert screen.table.finding.site == SITE  # the cursor stays
        await driver.press("o", "j")
        assert screen.table.finding.role == "downstream"
        await driver.press("n")
        assert screen.table.finding.site == SITE
        assert "There is one cause only" not in screen.bar.said

    check(test, app_of(runs))


def test_n_key_visits_every_independent_cause(tmp_path):
    tables = weights()
    Toy(tables).write(tmp_path / "base", PROMPTS, steps=(11, 14)).close()
    hooks = {SITE: spoil, "model.layers.0.self_attn.v_proj:out": spoiling(2)}
    Toy(tables, hooks=hooks).write(tmp_path / "two", PROMPTS, steps=(11, 14)).close()

    async def test(driver):
        screen = driver.screen
        causes = {divergence.finding.order for divergence in screen.source.report.divergences}
        assert len(causes) == 2
        seen = [screen.table.finding.order]
        for _ in range(2):
            await driver.press("n")
            seen.append(screen.table.finding.order)
        assert set(seen) == causes
        assert seen[0] == seen[2]
        await driver.press("N")
        assert screen.table.finding.order == seen[1]

    check(test, app_of(tmp_path, "two"))


def test_layer_grid_unfolds_a_layer_and_folds_it_from_inside(runs):
    async def test(driver):
        screen = driver.screen
        await driver.press("shift+tab", "g", "right")
        assert screen.bar.said == "Choose a layer: it unfolds into its modules."
        await driver.press(*"jjjjj", "left")
        assert screen.strip.group == "2"
        assert screen.bar.said == "This layer is folded already."
        before = screen.strip.num_rows
        await driver.press("right")
        assert screen.strip.num_rows > before
        await driver.press("j")
        assert screen.strip.order is not None
        assert screen.table.finding.order == screen.strip.order
        await driver.press("right")
        assert screen.bar.said == "A site has nothing to unfold."
        await driver.press("left")
        assert screen.strip.num_rows == before
        assert screen.strip.group == "2"

    check(test, app_of(runs))


def test_diff_screen_unfolds_a_layer_into_modules_and_these_into_sites(runs):
    async def test(driver):
        screen = driver.screen
        strip = screen.strip

        def line():
            return strip.format_row(strip.cursor, 100).plain

        await driver.press("shift+tab", "g", *"jjjjj", "right")
        while "▸mlp" not in line():
            await driver.press("j")
        assert (strip.group, strip.path, strip.order) == ("2", "model.layers.2.mlp", None)
        assert line().lstrip("~=! ").startswith("▸mlp")
        shown = {f.site for f in screen.table.findings}
        assert shown
        assert all(site.startswith("model.layers.2.mlp") for site in shown)
        cells = line()[34:]
        num = strip.num_rows
        await driver.press("right")
        assert "▾mlp" in line()
        assert line()[34:] == cells  # the maximum of its members, folded or not
        while "down_proj" not in line():
            await driver.press("j")
        if strip.order is None:
            await driver.press("right", "j")
        assert strip.path.startswith("model.layers.2.mlp.down_proj")
        assert screen.table.finding.order == strip.order
        await driver.press("h", "h")
        while strip.num_rows > num:
            await driver.press("left")
        assert "▸mlp" in line()
        await driver.press("left")
        assert strip.path == ""
        assert strip.group == "2"
        assert "layer 2" in line()

    check(test, app_of(runs))


@pytest.fixture(scope="module")
def many_steps(tmp_path_factory):
    """200 steps; only step 137 differs."""
    root, tables = tmp_path_factory.mktemp("many"), weights(layers=2)
    prompts, steps = {"0": list(range(3, 97)) * 3}, range(60, 259)
    prompts["0"] = prompts["0"][:259]
    Toy(tables, inputs=False).write(root / "base", prompts, steps=steps).close()
    hook = {"model.layers.1.mlp.down_proj:out": spoiling(137)}
    Toy(tables, inputs=False, hooks=hook).write(root / "late", prompts, steps=steps).close()
    return root


LARGE_SIZES = [pytest.param(size, marks=pytest.mark.soak) for size in ((120, 40), (200, 60))]


@pytest.mark.parametrize("size", [(80, 24), *LARGE_SIZES])
def test_layer_grid_shows_all_200_steps_and_never_loses_a_bad_one(many_steps, size):
    async def test(driver):
        screen = driver.screen
        assert len(screen.source.steps) == 200
        columns = screen.strip.columns(screen.strip.room - 2)
        assert (columns[0].first, columns[-1].last) == (0, 199)
        bad = next(i for i, each in enumerate(columns) if each.first <= 137 <= each.last)
        line = next(line for line in driver.lines("#layers") if "layer 1" in line)
        cells = line.rstrip().removesuffix("◂").rstrip()[-len(columns) :]
        assert next(i for i, cell in enumerate(cells) if cell.isdecimal()) == bad
        await driver.press("colon", *"137", "enter")
        assert screen.query_now.step == 137

        def shown():
            columns = screen.strip.columns(screen.strip.room - 2)
            return columns[0].first, columns[-1].last

        for wanted in ((87, 186), (112, 161), (125, 149), (131, 143)):
            await driver.press("plus")
            assert shown() == wanted
        assert "steps 131-143 of 200" in str(screen.strip.border_title)
        await driver.press("colon", *"20", "enter")
        assert shown() == (14, 26)
        for _ in range(4):
            await driver.press("minus")
        assert shown() == (0, 199)
        await driver.press("minus")
        assert "every step already" in screen.bar.said

    check(test, app_of(many_steps, "late"), size)


def test_diff_screen_reads_the_heat_map_without_color(runs, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")

    async def test(driver):
        line = next(line for line in driver.lines("#layers") if "layer 2" in line)
        assert any(cell.isdecimal() for cell in line.split()[3:])
        assert any("downstream" in line for line in driver.lines("#findings"))

    check(test, app_of(runs))


@pytest.mark.parametrize("theme", ["dark", "light", "ansi"])
def test_theme_focus_colour_is_not_the_colour_of_differences(runs, theme):
    async def test(driver):
        driver.app.theme = NAMES[theme]
        await driver.settle()
        colours = driver.app.get_css_variables()
        assert colours["primary"] != colours["accent"]
        focused = driver.screen.table.styles.border_top[1].rgb
        assert focused != driver.screen.table.bad_style.color.triplet

    check(test, app_of(runs))


def test_diff_screen_opens_at_a_link(runs):
    async def test(driver):
        assert driver.screen.table.finding.site == "model.layers.3.mlp.up_proj:out"
        assert driver.screen.query_now.step == 1

    check(test, app_of(runs, at=parse_permalink("damaged/model.layers.3.mlp.up_proj:out@1.0")))


def test_link_of_a_report_opens_its_value(runs, capsys):
    """Open the link of a cause in the terminal, by `show` and on the screen."""
    with open_run(runs / "base") as baseline, open_run(runs / "damaged") as target:
        comparison = compare_open_runs(baseline, target)
        link = parse_permalink(diff_view(comparison.report, (baseline, target)).causes[0].link)
        record = next(r for r in target.records if (r.key.site, r.key.step) == (link.site, link.step))
        value = f"{float(target.array(record)[link.index]):.5g}"
    assert (link.site, link.step, link.rank) == (SITE, 0, 0)
    capsys.readouterr()
    assert main(["show", str(runs / "damaged"), str(link)]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert dict(zip(head.split(), row.split()[1:], strict=True))[str(link.index[1])] == value

    async def run():
        app = TapscopeApp(lambda: RunSource.open(runs / "damaged"), at=link)
        async with app.run_test(size=(110, 36)) as pilot:
            driver = Viewer(app, pilot)
            await driver.settle()
            for _ in range(500):
                await pilot.pause(0.01)
                if isinstance(app.screen, TensorScreen) and app.screen.settled:
                    break
            reading = str(app.screen.query_one("#value").render())
            assert f"[{','.join(map(str, link.index))}]" in reading
            assert reading.endswith(f" {value}")
            await driver.press("escape")
            assert driver.screen.table.record.key == record.key

    asyncio.run(run())


def test_a_shows_the_heat_map_by_rank_and_by_token(runs):
    async def test(driver):
        strip = driver.screen.strip
        assert strip.axis == "step"
        await driver.press("a")
        assert (strip.axis, strip.border_title) == ("rank", "layers × ranks")
        assert [each.label for each in strip.layer_rows.columns] == ["0", "1"]
        await driver.press("right_curly_bracket")
        assert "bold reverse" in str(strip.header(40).markup)
        await driver.press("a")
        assert strip.border_title == "layers × tokens"
        assert strip.layer_rows.columns[5].label == "0:5"
        assert "0:0" in driver.lines("#layers")[0]
        await driver.press("a")
        assert strip.axis == "step"

    check(test, app_of(runs, "split"))


def test_a_explains_that_there_are_only_steps(tmp_path):
    with RunFactory(tmp_path / "base") as base, RunFactory(tmp_path / "target") as target:
        for run, scale in ((base, 1), (target, 2)):
            run.step()
            run.put("a:out", np.full((4, 4), scale, np.float32))

    async def test(driver):
        await driver.press("a")
        assert driver.screen.strip.axis == "step"
        assert driver.screen.query_one(KeyBar).said == "One rank and no token rows: there are only steps to show."

    check(test, app_of(tmp_path, "target"))


def test_text_of_a_pane_is_selected_with_the_mouse(runs):
    async def test(driver):
        await driver.pilot.mouse_down("#pair", offset=(1, 1))
        await driver.pilot.hover("#pair", offset=(12, 2))
        await driver.pilot.mouse_up("#pair", offset=(12, 2))
        first, second = driver.screen.pair.text.splitlines()[:2]
        assert driver.screen.get_selected_text() == f"{first}\n{second[:12]}"

    check(test, app_of(runs))


def test_header_names_the_difference_before_what_is_missing(tmp_path):
    for name, steps in (("base", (0, 1, 2)), ("target", (1, 2))):
        with RunFactory(tmp_path / name) as run:
            for number in range(3):
                run.step()
                for site in ("a:out", "b:out"):
                    if number in steps:
                        run.put(site, np.full(4, number + (name == "target" and site == "b:out"), np.float32))
    source = DiffSource.open((tmp_path / "base", tmp_path / "target"), CompareOptions())
    try:
        (reason,) = source.header.missing
        assert f" DIFFERS: b:out; on partial data: {reason} " in status_line(source.header, 200).plain
        narrow = status_line(source.header, 100).plain
        assert " DIFFERS: b:out; on partial data: " in narrow
        assert len(narrow) == 100
        assert status_line(source.header, 80).plain.endswith(" DIFFERS ")
    finally:
        source.close()
