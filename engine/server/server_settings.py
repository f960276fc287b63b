"""ServerSettings: every setting of the HTTP server with its type, its default and its rules."""

from dataclasses import asdict, dataclass, field
from typing import Any

from tapscope.core.convert import NonNegative, PositiveInt, convert_fields
from tapscope.core.errors import ConfigError
from tapscope.engine.api.limits import Limits
from tapscope.engine.api.served_model import ReasoningFormat, ToolFormat

_MIB = 1 << 20
_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of one front; raises ConfigError naming the field, the value and the rule."""

    model_name: str | None = None
    """What clients call the model; None takes its path as it was given."""
    api_key: str | None = field(default=None, repr=False)
    """What `Authorization: Bearer` or `x-api-key` must carry on every path but /health; None asks for nothing."""
    max_body_bytes: PositiveInt = 8 * _MIB
    """Longest body; a longer one is a 413. Weights that are sent have a limit of their own."""
    max_weights_bytes: PositiveInt = 64 << 30
    """Longest body of POST /update_weights_from_tensor."""
    max_waiting: PositiveInt | None = 2048
    """Requests that may wait for the engine; further ones are a 503. None: any number."""
    max_generations: PositiveInt = _LIMITS.max_generations
    """Generations that one request may ask for (prompts times ``n``); more are a 400."""
    max_answer_values: PositiveInt = _LIMITS.max_answer_values
    """Log-probabilities and elements of hidden states in one answer; more are a 400 before anything is computed."""
    max_connections: PositiveInt = 4096
    """Clients at once, as far as the limit of open files allows; for one more, the oldest connection whose request has
    not come as a whole is closed, or where there is none the new one is a 503."""
    request_timeout_s: NonNegative = 10.0
    """Time for the headers and the body of a request; a longer body may take as long as 10 kB/s need. Else a 408."""
    tool_format: ToolFormat = "auto"
    """How the model writes tool calls: ``hermes`` (Qwen too), ``llama3``, ``none``, or what its chat template says."""
    reasoning_format: ReasoningFormat = "auto"
    """``think``: answers may begin with `<think>`; ``none``; or what the chat template says."""
    request_log: str | None = None
    """File to which one line of JSON is appended for every request that ended."""
    drain_timeout_s: NonNegative = 30.0
    """Time that requests under way have to finish after SIGTERM."""

    def __post_init__(self) -> None:
        convert_fields(self, ConfigError, secret=("api_key",))
        if self.api_key is not None and (not self.api_key.isascii() or not self.api_key.isprintable()):
            raise ConfigError("api_key: must be printable ASCII characters, or it cannot be sent in a header")
        if self.api_key is not None and (not self.api_key or " " in self.api_key):
            raise ConfigError("api_key: must be at least one character, and no blanks")

    @property
    def limits(self) -> Limits:
        """What one request may ask for."""
        return Limits(max_generations=self.max_generations, max_answer_values=self.max_answer_values)

    def plain(self) -> dict[str, Any]:
        """Values for JSON; ``ServerSettings(**plain)`` is the inverse."""
        return asdict(self)
