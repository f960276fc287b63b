import pytest
from textual.binding import Binding

from tapscope.core.errors import ConfigError
from tapscope.dashboard.keymap import BY_ID, KEYS, PANES, effective, parse_overrides
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
        ("fnd=f", "unknown action 'fnd'; actions: up, down"),
        ("find=n", "n would start both find and next_odd"),
    ],
)
def test_keymap_names_the_valid_choices_of_an_invalid_override(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_overrides([text])
