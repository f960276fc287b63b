"""Registry of all key bindings; Textual bindings, the key bar, the command palette and the help are built from it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from textual.binding import Binding, BindingType

from tapscope.core.errors import ConfigError
from tapscope.core.formatting import did_you_mean

SITES, RECORDS, TENSOR = "sites", "records", "tensor"
PANES = (SITES, RECORDS, TENSOR)
"""The panes of the browse screen, in tab order; also their widget ids."""
LAYERS, FINDINGS, PAIR = "layers", "findings", "pair"
DIFF_PANES = (LAYERS, FINDINGS, PAIR)
"""Panes of the diff screen, in tab order; also their widget ids."""


@dataclass(frozen=True, slots=True)
class KeySpec:
    """An action of a screen and the keys that trigger it."""

    id: str
    """Stable name of the action, for ``--key ID=KEYS``."""
    keys: tuple[str, ...]
    """Key names of Textual, e.g. ``left_square_bracket``."""
    action: str
    """Textual action of the screen, e.g. ``step(1)``."""
    help: str
    """Description on the help screen, one line."""
    label: str = ""
    """Label in the key bar, one or two words; an empty label hides the action there."""
    panes: tuple[str, ...] = ()
    """Panes in which the action is available; empty for all."""

    @property
    def shown(self) -> str:
        """The keys in display form: ``↑ k``."""
        return " ".join(_GLYPHS.get(key, key.replace("ctrl+", "^")) for key in self.keys)


_GLYPHS = {
    "up": "↑",
    "down": "↓",
    "left": "←",
    "right": "→",
    "slash": "/",
    "colon": ":",
    "apostrophe": "'",
    "equals_sign": "=",
    "plus": "+",
    "minus": "-",
    "question_mark": "?",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "left_curly_bracket": "{",
    "right_curly_bracket": "}",
    "comma": ",",
    "full_stop": ".",
    "less_than_sign": "<",
    "greater_than_sign": ">",
    "escape": "esc",
    "shift+tab": "⇧tab",
    "f1": "F1",
}

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
    KeySpec(
        "find", ("slash",), "find", "filter: parts of sites, patterns with * and ?, layer: dtype: is: max: rms:", "find"
    ),
    KeySpec("next_anomaly", ("n",), "anomaly(1)", "next record with an anomaly, in any step and rank", "next anomaly"),
    KeySpec("previous_anomaly", ("N",), "anomaly(-1)", "previous record with an anomaly"),
    KeySpec("previous_step", ("left_square_bracket", "comma"), "step(-1)", "previous step", "step"),
    KeySpec("next_step", ("right_square_bracket", "full_stop"), "step(1)", "next step", "step"),
    KeySpec("go", ("colon",), "go", "go to a step by its number", "go"),
    KeySpec("previous_rank", ("left_curly_bracket", "less_than_sign"), "rank(-1)", "previous rank", "rank"),
    KeySpec("next_rank", ("right_curly_bracket", "greater_than_sign"), "rank(1)", "next rank", "rank"),
    KeySpec("tail", ("t",), "tail", "follow a run that is being recorded, at its last step; again: stop", "tail"),
    KeySpec("live", ("L",), "live", "steps, rates, metrics and anomalies while the run is recorded", "live"),
    KeySpec(
        "capture", ("C",), "capture", "switch capture of the live job of --control: on, off, 4 steps, rules", "capture"
    ),
    KeySpec("sort", ("s",), "sort", "sort records: in order, by |max|, by size (or click a column)", "sort"),
    KeySpec("columns", ("W",), "columns", "choose the columns of the list"),
    KeySpec("view", ("v",), "view", "tensor as statistics, histogram or values; its site over all steps", "view"),
    KeySpec("zoom", ("enter",), "zoom", "show the pane on the whole screen, or go back", "zoom"),
    KeySpec("map", ("m",), "run_map", "heat map of layers × steps: |max|, rms, non-finite values, zeros", "map"),
    KeySpec("modules", ("T",), "modules", "modules with class, shape, error and producers of inputs", "modules"),
    KeySpec("cells", ("c",), "cells", "every value of the tensor, with a cursor over rows and columns", "values"),
    KeySpec("load", ("o",), "load", "load a tensor of more than 256 MB", "load"),
    KeySpec("copy", ("y",), "copy", "copy the command line that shows the same", "copy command"),
    KeySpec("export", ("e",), "export", "write the tensor as .npy into this folder", "export"),
    KeySpec("bookmark", ("M",), "bookmark", "bookmark this place by a name"),
    KeySpec("bookmarks", ("apostrophe",), "bookmarks", "list of bookmarks: open, copy, delete", "bookmarks"),
    KeySpec("account", ("i",), "account", "what the run holds, its anomalies, what is missing", "info"),
    KeySpec("reload", ("r",), "reload", "read the run again (it may have grown)", "reload"),
    KeySpec("back", ("escape",), "back", "end the search, or the zoom", "back"),
    KeySpec("help", ("question_mark", "f1"), "help", "this help", "help"),
    KeySpec("palette", ("ctrl+p",), "app.command_palette", "every action by name"),
    KeySpec("quit", ("q", "ctrl+c"), "quit", "quit", "quit"),
)
"""Actions of the browse screen."""
BY_ID: Mapping[str, KeySpec] = {spec.id: spec for spec in KEYS}


def _shared(id: str, help: str = "") -> KeySpec:
    """Return the browse-screen action ``id`` for another screen, with another help text if given."""
    spec = BY_ID[id]
    return replace(spec, help=help or spec.help)


def _zoom() -> tuple[KeySpec, KeySpec]:
    """Return the actions that zoom a heat map in and out."""
    return (
        KeySpec("zoom_in", ("plus",), "zoom_columns(1)", "heat map: half as many columns, around the chosen step"),
        KeySpec("zoom_out", ("minus",), "zoom_columns(-1)", "heat map: twice as many columns, up to all"),
    )


_UNFOLD_HELP = "heat map: unfold a layer into modules, a module into submodules and sites"
_FOLD_HELP = "heat map: fold the layer or module, or the one that contains the site"

DIFF_KEYS: tuple[KeySpec, ...] = (
    *map(_shared, ("up", "down", "page_up", "page_down", "first", "last", "next_pane", "previous_pane")),
    KeySpec("culprit", ("f",), "culprit", "to the culprit: the first site where the runs diverge", "culprit"),
    KeySpec("next_cause", ("n",), "cause(1)", "next independent cause", "next cause"),
    KeySpec("previous_cause", ("N",), "cause(-1)", "previous independent cause"),
    KeySpec("next_bad", ("b",), "bad(1)", "next finding that differs", "next bad"),
    KeySpec("previous_bad", ("B",), "bad(-1)", "previous finding that differs"),
    KeySpec("downstream", ("o",), "downstream", "fold or unfold downstream findings", "downstream"),
    KeySpec("unfold_layer", ("right", "l"), "unfold(True)", _UNFOLD_HELP, "unfold", (LAYERS,)),
    KeySpec("fold_layer", ("left", "h"), "unfold(False)", _FOLD_HELP, "", (LAYERS,)),
    KeySpec("only_bad", ("d",), "only_bad", "only what differs, or everything", "only bad"),
    _shared("find", "filter: parts of either run's site, patterns, is: ratio: max: rel_l2: layer: dtype: rank:"),
    _shared("previous_step", "previous step of the target; before the first: all steps"),
    _shared("next_step", "next step of the target"),
    _shared("go", "one step of the target by its number; nothing: all steps"),
    _shared("previous_rank", "largest errors on the previous rank of the target; before the first: all ranks"),
    _shared("next_rank", "largest errors on the next rank of the target"),
    _shared("sort", "sort: execution order, error / floor, max |Δ|, rel l2, cosine, equal (or click a column)"),
    *_zoom(),
    KeySpec("axis", ("a",), "axis", "heat map by step, rank of the target, or token, in turn", "axis"),
    _shared("modules"),
    _shared("columns"),
    KeySpec("measure", ("m",), "measure", "other measures in the list: max |Δ|, rel l2, cosine, equal", "measure"),
    _shared("view", "finding as measures, tokens, values, in detail (ULPs, percentiles, channels), or over all steps"),
    _shared("zoom"),
    _shared("cells", "every value of the finding on both sides, with a cursor over rows and columns"),
    KeySpec("tolerance", ("equals_sign",), "tolerance", "compare again by a tolerance, or by the floor", "tolerance"),
    KeySpec("swap", ("x",), "swap", "compare again with baseline and target swapped", "swap"),
    _shared("export", "write the report as JSON lines into this folder"),
    _shared("account", "what was compared, assumed and missing, and the answer"),
    _shared("copy"),
    *map(_shared, ("bookmark", "bookmarks")),
    _shared("reload", "read both runs and compare again (they may have grown)"),
    *map(_shared, ("back", "help", "palette", "quit")),
)
"""Actions of the diff screen."""


CELL_KEYS: tuple[KeySpec, ...] = (
    *map(_shared, ("up", "down")),
    KeySpec("left", ("left", "h"), "move_column(-1)", "one column to the left"),
    KeySpec("right", ("right", "l"), "move_column(1)", "one column to the right"),
    *map(_shared, ("page_up", "page_down")),
    KeySpec("first_row", ("g",), "ends(-1)", "to the first row"),
    KeySpec("last_row", ("G",), "ends(1)", "to the last row"),
    KeySpec("first_column", ("home",), "column_ends(-1)", "to the first column"),
    KeySpec("last_column", ("end",), "column_ends(1)", "to the last column"),
    _shared("go", "go to an index of the tensor, such as 3,17, or to a row and a column"),
    KeySpec("next_nonfinite", ("n",), "nonfinite(1)", "next value that is not finite", "next NaN"),
    KeySpec("previous_nonfinite", ("N",), "nonfinite(-1)", "previous value that is not finite"),
    KeySpec("threshold", ("x",), "threshold", "next |Δ| (of one run: |x|) above a number", "above"),
    KeySpec("next_above", ("b",), "above(1)", "next one above that number", "next above"),
    KeySpec("previous_above", ("B",), "above(-1)", "previous one above that number"),
    KeySpec("largest", ("f",), "largest", "the largest |Δ|, of one run the largest |x|", "largest"),
    KeySpec("value_map", ("m",), "map", "the whole tensor as a heat map, or its values", "map"),
    KeySpec("open_cell", ("enter",), "zoom", "in the map: to the largest value of the cell", "open"),
    KeySpec("side", ("s",), "side", "show the difference, the target or the baseline", "side"),
    KeySpec("view", ("v",), "view", "below: histogram, magnitudes, channels, rows, or tokens", "view"),
    KeySpec("token_order", ("o",), "token_order", "tokens by position or by error", "order"),
    KeySpec("copy", ("y",), "copy", "copy the link of the value", "copy link"),
    *map(_shared, ("bookmark", "bookmarks", "back", "help", "palette", "quit")),
)
"""Actions of the screen with all values of a tensor."""

MODULE_KEYS: tuple[KeySpec, ...] = (
    *map(_shared, ("up", "down", "page_up", "page_down", "first", "last")),
    KeySpec("fold_module", ("left", "h"), "fold", "fold the module, or go to the one around it", "fold"),
    KeySpec("unfold_module", ("right", "l"), "unfold", "unfold the module, or go to the first one in it", "unfold"),
    KeySpec("next_cause", ("n",), "cause(1)", "next module that adds an error, or is not finite", "next cause"),
    KeySpec("previous_cause", ("N",), "cause(-1)", "previous module that adds an error, or is not finite"),
    KeySpec("open_module", ("enter",), "open_module", "the worst site of the module, else its output", "open"),
    KeySpec("copy", ("y",), "copy", "copy the link of that site", "copy link"),
    *map(_shared, ("bookmark", "bookmarks", "back", "help", "palette", "quit")),
)
"""Actions of the module list."""

LIVE_KEYS: tuple[KeySpec, ...] = (
    *map(_shared, ("up", "down", "page_up", "page_down", "first", "last")),
    KeySpec("pause", ("space",), "pause", "pause at this step, or follow new steps", "pause"),
    _shared("previous_step", "pause at the previous step"),
    _shared("next_step", "next step; after the last one, follow new steps"),
    _shared("go", "pause at a step by its number"),
    KeySpec("replay", ("p",), "replay", "replay the steps from here on", "replay"),
    *map(_shared, ("capture", "back", "help", "palette", "quit")),
)
"""Actions of the live screen."""

MAP_KEYS: tuple[KeySpec, ...] = (
    *map(_shared, ("up", "down", "page_up", "page_down", "first", "last")),
    KeySpec("unfold_layer", ("right", "l"), "unfold(True)", _UNFOLD_HELP, "unfold"),
    KeySpec("fold_layer", ("left", "h"), "unfold(False)", _FOLD_HELP, "fold"),
    _shared("previous_step", "previous step; before the first: the largest of all steps"),
    _shared("next_step", "next step; after the last: the largest of all steps"),
    _shared("go", "one step by its number; nothing: all steps"),
    _shared("previous_rank", "previous rank; before the first: the largest of all ranks"),
    _shared("next_rank", "next rank; after the last: the largest of all ranks"),
    *_zoom(),
    KeySpec("measure", ("m",), "measure", "switch to |max|, rms, number of non-finite values, or zeros", "measure"),
    KeySpec("open_record", ("enter",), "zoom", "open the record with the largest measure of the line", "open"),
    _shared("find", "sites that match: parts of names, patterns with * and ?"),
    KeySpec("copy", ("y",), "copy", "copy the link of that record", "copy link"),
    *map(_shared, ("bookmark", "bookmarks", "back", "help", "palette", "quit")),
)
"""Actions of the heat map of one run."""

BOOKMARK_KEYS: tuple[KeySpec, ...] = (
    *map(_shared, ("up", "down", "page_up", "page_down", "first", "last")),
    KeySpec("open_bookmark", ("enter",), "open_bookmark", "open the bookmark"),
    KeySpec("delete_bookmark", ("d", "delete"), "delete_bookmark", "delete the bookmark"),
    _shared("copy", "copy the link of the bookmark"),
    *map(_shared, ("back", "quit")),
)
"""Actions of the bookmark list."""


COLUMN_KEYS: tuple[KeySpec, ...] = (
    *map(_shared, ("up", "down", "page_up", "page_down", "first", "last")),
    KeySpec("toggle_column", ("space", "enter"), "toggle_column", "show or hide the column"),
    KeySpec("usual_columns", ("d",), "usual_columns", "show the default columns, as many as fit"),
    *map(_shared, ("back", "quit")),
)
"""Actions of the column list."""


_OPENED = (CELL_KEYS, LIVE_KEYS, MAP_KEYS, MODULE_KEYS, BOOKMARK_KEYS, COLUMN_KEYS)
"""Actions of each screen that opens from the browse or diff screen."""


def bindings(specs: Iterable[KeySpec]) -> list[BindingType]:
    """Return the Textual bindings of the actions; their ids allow :meth:`textual.app.App.set_keymap` to change the
    keys."""
    return [Binding(",".join(spec.keys), spec.action, spec.help, id=spec.id, show=False) for spec in specs]


def parse_overrides(
    words: Iterable[str], specs: Sequence[KeySpec] = KEYS, *, file: Iterable[str] = (), where: str = "keys.toml"
) -> dict[str, str]:
    """Parse ``["find=ctrl+f"]`` to {"find": "ctrl+f"}.

    ``words`` are the values of ``--key`` and take precedence over those of the ``file``, which errors call ``where``.
    Raises ConfigError for an unknown action id, or for a key that is already bound on the screen with ``specs`` or on a
    screen that opens from there: all values, heat map, modules, live, bookmarks, and columns.
    """
    overrides: dict[str, str] = {}
    known = dict.fromkeys(spec.id for each in (KEYS, DIFF_KEYS, *_OPENED) for spec in each)
    file = list(file)
    for source, given in ((where, file), ("--key", words)):
        for text in given:
            name, equals, keys = text.partition("=")
            if not equals or not keys.strip():
                raise ConfigError(f"invalid {source} {text!r}: expected ID=KEYS, e.g. find=ctrl+f")
            if name not in known:
                hint = did_you_mean(name, known)
                raise ConfigError(f"{source} {text!r}: unknown action {name!r}{hint}; actions: {', '.join(known)}")
            overrides[name] = ",".join(key.strip() for key in keys.split(","))
    for each in (*((KEYS, DIFF_KEYS) if file else (specs,)), *_OPENED):
        _check_unique(effective(overrides, each), where if file else "--key")
    return overrides


def effective(overrides: Mapping[str, str], specs: Iterable[KeySpec] = KEYS) -> tuple[KeySpec, ...]:
    """Return ``specs`` with the keys replaced by ``overrides`` (action id -> comma-separated keys)."""
    return tuple(
        replace(spec, keys=tuple(overrides[spec.id].split(","))) if spec.id in overrides else spec for spec in specs
    )


def _check_unique(specs: Iterable[KeySpec], source: str) -> None:
    owner: dict[str, str] = {}
    for spec in specs:
        for key in spec.keys:
            if key in owner:
                raise ConfigError(f"{source}: {key} would start both {owner[key]} and {spec.id}; give one another key")
            owner[key] = spec.id
