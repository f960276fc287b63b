"""Screen of a live run: finished steps, rates, metrics and anomalies while it is recorded."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.timer import Timer

from tapscope.dashboard import messages
from tapscope.dashboard.capture_control import COMMANDS, CaptureControl, attempt
from tapscope.dashboard.keymap import LIVE_KEYS, bindings
from tapscope.dashboard.live_run import LiveRun
from tapscope.dashboard.model.live import STATES, LiveView, live_facts, live_series, view_at
from tapscope.dashboard.model.run_data import Header
from tapscope.dashboard.screens.detail_screen import DetailScreen
from tapscope.dashboard.series_text import series_lines
from tapscope.dashboard.widgets.line_input import LineInput
from tapscope.dashboard.widgets.status_bar import KeyBar, StatusBar
from tapscope.dashboard.widgets.text_pane import TextPane
from tapscope.render import record_text

LIVE = "live"
READ_S = 0.5
"""Seconds between reads of the run."""
REPLAY_S = 0.2
"""Seconds per step in a replay."""
LIVE_WORDS = """
The last 300 steps are kept to go back to. Charts go from 0 to the largest value; % is not finite.
dead: the recorder no longer holds its lock, and has not closed the run."""


@dataclass
class LiveRead(messages.Answer):
    """Current state of the run."""

    view: LiveView


class LivePane(TextPane):
    """Pane with facts, charts and anomalies."""

    VIEWS = ("live",)

    def __init__(self, *, is_controlled: bool) -> None:
        super().__init__(LIVE)
        self.shown: LiveView | None = None
        self._is_controlled = is_controlled

    def title_text(self, width: int) -> str:
        """Return the last step."""
        return "" if self.shown is None or self.shown.last_step is None else f"step {self.shown.last_step}"

    def lines(self, width: int, height: int) -> Sequence[Text]:
        """Return the state of the run as lines."""
        view = self.shown
        if view is None:
            return [Text("Reading the run ...", style="dim")]
        lines = record_text.flow(((fact.label, fact.text) for fact in live_facts(view)), width)
        lines += [Text(), *series_lines([live_series(view)], width)] if view.points else []
        if not view.num_steps and view.state == "recording":
            how = "C switches it on" if self._is_controlled else "start tapscope view with --control to switch it on"
            lines += [Text(), Text(f"No step has been recorded yet. If capture is off, {how}.", style="dim")]
        if view.anomalies:
            lines += [Text(), Text("not finite, the latest first", style="dim")]
            lines += [Text(f"% {each.text}", style="bold") for each in reversed(view.anomalies)]
        return lines


class LiveScreen(DetailScreen):
    """Follows a run; earlier steps can be shown and replayed meanwhile."""

    SPECS = LIVE_KEYS
    BINDINGS = bindings(SPECS)
    WORDS = LIVE_WORDS
    PANES = (LIVE,)
    LIST = LIVE
    AUTO_FOCUS = f"#{LIVE}"
    runs: dict[str, str] = {}  # noqa: RUF012
    link = ""

    def __init__(self, live: LiveRun, name: str, control: CaptureControl | None) -> None:
        """``name`` is the name of the run; without ``control``, capture cannot be switched."""
        super().__init__()
        self._live, self._run_name, self._control = live, name, control
        self.pane = LIVE
        self._view: LiveView | None = None
        self._step: int | None = None
        """The step on the screen; None follows the latest state."""
        self._replay: Timer | None = None

    def compose(self) -> ComposeResult:
        """Yield name and state, the live pane, input lines, and key bar."""
        yield StatusBar()
        yield LivePane(is_controlled=self._control is not None)
        yield LineInput(id="find")
        yield LineInput(id="line")
        yield KeyBar()

    def on_mount(self) -> None:
        """Read the run now and periodically."""
        self.draw_keys()
        self._draw()
        self._read_more()
        self.set_interval(READ_S, self._read_more)

    @property
    def active(self) -> LivePane:
        """The only pane."""
        return self.query_one(LivePane)

    def draw_keys(self) -> None:
        """Show the keys that currently have an effect."""
        works = {"capture": self._control is not None}
        self.query_one(KeyBar).set_keys([spec for spec in self.specs if spec.label and works.get(spec.id, True)])

    # --- reading ----------------------------------------------------------------------------------

    def _read_more(self) -> None:
        if not self.is_waiting:
            self.track(self._load())

    @work(thread=True, group="live")
    def _load(self) -> None:
        self.post_message(LiveRead(self._live.read()))

    @on(LiveRead)
    def _take_view(self, message: LiveRead) -> None:
        if not self.accept(message):
            return
        if self._view is None or message.view.number != self._view.number:
            self._view = message.view
            self._draw()

    @property
    def _steps(self) -> tuple[int, ...]:
        return tuple(point.step for point in self._view.points) if self._view is not None else ()

    def _draw(self) -> None:
        view = self._view
        if view is None:
            self.query_one(StatusBar).set_header(Header(self._run_name, (), "READING", ()))
            return
        if self._step is not None and self._steps and self._step < self._steps[0]:
            self._step = self._steps[0]  # the oldest kept step
        if self._step is not None and not self._steps:  # the directory contains another run now
            self._step = None
        state = STATES[view.state]
        if self._step is not None:
            state = f"{'REPLAY' if self._replay is not None else 'PAUSED'} AT STEP {self._step} · {state}"
        self.query_one(StatusBar).set_header(Header(self._run_name, (), state, ()))
        self.active.shown = view if self._step is None else view_at(view, self._step)
        self.active.draw()

    # --- keys -------------------------------------------------------------------------------------

    def _show(self, step: int | None) -> None:
        if self._replay is not None:
            self._replay.stop()
            self._replay = None
        self._step = step
        self._draw()

    def action_pause(self) -> None:
        """Pause at the last step, or follow the run again."""
        if not self._steps:
            self.say("No step has finished yet.")
        else:
            self._show(self._steps[-1] if self._step is None else None)

    def action_step(self, direction: int) -> None:
        """Pause at the previous or next step."""
        steps = self._steps
        if not steps or (self._step is None and direction > 0):
            self.say("This is the last finished step." if steps else "No step has finished yet.")
            return
        now = steps.index(self._step) if self._step in steps else len(steps) - 1
        if now + direction < 0:
            self.say(f"Step {steps[0]} is the first that is kept.")
        else:
            self._show(steps[now + direction] if now + direction < len(steps) else None)

    def action_go(self) -> None:
        """Prompt for a step."""
        self.open_line("a finished step, by its number", "", self._go)

    def _go(self, text: str) -> str:
        if not text.isdecimal() or int(text) not in self._steps:
            kept = f"{self._steps[0]} to {self._steps[-1]}" if self._steps else "none"
            return f"Unknown step {text!r}; steps that are kept: {kept}."
        self._show(int(text))
        return ""

    def action_replay(self) -> None:
        """Replay the steps from the current one, or from the first, then follow the run."""
        steps = self._steps
        if not steps:
            self.say("No step has finished yet.")
            return
        self._show(self._step if self._step is not None and self._step != steps[-1] else steps[0])
        self._replay = self.set_interval(REPLAY_S, self._advance)
        self._draw()

    def _advance(self) -> None:
        later = next((step for step in self._steps if self._step is not None and step > self._step), None)
        if later is None:
            self._show(None)
        else:
            self._step = later
            self._draw()

    def action_capture(self) -> None:
        """Prompt for a command that switches capture of the live job."""
        if self._control is None:
            self.say("No live job to control: start tapscope view with --control [HOST:]PORT or --control RUN.")
        else:
            self.open_line(COMMANDS, "", self._capture)

    def _capture(self, text: str) -> str:
        if self._control is not None and text:
            self._switch(self._control, text)
        return ""

    @work(thread=True, group="control")
    def _switch(self, control: CaptureControl, text: str) -> None:
        self.post_message(messages.StatusMessage(attempt(control, text)))

    @on(messages.StatusMessage)
    def _take_sentence(self, message: messages.StatusMessage) -> None:
        self.say(message.sentence)
