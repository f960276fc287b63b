"""ServerSettings: every setting of the HTTP server with its type, its default and its rules."""

from dataclasses import asdict, dataclass, field
from typing import Any

from tapscope.core.convert import NonEmptyStr, NonNegative, Positive, PositiveInt, convert_fields
from tapscope.core.errors import ConfigError
from tapscope.engine.api.limits import Limits
from tapscope.engine.api.served_model import ReasoningFormat, ToolFormatName

_MIB = 1 << 20
_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of one server; raises ConfigError naming the field, the value and the rule."""

    model_name: NonEmptyStr | None = None
    """The model's name for clients; None: its path."""
    api_key: str | None = field(default=None, repr=False)
    """Key that `Authorization: Bearer` or `x-api-key` must have on every path except /health and /ping; None: none."""
    max_body_bytes: PositiveInt = 8 * _MIB
    """Maximum size of a request body; a larger one is a 413. Uploaded weights have their own limit."""
    max_weights_bytes: PositiveInt = 64 << 30
    """Maximum body size of POST /update_weights_from_tensor."""
    max_waiting: PositiveInt | None = 2048
    """Maximum number of waiting requests; further ones are a 503. None: no limit."""
    max_generations: PositiveInt = _LIMITS.max_generations
    """Maximum number of generations of one request (prompts times ``n``); more are a 400."""
    max_answer_values: PositiveInt = _LIMITS.max_answer_values
    """Maximum number of log-probabilities and elements of hidden states in one response; more are a 400."""
    max_connections: PositiveInt = 4096
    """Maximum number of open connections, within the limit of open files. For a further one, the oldest connection
    with an incomplete request is closed; if there is none, the new one gets a 503."""
    request_timeout_s: Positive = 10.0
    """Seconds to receive a request's headers and body, or the time at 10 kB/s if that is longer; else it is a 408."""
    tool_format: ToolFormatName = "auto"
    """The model's tool call format; ``auto``: by its chat template, ``none``: tool calls are not parsed."""
    reasoning_format: ReasoningFormat = "auto"
    """``think``: outputs may begin with `<think>`; ``gpt_oss``: they have channels; ``auto``: by the chat template."""
    request_log: NonEmptyStr | None = None
    """File to which one JSON line is appended for every finished request."""
    otlp_traces_endpoint: str | None = None
    """URL to which OpenTelemetry spans of requests are sent as OTLP over HTTP; None: no traces."""
    drain_timeout_s: NonNegative = 30.0
    """Seconds that live requests have to finish after SIGTERM."""

    def __post_init__(self) -> None:
        convert_fields(self, ConfigError, secret=("api_key",))
        if self.api_key is not None and (not self.api_key.isascii() or not self.api_key.isprintable()):
            raise ConfigError("api_key: must consist of printable ASCII characters, to be sent in a header")
        if self.api_key is not None and (not self.api_key or " " in self.api_key):
            raise ConfigError("api_key: must have at least one character and no spaces")

    @property
    def limits(self) -> Limits:
        """Limits of one request."""
        return Limits(max_generations=self.max_generations, max_answer_values=self.max_answer_values)

    def plain(self) -> dict[str, Any]:
        """Values for JSON; ``ServerSettings(**plain)`` is the inverse."""
        return asdict(self)
