"""DumperConfig: frozen, validated settings, parsed from keyword arguments, JSON or ``k=v`` words."""

import functools
import logging
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from tapscope.core.convert import CUSTOM, Count, NonNegative, Positive, PositiveInt, convert_fields
from tapscope.core.errors import ConfigError, ExpressionError, RuleError
from tapscope.core.formatting import did_you_mean
from tapscope.dumper.rules.byte_size import parse_size
from tapscope.dumper.rules.injection_rule import InjectionRule
from tapscope.dumper.rules.rule import Keep, Rule, condition, parse_rule, undeclared
from tapscope.dumper.rules.trigger import Trigger, parse_trigger

__all__ = ["RUNTIME_FIELDS", "DumperConfig", "Keep", "Rule", "Trigger"]

Backpressure = Literal["block", "drop", "strict"]
Mode = Literal["off", "core", "all"]
OnDivergence = Literal["report", "keep", "stop"]
Fsync = Literal["never", "close", "segment", "batch"]

DEPRECATED = {
    "policy": "backpressure",
    "past_steps": "flight_recorder_steps",
    "past_bytes": "flight_recorder_bytes",
    "past_signal": "flight_recorder_signal",
    "ring_bytes": "shm_bytes",
    "device_bytes": "device_staging_bytes",
}
"""Deprecated setting name, accepted for one release -> current name."""

_log = logging.getLogger("tapscope")
_MiB = 1024 * 1024
_SIGNALS = signal.Signals.__members__.keys() - {"SIGKILL", "SIGSTOP"}
_LISTS: dict[str, Any] = {"rules": parse_rule, "triggers": parse_trigger, "inject": InjectionRule.parse}


@dataclass(frozen=True, slots=True, kw_only=True)
class DumperConfig:
    """Capture and pipeline settings.

    Raises ConfigError or RuleError; the message names the field, its value and the violated rule.
    """

    enabled: bool = True
    """False removes every hook from the model."""
    keep: Keep = "stats"
    """Capture level of sites that no rule matches."""
    rules: tuple[Rule, ...] = field(default=(), metadata=CUSTOM)
    """Capture rules; the first rule whose glob matches a site applies."""
    capture_steps: PositiveInt | None = None
    """Return to the previous configuration after this many steps."""
    backpressure: Backpressure = "block"
    """When the pipeline is full: wait and then drop, drop immediately, or (strict) raise at the end of the step."""
    block_timeout_s: Positive = 1.0
    """Maximum time in seconds that one value may block the forward."""
    queue_bytes: PositiveInt = 256 * 1024 * 1024
    """Maximum bytes queued for the recorder."""
    segment_bytes: PositiveInt = 256 * 1024 * 1024
    """Size at which a segment is sealed."""
    control: str | None = None
    """``HOST:PORT`` of the recorder's HTTP control server (port 0: any free port); None disables HTTP."""

    network: str | None = None
    """Address of this host at which ranks on other hosts reach the recorder; None restricts the job to this host."""

    mode: Mode = "all"
    """Where taps are placed: nowhere, at the model's inputs and outputs (``core``), or at every module."""
    filter: str | None = None
    """Condition (:mod:`tapscope.expr.expression`) evaluated after the rules; values for which it is false are not
    recorded."""
    tags: tuple[str, ...] = field(default=(), metadata=CUSTOM)
    """Names of the tags used in expressions; tags that a rule uses as ``tag.NAME=`` need not be declared."""
    grads: bool = False
    """Treat gradients of inputs and outputs as ordinary sites; otherwise only rules that name them match."""
    params: bool = False
    """Treat parameters (with ``grads`` also their gradients) as ordinary sites; otherwise only rules that name them
    match."""
    buffers: bool = False
    """Treat all buffers as ordinary sites; otherwise only 1-D buffers with one element per row of a weight matrix are
    (a router's bias)."""
    console: bool = False
    """Print one line per record to stderr."""
    skip_dummy: bool = True
    """Do not capture steps that the host marks as warm-up or dummy."""

    max_bytes: PositiveInt | None = None
    """Stop capture after this many payload bytes."""
    max_records: PositiveInt | None = None
    """Stop capture after this many records."""
    max_steps: PositiveInt | None = None
    """Stop capture after this many captured steps."""
    min_free_bytes: Count | None = 256 * _MiB
    """Stop capture when free disk space falls below this many bytes; None or 0 disables the check."""

    flight_recorder_steps: Count = 0
    """Flight recorder: keep this many steps in memory and write them only on request; 0 writes every step."""
    flight_recorder_bytes: Count = 256 * _MiB
    """Maximum memory of the flight recorder; the oldest steps are discarded first."""
    flight_recorder_signal: str | None = "SIGUSR2"
    """Signal that makes the flight recorder write its steps; None installs no handler. The handler can only be
    installed from the main thread."""
    triggers: tuple[Trigger, ...] = field(default=(), metadata=CUSTOM)
    """Actions to take when a site's statistics satisfy a condition."""

    against: str | None = None
    """Directory of a reference run to compare each captured tensor with while the model runs; None disables the
    comparison."""
    against_rtol: NonNegative | None = None
    """Fixed bound on the relative error of each token row; 0 requires equal values, None uses a bound on rounding."""
    on_divergence: OnDivergence = "keep"
    """Action on the first divergence of a step: only report it, keep the rest of the step in full, or stop the
    capture."""

    inject: tuple[InjectionRule, ...] = field(default=(), metadata=CUSTOM)
    """Module inputs and outputs to overwrite with values of ``inject_from``: ``SITE[=STORED] [steps=0-3]
    [request=ID]``. Values are matched row by row (request, position) where possible, otherwise whole tensors by
    step."""
    inject_from: str | None = None
    """Directory of the run that supplies the values for ``inject``. Another process may still be recording it."""
    inject_wait_s: NonNegative = 10.0
    """Maximum seconds that a step waits for values that ``inject_from`` has not recorded yet."""

    source_patches: str | None = None
    """YAML file of source lines to replace in functions while the dumper is open, see docs/howto/patch-source.md."""

    shm_bytes: Count = 64 * _MiB
    """Size of the shared memory between a rank and its recorder; 0 sends payloads inside messages."""
    device_staging_bytes: Count = 1024 * _MiB
    """Device memory for staging device-to-host copies; when it is full, the model waits for earlier copies."""
    fsync: Fsync = "never"
    """When to fsync written data."""
    control_token: str | None = field(default=None, repr=False)
    """Token that control requests must present; never printed, stored or sent."""

    if not TYPE_CHECKING:  # hidden from mypy, so that an unknown setting is still a type error

        def __getattr__(self, name: str) -> Any:
            if name in DEPRECATED:
                return getattr(self, current_name(name))
            raise AttributeError(f"'DumperConfig' object has no attribute {name!r}")

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
        if self.flight_recorder_signal is not None and self.flight_recorder_signal not in _SIGNALS:
            shown = f"flight_recorder_signal={self.flight_recorder_signal!r}"
            raise ConfigError(f"{shown}: must be a signal that can be caught, e.g. SIGUSR2")
        if self.control_token is not None and not self.control_token.strip():
            raise ConfigError("control_token: must not be blank; None disables the token")
        if self.filter is not None:
            try:
                object.__setattr__(self, "filter", condition(self.filter).text)
            except ExpressionError as error:
                raise ConfigError(f"filter={self.filter!r}: {error}") from None
        if self.against is None and self.against_rtol is not None:
            raise ConfigError(
                f"against_rtol={self.against_rtol:g}: no reference run; start with against=RUN (--against RUN)"
            )
        if self.inject and self.inject_from is None:
            raise ConfigError("inject: no run to take the values from; start with inject_from=RUN (--inject-from RUN)")
        self._check_names()

    def _check_names(self) -> None:
        """Raise RuleError or ConfigError if an expression uses an unknown name or an undeclared tag."""
        declared = {*self.tags, *(name for rule in self.rules for name, _ in rule.tags)}
        for rule in self.rules:
            if rule.when is not None and (problem := undeclared(condition(rule.when).names, declared)):
                raise RuleError(f"rule {rule}: {problem}")
        if self.filter is not None and (problem := undeclared(condition(self.filter).names, declared)):
            raise ConfigError(f"filter={self.filter!r}: {problem}")

    @classmethod
    def from_env(cls, environ: Mapping[str, str], *, prefix: str = "TAPSCOPE_", sglang: bool = False) -> "DumperConfig":
        """Build a config from the defaults and ``TAPSCOPE_*`` variables, such as ``TAPSCOPE_KEEP=full``.

        A blank variable counts as unset. See :mod:`.environment`.
        """
        from tapscope.dumper.environment import changes_of

        return cls().updated(changes_of(environ, prefix=prefix, sglang=sglang))

    @classmethod
    def with_defaults(
        cls, environ: Mapping[str, str], *, prefix: str = "TAPSCOPE_", sglang: bool = False, **settings: Any
    ) -> "DumperConfig":
        """Build a config as :meth:`from_env` does, with ``settings`` as the defaults."""
        from tapscope.dumper.environment import changes_of

        return cls().updated(settings | changes_of(environ, prefix=prefix, sglang=sglang))

    def updated(self, changes: Mapping[str, Any], *, allowed: Iterable[str] | None = None) -> "DumperConfig":
        """Return a copy with ``changes`` (JSON types) applied; raises ConfigError or RuleError.

        ``allowed`` names the settings that may change. Pass it for requests from outside the process: triggers that
        run a command are then rejected, unless this configuration already has them.
        """
        known = [each.name for each in fields(self)]
        changes = current_names(changes)
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
                        f"triggers: '{trigger}' runs a command, which cannot be set over HTTP; set it where the "
                        "dumper is made, by keyword or TAPSCOPE_TRIGGERS, or use keep or stop"
                    )
        return config

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON types, without the token; the inverse is ``DumperConfig().updated(...)``."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _SECRET}
        values["tags"] = list(self.tags)
        return values | {name: [str(item) for item in getattr(self, name)] for name in _LISTS}


@functools.cache
def current_name(name: str) -> str:
    """Return the current name of a setting; logs a deprecation warning once per deprecated name."""
    current = DEPRECATED.get(name, name)
    if current != name:
        _log.warning("tapscope: the setting %s is deprecated; use %s", name, current)
    return current


def current_names(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``changes`` with deprecated names replaced by current ones.

    Raises ConfigError if both names of a setting are present with different values.
    """
    renamed: dict[str, Any] = {}
    for name, value in changes.items():
        if name in DEPRECATED and DEPRECATED[name] in changes:
            if changes[DEPRECATED[name]] != value:
                raise ConfigError(f"{name} is the former name of {DEPRECATED[name]}, and their values differ")
            continue
        renamed[current_name(name)] = value
    return renamed


def with_former_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``settings`` plus a copy of each under its deprecated name, for existing clients of ``get_state``."""
    former = {old: settings[new] for old, new in DEPRECATED.items() if new in settings}
    return {**settings, **former}


def _accept_former_names(init: Any) -> Any:
    @functools.wraps(init)
    def accept(self: DumperConfig, **settings: Any) -> None:
        init(self, **current_names(settings))

    return accept


DumperConfig.__init__ = _accept_former_names(DumperConfig.__init__)  # type: ignore[method-assign]

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
    "flight_recorder_steps",
    "flight_recorder_bytes",
    "skip_dummy",
    "inject",
)
"""Settings that can change at run time."""


def _list(name: str, value: Any) -> tuple[Any, ...]:
    kinds = {"rules": "strings GLOB=KEEP", "triggers": "strings GLOB: CONDITION -> ACTION"}
    text = (kinds | {"inject": "strings SITE[=STORED]"})[name]
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise ConfigError(f"{name}={value!r}: must be a list of {text}")
    parsed = []
    for item in value:
        if not isinstance(item, str | Mapping | Rule | Trigger | InjectionRule):
            raise ConfigError(f"{name}: {item!r} must be a string {text.removeprefix('strings ')}")
        parsed.append(_LISTS[name](item))
    return tuple(parsed)


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(f"tags={value!r}: must be a list of names")
    names = tuple(value)
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"tags: {name!r} must be a Python identifier")
    return names


def _size(name: str, value: str) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise ConfigError(f"{name}={value!r}: {error}") from None
