"""DumperConfig: one frozen, validated value, whether it comes from keywords, JSON or `k=v` words."""

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from tapscope.core.convert import CUSTOM, Count, Positive, PositiveInt, convert_fields
from tapscope.core.errors import ConfigError, ExpressionError, RuleError
from tapscope.core.formatting import did_you_mean
from tapscope.dumper.rules.byte_size import parse_size
from tapscope.dumper.rules.rule import Keep, Rule, condition, parse_rule, undeclared
from tapscope.dumper.rules.trigger import Trigger, parse_trigger

__all__ = ["RUNTIME_FIELDS", "DumperConfig", "Keep", "Rule", "Trigger"]

Policy = Literal["block", "drop", "strict"]
Mode = Literal["off", "core", "all"]
Fsync = Literal["never", "close", "segment", "batch"]

_MiB = 1024 * 1024
_SIGNALS = signal.Signals.__members__.keys() - {"SIGKILL", "SIGSTOP"}
_LISTS: dict[str, Any] = {"rules": parse_rule, "triggers": parse_trigger}


@dataclass(frozen=True, slots=True, kw_only=True)
class DumperConfig:
    """What is kept, and how hard the pipeline tries. Raises ConfigError or RuleError naming field, value and rule."""

    enabled: bool = True
    """Off: no hook is on the model."""
    keep: Keep = "stats"
    """For sites that no rule matches."""
    rules: tuple[Rule, ...] = field(default=(), metadata=CUSTOM)
    """The first rule whose glob matches a site decides."""
    capture_steps: PositiveInt | None = None
    """After this many steps fall back to the configuration before."""
    policy: Policy = "block"
    """When the pipeline is full: wait and then drop, drop at once, or (strict) raise at the end of the step."""
    block_timeout_s: Positive = 1.0
    """The longest any one value may hold up the forward."""
    queue_bytes: PositiveInt = 256 * 1024 * 1024
    """Most bytes on their way to the recorder."""
    segment_bytes: PositiveInt = 256 * 1024 * 1024
    """Size at which a segment is sealed."""
    control: str | None = None
    """``HOST:PORT`` (port 0: any) for the recorder's HTTP control; None for no HTTP."""

    network: str | None = None
    """Address of this host at which ranks on other hosts reach the recorder; None for ranks of this host only."""

    mode: Mode = "all"
    """Which sites taps may stand at: none, the model's own inputs and outputs (``core``), or every module's."""
    filter: str | None = None
    """A condition (:mod:`tapscope.expr.expression`) that comes after the rules: what it denies is off."""
    tags: tuple[str, ...] = field(default=(), metadata=CUSTOM)
    """Names of tags that expressions ask for; those that a rule asks for by ``tag.NAME=`` need not be declared."""
    grads: bool = False
    """Gradients of inputs and outputs are ordinary sites; without, only rules that name them reach them."""
    params: bool = False
    """Parameters (with ``grads`` their gradients too) are ordinary sites; without, only by name."""
    buffers: bool = False
    """Buffers are ordinary sites; without, only vectors beside a matrix are (a router's bias), the others by name."""
    console: bool = False
    """One short line a record on stderr."""
    skip_dummy: bool = True
    """Steps that the host marks as warm-up or dummy are not captured."""

    max_bytes: PositiveInt | None = None
    """Payload bytes after which capture stops."""
    max_records: PositiveInt | None = None
    """Records after which capture stops."""
    max_steps: PositiveInt | None = None
    """Captured steps after which capture stops."""
    min_free_bytes: Count | None = 256 * _MiB
    """Free bytes on the run's disk below which capture stops; None or 0 for no floor."""

    past_steps: Count = 0
    """Flight recorder: keep this many steps in memory and write them only when asked; 0 writes at once."""
    past_bytes: Count = 256 * _MiB
    """Most bytes of the flight recorder; the oldest steps go first."""
    past_signal: str | None = "SIGUSR2"
    """Signal at which the flight recorder writes what it holds; None for none. Only in a process's main thread."""
    triggers: tuple[Trigger, ...] = field(default=(), metadata=CUSTOM)
    """What happens when a site's statistics meet a condition."""

    ring_bytes: Count = 64 * _MiB
    """Shared memory between a rank and its recorder; 0 sends everything inline."""
    device_bytes: Count = 1024 * _MiB
    """Most memory of a device that copies on their way to the host take; beyond, the model's own stream makes them."""
    fsync: Fsync = "never"
    """When bytes are forced to disk."""
    control_token: str | None = field(default=None, repr=False)
    """What a control request must carry; never shown, stored or sent."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in _LISTS:
                object.__setattr__(self, each.name, _list(each.name, value))
            elif each.name == "tags":
                object.__setattr__(self, each.name, _names(value))
            elif each.name.endswith("_bytes") and isinstance(value, str):
                object.__setattr__(self, each.name, _size(each.name, value))
        convert_fields(self, ConfigError, secret=_SECRET)
        if self.past_signal is not None and self.past_signal not in _SIGNALS:
            raise ConfigError(f"past_signal={self.past_signal!r}: must be a signal that can be caught, e.g. SIGUSR2")
        if self.control_token is not None and not self.control_token.strip():
            raise ConfigError("control_token: must not be blank; None asks for none")
        if self.filter is not None:
            try:
                object.__setattr__(self, "filter", condition(self.filter).text)
            except ExpressionError as error:
                raise ConfigError(f"filter={self.filter!r}: {error}") from None
        self._check_names()

    def _check_names(self) -> None:
        """Expressions ask for nothing that is neither known nor a declared tag."""
        declared = {*self.tags, *(name for rule in self.rules for name, _ in rule.tags)}
        for rule in self.rules:
            if rule.when is not None and (problem := undeclared(condition(rule.when).names, declared)):
                raise RuleError(f"rule {rule}: {problem}")
        if self.filter is not None and (problem := undeclared(condition(self.filter).names, declared)):
            raise ConfigError(f"filter={self.filter!r}: {problem}")

    @classmethod
    def from_env(cls, environ: Mapping[str, str], *, prefix: str = "TAPSCOPE_", sglang: bool = False) -> "DumperConfig":
        """The defaults, changed by ``TAPSCOPE_KEEP=full`` and so on; blank is unset. See :mod:`.environment`."""
        from tapscope.dumper.environment import changes_of

        return cls().updated(changes_of(environ, prefix=prefix, sglang=sglang))

    @classmethod
    def with_defaults(
        cls, environ: Mapping[str, str], *, prefix: str = "TAPSCOPE_", sglang: bool = False, **settings: Any
    ) -> "DumperConfig":
        """Like :meth:`from_env`, with ``settings`` where the environment says nothing."""
        from tapscope.dumper.environment import changes_of

        return cls().updated(settings | changes_of(environ, prefix=prefix, sglang=sglang))

    def updated(self, changes: Mapping[str, Any], *, allowed: Iterable[str] | None = None) -> "DumperConfig":
        """A copy with ``changes`` (JSON types); raises ConfigError or RuleError.

        ``allowed`` are the settings that may change; whoever gives them is not local, so that no trigger with a command
        is taken from there but those this configuration has.
        """
        known = [each.name for each in fields(self)]
        for name in changes:
            if name not in known:
                hint = did_you_mean(name, allowed or known)
                raise ConfigError(f"unknown setting {name!r}{hint}; settings are {', '.join(allowed or known)}")
            if allowed is not None and name not in allowed:
                raise ConfigError(f"{name!r} is fixed when the dumper starts; at run time set {', '.join(allowed)}")
        config = replace(self, **changes)
        if allowed is not None:
            for trigger in config.triggers:
                if trigger.command is not None and trigger not in self.triggers:
                    raise ConfigError(
                        f"triggers: '{trigger}' runs a command, which is never set from outside; give it where the "
                        "dumper is made, by keyword or TAPSCOPE_TRIGGERS, or use keep or stop"
                    )
        return config

    def to_json(self) -> dict[str, Any]:
        """JSON types, without the token; the inverse is ``DumperConfig().updated(...)``."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _SECRET}
        values["tags"] = list(self.tags)
        return values | {name: [str(item) for item in getattr(self, name)] for name in _LISTS}


_SECRET = ("control_token",)

RUNTIME_FIELDS = (
    "enabled",
    "keep",
    "rules",
    "filter",
    "tags",
    "mode",
    "grads",
    "params",
    "buffers",
    "console",
    "triggers",
    "max_bytes",
    "max_records",
    "max_steps",
    "min_free_bytes",
    "past_steps",
    "past_bytes",
    "skip_dummy",
)
"""What may be changed while the dumper runs."""


def _list(name: str, value: Any) -> tuple[Any, ...]:
    text = {"rules": "GLOB=KEEP texts", "triggers": "texts GLOB: CONDITION -> ACTION"}[name]
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise ConfigError(f"{name}={value!r}: must be a list of {text}")
    parsed = []
    for item in value:
        if not isinstance(item, str | Mapping | Rule | Trigger):
            raise ConfigError(f"{name}: {item!r} must be a text {'GLOB=KEEP' if name == 'rules' else text[6:]}")
        parsed.append(_LISTS[name](item))
    return tuple(parsed)


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(f"tags={value!r}: must be a list of names")
    names = tuple(value)
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"tags: {name!r} must be a name as in Python")
    return names


def _size(name: str, value: str) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise ConfigError(f"{name}={value!r}: {error}") from None


def parse_words(words: Iterable[str]) -> dict[str, Any]:
    """See :func:`tapscope.dumper.environment.parse_words`."""
    from tapscope.dumper import environment

    return environment.parse_words(words)
