"""ServerSettings: every setting of the HTTP side, its default and its rule."""

from dataclasses import asdict, dataclass, field
from typing import Any

from tapscope.core.errors import ConfigError
from tapscope.engine.api.limits import Limits
from tapscope.engine.api.served_model import REASONING_FORMATS, TOOL_FORMATS

_MIB = 1 << 20
_LIMITS = Limits()
_COUNTS = (
    "max_body_bytes",
    "max_weights_bytes",
    "max_waiting",
    "max_generations",
    "max_answer_values",
    "max_connections",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of one front; raises ConfigError naming the field, the value and the rule."""

    model_name: str | None = None
    """What clients call the model; None takes its path as it was given."""
    api_key: str | None = field(default=None, repr=False)
    """What `Authorization: Bearer` or `x-api-key` must carry on every path but /health; None asks for nothing."""
    max_body_bytes: int = 8 * _MIB
    """Longest body; a longer one is a 413. Weights that are sent have a limit of their own."""
    max_weights_bytes: int = 64 << 30
    """Longest body of POST /update_weights_from_tensor."""
    max_waiting: int | None = 2048
    """Requests that may wait for the engine; further ones are a 503. None: any number."""
    max_generations: int = _LIMITS.max_generations
    """Generations that one request may ask for (prompts times ``n``); more are a 400."""
    max_answer_values: int = _LIMITS.max_answer_values
    """Log-probabilities and elements of hidden states in one answer; more are a 400 before anything is computed."""
    max_connections: int = 4096
    """Clients at once, as far as the limit of open files allows; for one more, the oldest connection whose request has
    not come as a whole is closed, or where there is none the new one is a 503."""
    request_timeout_s: float = 10.0
    """Time for the headers and the body of a request; a longer body may take as long as 10 kB/s need. Else a 408."""
    tool_format: str = "auto"
    """How the model writes tool calls: ``hermes`` (Qwen too), ``llama3``, ``none``, or what its chat template says."""
    reasoning_format: str = "auto"
    """``think``: answers may begin with `<think>`; ``none``; or what the chat template says."""
    request_log: str | None = None
    """File to which one line of JSON is appended for every request that ended."""
    drain_timeout_s: float = 30.0
    """Time that requests under way have to finish after SIGTERM."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is None and name == "max_waiting":
                continue
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name}={value!r}: must be an integer above 0")
        if self.api_key is not None and (not self.api_key.isascii() or not self.api_key.isprintable()):
            raise ConfigError("api_key: must be printable ASCII characters, or it cannot be sent in a header")
        if self.api_key is not None and (not self.api_key or " " in self.api_key):
            raise ConfigError("api_key: must be at least one character, and no blanks")
        for name, choices in (("tool_format", TOOL_FORMATS), ("reasoning_format", REASONING_FORMATS)):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(choices)}")
        for name in ("drain_timeout_s", "request_timeout_s"):
            timeout = getattr(self, name)
            if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
                raise ConfigError(f"{name}={timeout!r}: must be a number of seconds from 0")

    @property
    def limits(self) -> Limits:
        """What one request may ask for."""
        return Limits(max_generations=self.max_generations, max_answer_values=self.max_answer_values)

    def plain(self) -> dict[str, Any]:
        """Values for JSON; ``ServerSettings(**plain)`` is the inverse."""
        return asdict(self)
