import asyncio

import pytest
from factories import RunFactory
from textual.binding import Binding

from tapscope.core.errors import ConfigError
from tapscope.dashboard.app import TapscopeApp
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.keymap import BY_ID, DIFF_KEYS, KEYS, PANES, effective, parse_overrides
from tapscope.dashboard.keys_file import keys_path, read_keys
from tapscope.dashboard.screens.browse import BrowseScreen
from tapscope.dashboard.screens.help import HelpScreen, help_text


def test_keymap_binds_no_key_twice():
    keys = [key for spec in KEYS for key in spec.keys]
    assert len(keys) == len(set(keys))
    assert len(BY_ID) == len(KEYS)


@pytest.mark.parametrize("pane", PANES)
def test_help_lists_every_action_once_per_pane(pane):
    text = " ".join(help_text(KEYS, pane).plain.split())
    for spec in KEYS:
        assert text.count(f"{spec.shown} {spec.help} ({spec.id})") == 1, spec.id


def test_help_of_the_tree_lists_the_keys_of_the_tree_first():
    assert help_text(KEYS, "sites").plain.splitlines()[1].endswith("(fold)")


@pytest.mark.parametrize("screen", [BrowseScreen, HelpScreen])
def test_keymap_binds_only_existing_actions(screen):
    for binding in screen.BINDINGS:
        assert isinstance(binding, Binding)
        name = binding.action.partition("(")[0]
        assert name == "app.command_palette" or hasattr(screen, f"action_{name}"), binding


def test_browse_screen_binds_every_key_of_the_keymap():
    assert {binding.id for binding in BrowseScreen.BINDINGS} == set(BY_ID)


def test_keymap_changes_keys_by_id():
    overrides = parse_overrides(["find=ctrl+f", "quit=Q,ctrl+c"])
    changed = {spec.id: spec.keys for spec in effective(overrides)}
    assert changed["find"] == ("ctrl+f",)
    assert changed["quit"] == ("Q", "ctrl+c")
    assert changed["sort"] == BY_ID["sort"].keys


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("find", "expected ID=KEYS"),
        ("find=", "expected ID=KEYS"),
        ("fnd=f", "unknown action 'fnd' .did you mean find.*actions: up, down"),
        ("find=n", "n would start both find and next_anomaly"),
    ],
)
def test_keymap_names_the_valid_choices_of_an_invalid_override(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_overrides([text])


@pytest.mark.parametrize("specs", [KEYS, DIFF_KEYS])
def test_every_key_with_a_bracket_has_another_one(specs):
    bracketed = [spec for spec in specs if any("bracket" in key for key in spec.keys)]
    assert len(bracketed) == 4
    assert all(any("bracket" not in key for key in spec.keys) for spec in bracketed)


def test_keys_file_changes_keys_and_the_flag_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert read_keys(keys_path()) == []
    keys_path().parent.mkdir()
    keys_path().write_text('find = "ctrl+f"\nnext_step = ["w", "full_stop"]\naxis = "Z"\n')
    overrides = parse_overrides(["find=F"], file=read_keys(keys_path()))
    assert overrides == {"find": "F", "next_step": "w,full_stop", "axis": "Z"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("find", "cannot read {path}: "),
        ('fnd = "f"', "{path} 'fnd=f': unknown action 'fnd' (did you mean find?)"),
        ('find = "n"', "{path}: n would start both find and next_anomaly; give one another key"),
        ('axis = "d"', "{path}: d would start both only_bad and axis; give one another key"),
        ("find = 3", "{path}: invalid keys of 'find': expected \"KEY\" or"),
        ("find = []", "{path}: invalid keys of 'find': expected \"KEY\" or"),
    ],
)
def test_keys_file_is_refused_in_one_sentence(tmp_path, text, sentence):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        TapscopeApp(lambda: None, keys_file=path)
    assert str(caught.value).startswith(sentence.format(path=path))
    assert "\n" not in str(caught.value)


def test_help_is_searched_as_typed(tmp_path):
    with RunFactory(tmp_path / "run") as run:
        run.step()

    async def test():
        app = TapscopeApp(lambda: RunSource.open(tmp_path / "run"))
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.press("question_mark", "slash", *"next_ra")
            text = app.screen.query_one("#help-text").content.plain
            assert "} >" in text
            assert "(next_rank)" in text
            assert "(quit)" not in text
            await pilot.press("enter", "escape")
            assert "(quit)" in app.screen.query_one("#help-text").content.plain
            assert isinstance(app.screen, HelpScreen)
            await pilot.press("escape")
            assert not isinstance(app.screen, HelpScreen)

    asyncio.run(test())
