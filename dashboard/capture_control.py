"""CaptureControl: switches capture of a live job through its control API, for the web page and the terminal."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tapscope.core.errors import TapscopeError, UsageError
from tapscope.core.formatting import plural, short

ControlRequest = Callable[[str, dict[str, Any] | None], Any]
"""Verb of the control API (``state``, ``configure``, ``capture``) and body -> response; raises TapscopeError."""
COMMANDS = "on, off, a number of steps, keep MODE, or rules RULE; RULE"
MAX_STEPS = 1_000_000


@dataclass(frozen=True, slots=True)
class CaptureState:
    """The present capture of a job."""

    run: str
    epoch: int
    enabled: bool
    keep: str
    rules: tuple[str, ...]
    capture_steps: int
    num_ranks: int
    hints: tuple[str, ...]


class CaptureControl:
    """The capture switches of one job. Only these settings can be changed: no path, no trigger, no command."""

    def __init__(self, request: ControlRequest) -> None:
        self._request = request

    def state(self) -> CaptureState:
        """Raises TapscopeError if the job does not respond."""
        answer = self._request("state", None)
        config = answer.get("config") or {}
        rules, ranks = config.get("rules") or (), answer.get("ranks") or ()
        return CaptureState(
            run=str(answer.get("run", "")),
            epoch=int(answer.get("epoch") or 0),
            enabled=bool(config.get("enabled")),
            keep=str(config.get("keep", "")),
            rules=tuple(map(str, rules)),
            capture_steps=int(config.get("capture_steps") or 0),
            num_ranks=len(ranks),
            hints=tuple(map(str, answer.get("hints") or ())),
        )

    def command(self, text: str) -> str:
        """Apply one of :data:`COMMANDS` on all ranks; returns what happens from which step. Raises TapscopeError."""
        word, _, rest = text.strip().partition(" ")
        word, rest = word.lower(), rest.strip()
        if word in ("on", "off") and not rest:
            return self._configured({"enabled": word == "on"}, f"capture {word}")
        if word.isdecimal() and not rest and 0 < len(word) < 8 and 1 <= int(word) <= MAX_STEPS:
            answer = self._request("capture", {"steps": int(word)})
            return f"capture of {plural(int(word), 'step')}{_ranks(answer)}"
        if word == "keep" and rest:
            return self._configured({"keep": rest}, f"keep {rest}")
        if word == "rules":
            rules = [rule.strip() for rule in rest.split(";") if rule.strip()]
            return self._configured({"rules": rules}, plural(len(rules), "rule"))
        raise UsageError(f"invalid command {short(text)}: expected {COMMANDS}")

    def _configured(self, settings: dict[str, Any], what: str) -> str:
        return f"{what}{_ranks(self._request('configure', settings))}"


def _ranks(response: Any) -> str:
    """From which step it applies, and what did not match."""
    if not isinstance(response, dict) or not isinstance(response.get("ranks"), dict):
        return ""
    steps = sorted({str(step) for step in response["ranks"].values()} - {"pending"})
    text = f", from step {', '.join(steps)}" if steps else ", from the next step" if response["ranks"] else ""
    unmatched = response.get("unmatched") or {}
    rules = sorted({str(rule) for each in unmatched.values() for rule in each}) if isinstance(unmatched, dict) else []
    return text + (f"; no site matches {', '.join(rules)}" if rules else "")


def attempt(control: CaptureControl, text: str) -> str:
    """The result of :meth:`CaptureControl.command`, or the message of its error."""
    try:
        return control.command(text)
    except TapscopeError as error:
        return str(error)
