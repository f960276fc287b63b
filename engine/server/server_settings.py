"""ServerSettings: all settings of the HTTP server, with types, defaults and validation."""

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
    """Settings of one server. An invalid value raises ConfigError, which names the field, the value and the rule."""

    model_name: NonEmptyStr | None = None
    """Model name that clients use; None: the model's path."""
    api_key: str | None = field(default=None, repr=False)
    """Key required in `Authorization: Bearer` or `x-api-key` on every path except /health and /ping; None: no key."""
    max_body_bytes: PositiveInt = 8 * _MIB
    """Maximum size of a request body; larger bodies get status 413. Uploaded weights have their own limit."""
    max_weights_bytes: PositiveInt = 64 << 30
    """Maximum body size of POST /update_weights_from_tensor."""
    max_waiting: PositiveInt | None = 2048
    """Maximum number of waiting requests; requests beyond it get status 503. None: no limit."""
    max_generations: PositiveInt = _LIMITS.max_generations
    """Maximum number of generations per request (prompts times ``n``); requests beyond it get status 400."""
    max_answer_values: PositiveInt = _LIMITS.max_answer_values
    """Maximum number of log-probabilities and hidden state elements per response; requests beyond it get status 400."""
    max_connections: PositiveInt = 4096
    """Maximum number of open connections, within the open file limit. Beyond it, the oldest connection with an
    incomplete request is closed; if there is none, the new connection gets status 503."""
    request_timeout_s: Positive = 10.0
    """Seconds to receive a request's headers and body, or the transfer time at 10 kB/s if that is longer; on timeout
    the request gets status 408."""
    tool_format: ToolFormatName = "auto"
    """The model's tool call format; ``auto``: detected from the chat template, ``none``: tool calls are not parsed."""
    reasoning_format: ReasoningFormat = "auto"
    """``think``: outputs may start with `<think>`; ``gpt_oss``: outputs have channels; ``auto``: detected from the chat
    template; ``none``: reasoning is not parsed."""
    request_log: NonEmptyStr | None = None
    """File to which one JSON line is appended for every finished request."""
    otlp_traces_endpoint: str | None = None
    """URL to which OpenTelemetry spans of requests are sent as OTLP over HTTP; None: no traces."""
    drain_timeout_s: NonNegative = 30.0
    """Seconds that live requests may take to finish after SIGTERM."""

    def __post_init__(self) -> None:
        convert_fields(self, ConfigError, secret=("api_key",))
        if self.api_key is not None and (not self.api_key.isascii() or not self.api_key.isprintable()):
            raise ConfigError("api_key: must consist of printable ASCII characters, to be sent in a header")
        if self.api_key is not None and (not self.api_key or " " in self.api_key):
            raise ConfigError("api_key: must have at least one character and no spaces")

    @property
    def limits(self) -> Limits:
        """Per-request limits."""
        return Limits(max_generations=self.max_generations, max_answer_values=self.max_answer_values)

    def plain(self) -> dict[str, Any]:
        """Return the settings as JSON values; ``ServerSettings(**plain)`` is the inverse."""
        return asdict(self)
