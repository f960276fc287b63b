"""Client of a live job's control API that switches capture; used by the web page and the terminal."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tapscope.core.errors import TapscopeError, UsageError
from tapscope.core.formatting import plural, short

ControlRequest = Callable[[str, dict[str, Any] | None], Any]
"""A function (verb of the control API, body) -> response; raises TapscopeError. Verbs: ``state``, ``configure``,
``capture``."""
COMMANDS = "on, off, a number of steps, keep MODE, or rules RULE; RULE"
MAX_STEPS = 1_000_000


@dataclass(frozen=True, slots=True)
class CaptureState:
    """Current capture settings of a live job."""

    run: str
    epoch: int
    enabled: bool
    keep: str
    rules: tuple[str, ...]
    capture_steps: int
    num_ranks: int
    hints: tuple[str, ...]


class CaptureControl:
    """Capture switches of one live job. Other settings, such as paths, triggers or commands, cannot be changed here."""

    def __init__(self, request: ControlRequest) -> None:
        self._request = request

    def state(self) -> CaptureState:
        """Return the current capture settings. Raises TapscopeError if the job does not respond."""
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
        """Apply one of :data:`COMMANDS` on all ranks; return a message with the change and its first step.

        Raises UsageError for an invalid command, and TapscopeError if the job rejects it.
        """
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
    """Describe the ``ranks`` and ``unmatched`` fields of a response: the first step affected, and rules without a
    match."""
    if not isinstance(response, dict) or not isinstance(response.get("ranks"), dict):
        return ""
    steps = sorted({str(step) for step in response["ranks"].values()} - {"pending"})
    text = f", from step {', '.join(steps)}" if steps else ", from the next step" if response["ranks"] else ""
    unmatched = response.get("unmatched") or {}
    rules = sorted({str(rule) for each in unmatched.values() for rule in each}) if isinstance(unmatched, dict) else []
    return text + (f"; no site matches {', '.join(rules)}" if rules else "")


def attempt(control: CaptureControl, text: str) -> str:
    """Run :meth:`CaptureControl.command`; return its result, or the message of the TapscopeError it raises."""
    try:
        return control.command(text)
    except TapscopeError as error:
        return str(error)
