"""Screen of the module tree in execution order, with class, shape, error, and data flow per module."""

from collections.abc import Callable, Mapping

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.widgets import Static

from tapscope.core.formatting import plural
from tapscope.dashboard.keymap import MODULE_KEYS, bindings
from tapscope.dashboard.model.data_flow import FUNCTION
from tapscope.dashboard.model.module_graph import ModuleGraph, ModuleNode
from tapscope.dashboard.model.permalink import Permalink
from tapscope.dashboard.screens.detail_screen import DetailScreen
from tapscope.dashboard.widgets.line_input import LineInput
from tapscope.dashboard.widgets.literal_text import literal
from tapscope.dashboard.widgets.module_list import MODULES, ModuleList
from tapscope.dashboard.widgets.row_list import RowList
from tapscope.dashboard.widgets.status_bar import KeyBar

MODULE_WORDS = """
The first character is the error of the module's own sites: 1 to 9 are decades above the noise floor, ! differs by
another measure, % not finite, # not comparable, ~ within the floor, = equal, · nothing compared.
Shape and dtype are those of the output. Lines on the left lead from a module to those that received its output: solid
ones (→) where the recorded values show it, by equal bytes or by a function such as add; dashed ones (⇢) are inferred
from the order of the modules, because a function that was not recorded lies between. The line below names the modules
and the functions for the module under the cursor."""


class ModulesScreen(DetailScreen):
    """Module tree of a run or comparison. Closes with the permalink of the chosen module's site."""

    SPECS = MODULE_KEYS
    BINDINGS = bindings(SPECS)
    WORDS = MODULE_WORDS
    PANES = (MODULES,)
    LIST = MODULES
    AUTO_FOCUS = f"#{MODULES}"

    def __init__(
        self, graph: ModuleGraph, link_of: Callable[[str], Permalink], runs: Mapping[str, str], path: str = ""
    ) -> None:
        """``link_of`` maps a site to its permalink; ``runs`` is as :attr:`KeymapScreen.runs`; ``path`` is the
        initial module."""
        super().__init__()
        self.graph, self._link_of, self._runs, self._path = graph, link_of, dict(runs), path
        self.pane = MODULES

    def compose(self) -> ComposeResult:
        """Yield title, module tree, details of the current module, input lines, and key bar."""
        yield Static("", id="status", markup=False)
        yield ModuleList(self.graph)
        yield Static("", id="value", markup=False)
        yield LineInput(id="find")
        yield LineInput(id="line")
        yield KeyBar()

    def on_mount(self) -> None:
        """Draw the title and move the cursor to the initial module."""
        self.list = self.query_one(ModuleList)
        self.list.empty_text = "No records here."
        title = f" {self.graph.title} · {plural(len(self.graph.nodes), 'module')} in execution order"
        self.query_one("#status", Static).update(literal(Text(title, style="bold")), layout=False)
        begin = next((i for i, node in enumerate(self.graph.nodes) if node.path == self._path), None)
        if begin:
            self.list.reveal(begin)
        self.draw_keys()

    @property
    def active(self) -> ModuleList:
        """The module tree."""
        return self.list

    def draw_keys(self) -> None:
        """Show the keys that currently have an effect."""
        works = {"next_cause": any(map(_is_cause, self.graph.nodes))}
        self.query_one(KeyBar).set_keys([s for s in self.specs if s.label and works.get(s.id, True)])

    @on(RowList.Moved)
    def _moved(self) -> None:
        self.draw_keys()
        text = flow_text(self.graph, self.list.at)
        self.query_one("#value", Static).update(literal(Text(f" {text}", style="bold")), layout=False)

    def action_fold(self) -> None:
        """Fold the module, or go to its parent."""
        self.list.fold()

    def action_unfold(self) -> None:
        """Unfold the module, or go to its first child."""
        self.list.unfold()

    def action_cause(self, direction: int) -> None:
        """Go to the next (or previous) module that adds its own error or has non-finite values, wrapping around."""
        causes = [i for i, node in enumerate(self.graph.nodes) if _is_cause(node)]
        if not causes:
            self.say("No module adds an error of its own.")
            return
        at = self.list.at or 0
        after = [i for i in causes if (i > at if direction > 0 else i < at)]
        row = (after or causes)[0 if direction > 0 else -1]
        if row == at:
            self.say("No other module adds an error of its own.")
            return
        self.list.reveal(row)

    def action_open_module(self) -> None:
        """Close the screen with the permalink of the module's representative site."""
        link = self._link
        if link is None:
            self.say("This module has no sites of its own: unfold it.")
        else:
            self.dismiss(link)

    def action_copy(self) -> None:
        """Copy the permalink of the module's representative site."""
        if self.link:
            self.app.copy_to_clipboard(self.link)
        self.say(f"copied: {self.link}" if self.link else "This module has no sites of its own.")

    @property
    def runs(self) -> dict[str, str]:
        """Runs of the screen below."""
        return self._runs

    @property
    def _link(self) -> Permalink | None:
        node = self.list.node
        return self._link_of(node.site) if node is not None and node.site else None

    @property
    def link(self) -> str:
        """Permalink of the module's representative site."""
        return str(self._link or "")


def flow_text(graph: ModuleGraph, at: int | None) -> str:
    """Return ``model.layers.0.mlp · from input_layernorm · to down_proj``.

    A function in between is shown as ``from a, b through add``, an inferred flow as ``perhaps from a, b through a
    function``. Paths in the same parent module are relative to that module.
    """
    if at is None:
        return "No records here."
    node = graph.nodes[at]
    parts = [node.path or node.name]
    around = f"{node.path.rpartition('.')[0]}."
    for word, by_function in (("from", graph.producers(at)), ("to", graph.consumers(at))):
        for through, modules in by_function.items():
            names = ", ".join(each.path.removeprefix(around) for each in modules)
            if through == FUNCTION:
                parts.append(f"perhaps {word} {names} through a function")
            else:
                parts.append(f"{word} {names}{f' through {through}' if through else ''}")
    return " · ".join(parts)


def _is_cause(node: ModuleNode) -> bool:
    return node.is_cause or node.verdict == "nonfinite"
