"""Keys: the one registry of what can be pressed; the bindings, the key bar, the palette and the help come from it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from textual.binding import Binding, BindingType

from tapscope.errors import ConfigError

SITES, RECORDS, TENSOR = "sites", "records", "tensor"
PANES = (SITES, RECORDS, TENSOR)
"""The panes of the browse screen, in tab order; also their widget ids."""


@dataclass(frozen=True, slots=True)
class KeySpec:
    """One action and the keys that start it."""

    id: str
    """Stable name, for ``--key ID=KEYS``."""
    keys: tuple[str, ...]
    """As Textual spells them, e.g. ``left_square_bracket``."""
    action: str
    """Action of the screen, e.g. ``step(1)``."""
    help: str
    """One line for the help screen."""
    label: str = ""
    """One or two words for the key bar; empty keeps it out of there."""
    panes: tuple[str, ...] = PANES
    """Where it means something."""

    @property
    def shown(self) -> str:
        """The keys as a person reads them: ``↑ k``."""
        return " ".join(_GLYPHS.get(key, key.replace("ctrl+", "^")) for key in self.keys)


_GLYPHS = {
    "up": "↑",
    "down": "↓",
    "left": "←",
    "right": "→",
    "slash": "/",
    "question_mark": "?",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "left_curly_bracket": "{",
    "right_curly_bracket": "}",
    "escape": "esc",
    "shift+tab": "⇧tab",
    "f1": "F1",
}

LISTS = (SITES, RECORDS)

KEYS: tuple[KeySpec, ...] = (
    KeySpec("up", ("up", "k"), "move(-1)", "one line up"),
    KeySpec("down", ("down", "j"), "move(1)", "one line down"),
    KeySpec("page_up", ("pageup",), "page(-1)", "one page up"),
    KeySpec("page_down", ("pagedown",), "page(1)", "one page down"),
    KeySpec("first", ("g", "home"), "ends(-1)", "to the first line"),
    KeySpec("last", ("G", "end"), "ends(1)", "to the last line"),
    KeySpec("fold", ("left", "h"), "fold", "fold the module, or go to its parent", "fold", (SITES,)),
    KeySpec("unfold", ("right", "l"), "unfold", "unfold the module, or go to its first child", "unfold", (SITES,)),
    KeySpec("next_pane", ("tab",), "pane(1)", "next pane"),
    KeySpec("previous_pane", ("shift+tab",), "pane(-1)", "previous pane"),
    KeySpec("find", ("slash",), "find", "find sites: a part of the name, or a pattern with * and ?", "find"),
    KeySpec("next_odd", ("n",), "odd(1)", "next record that looks wrong, in any step and rank", "next odd"),
    KeySpec("previous_odd", ("N",), "odd(-1)", "previous record that looks wrong"),
    KeySpec("previous_step", ("left_square_bracket",), "step(-1)", "previous step", "step"),
    KeySpec("next_step", ("right_square_bracket",), "step(1)", "next step", "step"),
    KeySpec("previous_rank", ("left_curly_bracket",), "rank(-1)", "previous rank", "rank"),
    KeySpec("next_rank", ("right_curly_bracket",), "rank(1)", "next rank", "rank"),
    KeySpec("sort", ("s",), "sort", "sort records: in order, by |max|, by size", "sort"),
    KeySpec("view", ("v",), "view", "tensor as statistics, histogram or values", "view"),
    KeySpec("zoom", ("enter",), "zoom", "the pane on the whole screen, and back", "zoom"),
    KeySpec("load", ("o",), "load", "load a tensor of more than 256 MB", "load"),
    KeySpec("copy", ("y",), "copy", "copy the command line that shows the same", "copy command"),
    KeySpec("reload", ("r",), "reload", "read the run again (it may have grown)", "reload"),
    KeySpec("back", ("escape",), "back", "end the search, or the zoom", "back"),
    KeySpec("help", ("question_mark", "f1"), "help", "this help", "help"),
    KeySpec("palette", ("ctrl+p",), "app.command_palette", "every action by name"),
    KeySpec("quit", ("q", "ctrl+c"), "quit", "quit", "quit"),
)
BY_ID: Mapping[str, KeySpec] = {spec.id: spec for spec in KEYS}


def bindings(ids: Iterable[str] = BY_ID) -> list[BindingType]:
    """Textual bindings of these actions; the ids let :meth:`textual.app.App.set_keymap` change the keys."""
    return [
        Binding(",".join(spec.keys), spec.action, spec.help, id=spec.id, show=False)
        for spec in map(BY_ID.get, ids)
        if spec
    ]


def parse_overrides(texts: Iterable[str]) -> dict[str, str]:
    """``["find=ctrl+f"]`` -> {"find": "ctrl+f"}; raises ConfigError for an unknown id or a key that is taken."""
    overrides: dict[str, str] = {}
    for text in texts:
        name, equals, keys = text.partition("=")
        if not equals or not keys.strip():
            raise ConfigError(f"--key {text!r} is no ID=KEYS; write e.g. find=ctrl+f")
        if name not in BY_ID:
            raise ConfigError(f"--key {text!r}: there is no action {name!r}; actions are {', '.join(BY_ID)}")
        overrides[name] = ",".join(key.strip() for key in keys.split(","))
    _check_unique(effective(overrides))
    return overrides


def effective(overrides: Mapping[str, str]) -> tuple[KeySpec, ...]:
    """The registry with the user's keys in it."""
    return tuple(
        replace(spec, keys=tuple(overrides[spec.id].split(","))) if spec.id in overrides else spec for spec in KEYS
    )


def _check_unique(specs: Iterable[KeySpec]) -> None:
    owner: dict[str, str] = {}
    for spec in specs:
        for key in spec.keys:
            if key in owner:
                raise ConfigError(f"--key: {key} would start both {owner[key]} and {spec.id}; give one another key")
            owner[key] = spec.id
