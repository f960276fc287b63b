"""Every key, pressed on a real screen over a run on disk."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
from dashboard_driver import Driver
from dashboard_runs import toy_run
from factories import RunFactory
from rich.color import ColorType
from textual.widgets import Input

from tapscope.core.errors import RunNotFoundError
from tapscope.dashboard import browse_source
from tapscope.dashboard.app import TapscopeApp
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.screens import browse_base, live_tail
from tapscope.dashboard.screens.help import HelpScreen
from tapscope.dashboard.theme import NAMES
from tapscope.run_format.directory import RECORDER_FILE
from tapscope.sources import open_run

pytestmark = pytest.mark.usefixtures("no_rest")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return toy_run(tmp_path_factory.mktemp("runs") / "base")


class Browser(Driver):
    """Test driver of the browse screen."""

    @property
    def record(self):
        return self.screen.table.record

    @property
    def query(self):
        return self.screen.query_now

    @property
    def tensor_text(self):
        return self.screen.query_one("#tensor").text

    @property
    def picture(self):
        return "\n".join("".join(s.text for s in strip) for strip in self.screen._compositor.render_strips())


@asynccontextmanager
async def browsing(path, size=(120, 36), **options):
    app = TapscopeApp(lambda: RunSource(open_run(path)), **options)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        driver = Browser(app, pilot)
        await driver.settle()
        yield driver


def drive(path, steps, **options):
    async def go():
        async with browsing(path, **options) as driver:
            await steps(driver)

    asyncio.run(go())


def test_record_table_moves_its_cursor_by_arrows_letters_pages_and_ends(base):
    async def steps(d):
        for keys, row in (
            (["j", "down"], 2),
            (["k"], 1),
            (["up"], 0),
            (["G"], 26),
            (["g"], 0),
            (["end"], 26),
            (["home"], 0),
        ):
            await d.press(*keys)
            assert d.screen.table.cursor == row, keys
        await d.press("pagedown")
        assert d.screen.table.cursor > 5
        await d.press("pageup")
        assert d.screen.table.cursor == 0
        await d.press("k")
        assert d.screen.table.cursor == 0

    drive(base, steps)


def test_tensor_pane_follows_the_cursor(base):
    async def steps(d):
        first = d.tensor_text
        await d.press("j")
        assert d.screen.tensor.record is d.record
        assert d.tensor_text != first
        assert "hist" in d.tensor_text

    drive(base, steps)


def test_tab_key_focuses_the_next_pane_and_shift_tab_the_previous(base):
    async def steps(d):
        for key, pane in (("tab", "tensor"), ("tab", "sites"), ("tab", "records"), ("shift+tab", "sites")):
            await d.press(key)
            assert d.screen.pane == pane
            assert d.app.focused.id == pane

    drive(base, steps)


def test_site_tree_selects_folds_and_unfolds(base):
    async def steps(d):
        tree = d.screen.sites
        await d.press("shift+tab")
        rows = tree.num_rows
        await d.press("j", "j")
        assert (tree.path, d.query.path) == ("model.embed_tokens", "model.embed_tokens")
        assert [r.key.site for r in d.screen.table.records] == ["model.embed_tokens:out"]
        await d.press("j", "h")
        assert tree.path == "model.layers"
        assert tree.num_rows < rows
        await d.press("right")
        assert tree.num_rows == rows
        await d.press("l")
        assert tree.path == "model.layers.0"
        await d.press("left", "left")
        assert tree.path == "model.layers"
        await d.press("g")
        assert d.screen.table.num_rows == 27

    drive(base, steps)


def test_site_tree_marks_follow_the_step(base):
    async def steps(d):
        def layers():
            return next(line for line in d.picture.splitlines() if " layers.2 " in line).split("│")[1]

        assert "%" not in layers()
        await d.press("right_square_bracket")
        assert "% 1" in layers()

    drive(base, steps)


def test_site_tree_cuts_the_number_of_records_before_the_name(base):
    async def steps(d):
        await d.press("right_square_bracket")
        lines = [line.split("│")[1] for line in d.picture.splitlines() if " layers" in line]
        assert any(line.split()[1:4] == ["layers", "%", "1"] for line in lines)

    drive(base, steps, size=(70, 30))


def test_bracket_keys_change_the_step_and_braces_the_rank_and_keep_the_site(base):
    async def steps(d):
        await d.press("j", "j", "j")
        site = d.record.key.site
        await d.press("right_square_bracket")
        assert (d.record.key.site, d.record.key.step) == (site, 1)
        await d.press("left_square_bracket", "left_square_bracket")
        assert d.record.key.step == 0
        assert d.screen.bar.said == "step 0 is the first."
        await d.press("right_curly_bracket")
        assert (d.record.key.site, d.record.key.rank) == (site, 1)
        await d.press("left_curly_bracket")
        assert d.record.key.rank == 0

    drive(base, steps)


def test_bracket_keys_report_a_single_step(tmp_path):
    with RunFactory(tmp_path / "one") as run:
        run.step()
        run.put("m:out", np.ones((2, 2)))

    async def steps(d):
        await d.press("right_square_bracket")
        assert d.screen.bar.said == "There is only one step."
        await d.press("right_curly_bracket")
        assert d.screen.bar.said == "There is only one rank."
        await d.press("n")
        assert d.screen.bar.said == "No record of this run holds NaN, infinity or only zeros."
        await d.press("o")
        assert "No tensor over 256 MB" in d.screen.bar.said

    drive(tmp_path / "one", steps)


def test_n_key_visits_anomalies_across_steps_and_wraps_around(base):
    async def steps(d):
        seen = []
        for _ in range(5):
            await d.press("n")
            seen.append((d.record.key.step, d.record.key.site))
        assert seen == [
            (0, "lm_head:out"),
            (1, "model.layers.2.self_attn.o_proj:out"),
            (1, "lm_head:out"),
            (2, "lm_head:out"),
            (3, "lm_head:out"),
        ]
        await d.press("n")
        assert d.screen.bar.said.startswith("Search wrapped")
        assert d.record.key.step == 0
        await d.press("N")
        assert (d.record.key.step, d.record.key.site) == (3, "lm_head:out")

    drive(base, steps)


def test_n_key_leaves_a_module_without_anomalies(base):
    async def steps(d):
        await d.press("shift+tab", "j", "j")
        assert d.query.path == "model.embed_tokens"
        await d.press("right_square_bracket", "n")
        assert d.record.key.site == "model.layers.2.self_attn.o_proj:out"
        assert d.screen.sites.path == d.query.path == "model.layers.2.self_attn"
        assert "first non-finite value at [1,7]: request 1, position 2" in d.tensor_text

    drive(base, steps)


def test_search_filters_as_typed_keeps_on_enter_and_ends_on_escape(base):
    async def steps(d):
        await d.press("slash", *"down_")
        assert d.screen.query_one("#find", Input).has_focus
        assert d.screen.table.num_rows == 4
        await d.press("enter")
        assert d.app.focused is d.screen.table
        assert d.screen.table.num_rows == 4
        assert 'find "down_"' in d.picture
        await d.press("escape")
        assert d.screen.table.num_rows == 27

    drive(base, steps)


def test_search_without_a_match_names_the_available_sites(base):
    async def steps(d):
        await d.press("slash", *"xyz")
        assert 'No site here matches "xyz": layers are 0-3.' in d.picture
        await d.press("escape")
        assert d.screen.table.num_rows == 27
        assert not d.screen.query_one("#find").has_class("-open")

    drive(base, steps)


def test_s_key_sorts_by_magnitude_then_size_then_execution_order(base):
    async def steps(d):
        await d.press("right_square_bracket", "s", "g")
        assert "by |max|" in d.picture
        assert d.record.key.site == "model.layers.2.self_attn.o_proj:out"
        await d.press("s", "g")
        assert d.record.key.site == "lm_head:out"
        await d.press("s", "g")
        assert d.record.key.site == "model.embed_tokens:out"

    drive(base, steps)


def test_v_key_cycles_statistics_histogram_and_values(base):
    async def steps(d):
        assert "rms" in d.tensor_text
        await d.press("v")
        assert "448 finite values, bars on a log scale" in d.tensor_text
        await d.press("v")
        assert "0 0:0" in d.tensor_text
        assert "of 64" in d.tensor_text
        await d.press("v")
        assert "rms" in d.tensor_text

    drive(base, steps)


@pytest.mark.parametrize("size", [(120, 36), (80, 24), (50, 20)])
def test_enter_key_zooms_a_pane_and_restores_it(base, size):
    async def steps(d):
        shown = d.picture
        await d.press("enter")
        assert not d.screen.tensor.is_on_screen
        assert d.screen.table.outer_size.width == size[0]
        await d.press("tab")
        assert d.screen.tensor.outer_size.width == size[0]
        await d.press("shift+tab", "enter")
        assert d.picture == shown
        await d.press("enter", "escape")
        assert d.picture == shown

    drive(base, steps, size=size)


def test_y_key_copies_the_equivalent_command(base):
    async def steps(d):
        await d.press("slash", *"1*j:in*", "enter", "y")
        assert (
            d.app.clipboard
            == f"tapscope show {base} 'model.layers.1.self_attn.o_proj:in[input]' --step 0 --rank 0 --occurrence 0"
        )
        assert d.screen.bar.said.startswith("copied: tapscope show")

    drive(base, steps)


def test_e_key_exports_a_npy_file_and_never_overwrites(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    async def steps(d):
        await d.press("e", "e")
        assert "as float32, numpy has no bf16" in d.screen.bar.said
        first, second = sorted(tmp_path.glob("*.npy"), key=lambda path: len(path.name))
        assert first.name == "model.embed_tokens_out-step0-rank0-0.npy"
        with open_run(base) as run:
            assert (np.load(first) == run.array(d.record).astype(np.float32)).all()
        assert first.read_bytes() == second.read_bytes()
        await d.press("slash", *"layers.3:out", "enter", "e")
        assert "No tensor with recorded values" in d.screen.bar.said

    drive(base, steps)


def test_i_key_shows_the_run_report(base):
    async def steps(d):
        await d.press("i")
        shown = d.app.screen.query_one("#help-text").render().plain
        assert "toy-llama" in shown
        assert "% model.layers.2.self_attn.o_proj:out" in shown

    drive(base, steps)


def test_help_opens_on_question_mark_and_closes_on_escape(base):
    async def steps(d):
        for key in ("question_mark", "f1"):
            await d.press(key)
            assert isinstance(d.app.screen, HelpScreen)
            await d.press("j", "k", "pagedown", "pageup", "G", "g", "escape")
            assert d.app.screen is d.screen

    drive(base, steps)


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_q_key_quits(base, key):
    async def go():
        async with browsing(base) as d:
            await d.pilot.press(key)
            await d.pilot.pause()
            assert not d.app.is_running or d.app._exit

    asyncio.run(go())


def test_key_bar_shows_a_remapped_key(base):
    async def steps(d):
        assert "x sort" in d.picture
        await d.press("s")
        assert d.query.sort == "in order"
        await d.press("x")
        assert d.query.sort == "by |max|"

    drive(base, steps, keys=["sort=x"])


def test_palette_offers_every_action(base):
    async def steps(d):
        titles = {command.title.partition(" (")[0] for command in d.app.get_system_commands(d.screen)}
        assert {"find", "next anomaly", "sort", "reload", "quit"} <= titles
        await d.pilot.press("ctrl+p")
        await d.pilot.pause()
        assert type(d.app.screen).__name__ == "CommandPalette"
        await d.pilot.press("escape")

    drive(base, steps)


def test_click_moves_the_cursor_and_focuses_the_pane(base):
    async def steps(d):
        await d.pilot.click("#records", offset=(10, 5))
        await d.settle()
        assert d.screen.table.cursor == 3
        await d.pilot.click("#sites", offset=(5, 3))
        await d.settle()
        assert d.screen.pane == "sites"
        assert d.query.path == "model.embed_tokens"

    drive(base, steps)


def test_tensor_pane_reads_a_large_tensor_only_on_request(base, monkeypatch):
    monkeypatch.setattr(browse_base, "BIG_TENSOR_BYTES", 100)

    async def steps(d):
        assert "Press o to read it." in d.tensor_text
        assert "hist" not in d.tensor_text
        assert " o load" in d.picture
        d.screen.show_record(allow_big=True)
        await d.settle()
        assert "hist" in d.tensor_text

    drive(base, steps, size=(140, 36))


def test_o_key_reads_a_large_tensor(base, monkeypatch):
    monkeypatch.setattr(browse_base, "BIG_TENSOR_BYTES", 100)
    monkeypatch.setattr("tapscope.dashboard.screens.browse.BIG_TENSOR_BYTES", 100)

    async def steps(d):
        await d.press("o")
        assert "hist" in d.tensor_text

    drive(base, steps)


def test_tensor_pane_reads_nothing_while_the_cursor_moves(base, monkeypatch):
    read = []
    real = browse_source.digest
    monkeypatch.setattr(browse_source, "digest", lambda array, rows: read.append(array.shape) or real(array, rows))

    async def steps(d):
        before = len(read)
        monkeypatch.setattr(
            browse_base, "REST_S", 600
        )  # however slow the machine, the keys are pressed before the cursor has rested
        for _ in range(4):
            await d.pilot.press("j")
        assert len(read) == before
        monkeypatch.setattr(browse_base, "REST_S", 0)
        await d.pilot.press("j")
        await d.settle()
        assert len(read) == before + 1

    drive(base, steps)


def test_tensor_pane_reports_statistics_only_records(base):
    async def steps(d):
        await d.press("slash", *"1:o", "enter")
        assert "Statistics only: no values were kept" in d.tensor_text
        await d.press("v")
        assert "Statistics only" in d.tensor_text

    drive(base, steps)


def test_tensor_pane_reports_a_truncated_payload(tmp_path):
    path = toy_run(tmp_path / "cut")
    segment = path / "rank-00000" / "seg-000000.safetensors"
    segment.write_bytes(segment.read_bytes()[:1000])

    async def steps(d):
        await d.press("G")
        assert "The values cannot be read: " in d.tensor_text
        assert "truncated" in d.tensor_text

    drive(path, steps)


def test_browse_screen_explains_an_empty_run_and_rereads_it_on_r(tmp_path):
    with RunFactory(tmp_path / "new") as run:

        async def steps(d):
            assert "No records yet in new." in d.picture
            assert "tapscope dump MODEL -o new" in d.picture
            assert "OPEN" in d.picture.splitlines()[0]
            run.step()
            run.put("m:out", np.ones((2, 3)) * 2)
            run.end_step()
            await d.press("r")
            assert d.record.key.site == "m:out"

        drive(tmp_path / "new", steps)


def test_live_tail_refuses_a_run_without_a_recorder(tmp_path):
    run = RunFactory(tmp_path / "torn")
    run.step(phase="decode")
    run.put("model.norm:out", np.ones((1, 4), np.float32))

    async def steps(d):
        assert "INCOMPLETE: unfinished steps" in d.picture.splitlines()[0]
        await d.press("t")
        assert "FOLLOWING" not in d.picture.splitlines()[0]
        assert d.screen.bar.said == "No recorder writes to this run any more."

    drive(tmp_path / "torn", steps)
    (tmp_path / "torn" / RECORDER_FILE).write_text('{"host": "elsewhere"}')

    async def live(d):
        assert "INCOMPLETE" not in d.picture.splitlines()[0]
        await d.press("t")
        assert "FOLLOWING" in d.picture.splitlines()[0]

    drive(tmp_path / "torn", live)


def test_live_tail_follows_an_open_run_until_a_step_is_chosen_or_it_closes(tmp_path, monkeypatch):
    monkeypatch.setattr(live_tail, "FOLLOW_S", 0.01)
    run = RunFactory(tmp_path / "live")
    (tmp_path / "live" / RECORDER_FILE).write_text('{"host": "elsewhere"}')

    def step(run):
        run.step(phase="decode")
        run.put("model.norm:out", np.ones((1, 4), np.float32))

    async def until(d, condition):
        for _ in range(6000):  # upper bound
            await d.settle()
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(d.picture)

    async def steps(d):
        await d.press("t")
        assert "FOLLOWING" in d.picture.splitlines()[0]
        for number in (1, 2):
            step(run)
            await until(d, lambda number=number: d.query.step == number)
            assert d.record.key.step == number
        await d.press("left_square_bracket")
        assert "FOLLOWING" not in d.picture.splitlines()[0]
        step(run)
        await d.press("r")
        assert (d.query.step, d.screen.bar.said) == (1, "reloaded: 1 new record")
        await d.press("t")
        await until(d, lambda: d.query.step == 3)
        run.__exit__()
        await until(d, lambda: "The run is complete" in d.screen.bar.said)
        await d.press("t")
        assert "nothing will be added" in d.screen.bar.said

    step(run)
    drive(tmp_path / "live", steps)


def test_colon_key_goes_to_a_step_by_number(base):
    async def steps(d):
        await d.press("colon", "9", "enter")
        assert d.screen.bar.said == "Unknown step '9'; this run has 0-3."
        await d.press("backspace", "3", "enter")
        assert (d.query.step, d.screen.table.has_focus) == (3, True)
        await d.press("colon", "1", "escape")
        assert d.query.step == 3

    drive(base, steps)


def test_app_exits_with_the_error_of_an_unreadable_run(tmp_path):
    async def go():
        app = TapscopeApp(lambda: RunSource(open_run(tmp_path / "none")))
        async with app.run_test() as pilot:
            for _ in range(100):
                if app.return_value is not None:
                    break
                await pilot.pause(0.01)
        assert isinstance(app.return_value, RunNotFoundError)

    asyncio.run(go())


def test_browse_screen_keeps_every_word_without_color(base, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")

    async def steps(d):
        await d.press("n")
        assert d.app.no_color
        assert "> ∅ lm_head:out" in d.picture

    drive(base, steps)


@pytest.mark.parametrize("theme", ["dark", "light", "ansi"])
def test_browse_screen_shows_the_same_words_in_every_theme(base, theme):
    async def steps(d):
        assert d.app.theme == NAMES[theme]
        assert "> " in d.picture
        assert "model.embed_tokens:out" in d.picture

    drive(base, steps, theme=theme)


def test_browse_screen_never_parses_names_as_markup(tmp_path):
    with RunFactory(tmp_path / "odd") as run:
        run.step()
        run.put("m:tap[bold]", np.ones((2, 2)) * 3)

    async def steps(d):
        assert d.picture.count("m:tap[bold]") >= 2

    drive(tmp_path / "odd", steps)


@pytest.mark.parametrize("size", [(40, 12), (59, 20), (60, 24), (99, 24), (100, 24), (200, 60)])
def test_browse_screen_never_overflows_or_truncates_numbers(base, size):
    async def steps(d):
        for _ in range(3):
            await d.press("tab")
            lines = d.picture.splitlines()
            assert len(lines) == size[1]
            assert {len(line) for line in lines} == {size[0]}
            assert not any("…e+" in line or "e+…" in line or "e-…" in line for line in lines)
            assert "ON DISK" in lines[0]
            assert "q quit" in lines[-1]

    drive(base, steps, size=size)


def test_ansi_theme_never_paints_differences_green(base):
    async def steps(d):
        color = d.screen.table.bad_style.color
        assert (color.type, color.number) == (ColorType.STANDARD, 3), color  # yellow

    drive(base, steps, theme="ansi")
