"""DumperConfig: one frozen, validated value, whether it comes from keywords, JSON or `k=v` words."""

import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from tapscope.errors import ConfigError, RuleError, SiteError
from tapscope.site import Glob

Keep = Literal["off", "stats", "full"]
Policy = Literal["block", "drop", "strict"]


@dataclass(frozen=True, slots=True)
class Rule:
    """What is kept of the sites that match a glob; ``str(rule)`` is ``GLOB=KEEP``."""

    glob: str
    keep: Keep

    def __post_init__(self) -> None:
        if self.keep not in typing.get_args(Keep):
            raise RuleError(f"rule {self.glob}={self.keep}: keep must be one of {', '.join(typing.get_args(Keep))}")
        try:
            Glob(self.glob)
        except SiteError as error:
            raise RuleError(f"rule {self}: {error}") from None

    def __str__(self) -> str:
        return f"{self.glob}={self.keep}"


def parse_rule(text: str) -> Rule:
    """``GLOB=KEEP``; raises RuleError."""
    glob, equals, keep = text.rpartition("=")
    if not equals:
        raise RuleError(f"rule {text!r} has no '='; write GLOB=KEEP, e.g. 'layers.3.*:out=full'")
    return Rule(glob.strip(), typing.cast(Keep, keep.strip()))


@dataclass(frozen=True, slots=True, kw_only=True)
class DumperConfig:
    """What is kept, and how hard the pipeline tries. Raises ConfigError or RuleError naming field, value and rule."""

    enabled: bool = True
    """Off: no hook is on the model."""
    keep: Keep = "stats"
    """For sites that no rule matches."""
    rules: tuple[Rule, ...] = ()
    """The first rule whose glob matches a site decides."""
    capture_steps: int | None = None
    """After this many steps fall back to the configuration before."""
    policy: Policy = "block"
    """When the pipeline is full: wait and then drop, drop at once, or (strict) raise at the end of the step."""
    block_timeout_s: float = 1.0
    """The longest any one value may hold up the forward."""
    queue_bytes: int = 256 * 1024 * 1024
    """Most bytes on their way to the recorder."""
    segment_bytes: int = 256 * 1024 * 1024
    """Size at which a segment is sealed."""
    control: str | None = None
    """``HOST:PORT`` (port 0: any) for the recorder's HTTP control; None for no HTTP."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(DumperConfig)
        if not isinstance(self.rules, tuple):
            object.__setattr__(self, "rules", _rules(self.rules))
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name != "rules" and not _fits(value, hints[each.name]):
                raise ConfigError(f"{each.name}={value!r}: must be {_describe(hints[each.name])}")
        for name in ("block_timeout_s", "queue_bytes", "segment_bytes", "capture_steps"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}={value!r}: must be more than 0 and finite")

    def updated(self, changes: Mapping[str, Any], *, allowed: Iterable[str] | None = None) -> "DumperConfig":
        """A copy with ``changes`` (JSON types; rules as ``GLOB=KEEP`` texts); raises ConfigError or RuleError."""
        known = [each.name for each in fields(self)]
        for name in changes:
            if name not in known:
                raise ConfigError(f"{name!r} is no setting; settings are {', '.join(allowed or known)}")
            if allowed is not None and name not in allowed:
                raise ConfigError(f"{name!r} is fixed when the dumper starts; at run time set {', '.join(allowed)}")
        values = dict(changes)
        if "rules" in values:
            values["rules"] = _rules(values["rules"])
        return replace(self, **values)

    def to_json(self) -> dict[str, Any]:
        """JSON types; the inverse is ``DumperConfig().updated(...)``."""
        return asdict(self) | {"rules": [str(rule) for rule in self.rules]}


RUNTIME_FIELDS = ("enabled", "keep", "rules")
"""What may be changed while the dumper runs."""


def parse_words(words: Iterable[str]) -> dict[str, Any]:
    """``["enabled=true", "keep=full"]`` -> changes; values are JSON where they parse as JSON, else text."""
    changes: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is no setting; write NAME=VALUE, e.g. keep=full")
        try:
            changes[name] = json.loads(text)
        except ValueError:
            changes[name] = text
        if name == "rules" and isinstance(changes[name], str):
            changes[name] = [part for part in changes[name].split(",") if part]
    return changes


def _rules(value: Any) -> tuple[Rule, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(f"rules={value!r}: must be a list of GLOB=KEEP texts")
    rules = []
    for item in value:
        if isinstance(item, Rule):
            rules.append(item)
        elif isinstance(item, str):
            rules.append(parse_rule(item))
        else:
            raise ConfigError(f"rules: {item!r} must be a text GLOB=KEEP")
    return tuple(rules)


def _fits(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) is Literal:
        return isinstance(value, str) and value in typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(typing.get_args(hint))}"
    if isinstance(hint, types.UnionType):
        return " or ".join(_describe(option) for option in typing.get_args(hint))
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "null"}
    return names.get(hint, str(hint))


@dataclass(frozen=True, slots=True)
class Selection:
    """The static part of a configuration: what is kept at a site, decided once per site."""

    config: DumperConfig
    _globs: tuple[tuple[Glob, Keep], ...] = field(default=())

    @classmethod
    def of(cls, config: DumperConfig) -> "Selection":
        """Compile the rules."""
        return cls(config, tuple((Glob(rule.glob), rule.keep) for rule in config.rules))

    @classmethod
    def of_nothing(cls) -> "Selection":
        """Keeps nothing anywhere."""
        return cls(DumperConfig(keep="off"))

    def keep(self, site: str) -> Keep:
        """What is kept at ``site``."""
        if not self.config.enabled:
            return "off"
        return next((keep for glob, keep in self._globs if glob.matches(site)), self.config.keep)

    def may_keep(self, path: str, kind: str, ports: Iterable[str], *, unnamed: bool) -> bool:
        """Whether any port of ``kind`` at this module may be kept.

        ``ports`` are those known beforehand; ``unnamed`` says that there may be others.
        """
        if any(self.keep(f"{path}:{port}") != "off" for port in ports):
            return True
        if not self.config.enabled:
            return False
        if unnamed and self.config.keep != "off":
            return True
        # A rule may name what only a firing can show (out[0], an argument of **kwargs): hook where its path fits.
        return any(rule.keep != "off" and _may_name(rule.glob, path, kind, unnamed) for rule in self.config.rules)

    def check_matches(self, ports: Mapping[str, Iterable[str]], open_paths: Iterable[str], describe: str) -> None:
        """Raise RuleError for a rule that can match no site.

        ``ports`` maps each module path to its known ports; modules at ``open_paths`` take arguments nobody named.
        """
        sites = [f"{path}:{port}" for path, known in ports.items() for port in known]
        opened = set(open_paths)
        for rule, (glob, _) in zip(self.config.rules, self._globs, strict=True):
            if any(glob.matches(site) for site in sites):
                continue
            if not any(_may_name(rule.glob, path, kind, path in opened) for path in ports for kind in ("in", "out")):
                raise RuleError(f"rule {rule}: no site matches {rule.glob!r}; {describe}")


def _may_name(glob: str, path: str, kind: str, unnamed: bool) -> bool:
    """Whether the glob may match a port of ``kind`` at ``path`` that is not known before it fires."""
    head, colon, port = glob.rpartition(":")
    if not colon:
        return unnamed and Glob(port).matches(f"{path}:out")
    if not port.startswith(f"{kind}[") and not (unnamed and kind == "in" and port.startswith(("in", "*"))):
        return False
    return Glob(f"{head}:*").matches(f"{path}:out") and (unnamed or "." in port or kind == "out")
