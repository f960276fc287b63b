"""Config rules: what the value of every setting of the engine must be, one line each."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from tapscope.core.errors import ConfigError
from tapscope.engine.params.validators import is_count, is_number, require

Settings = Mapping[str, Any]


class _Rule(NamedTuple):
    field: str
    holds: Callable[[Any, Settings], bool]
    """Of (its value, all settings)."""
    words: str
    """What it must be; other settings stand in braces."""


_CHOICES = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "kv_cache_dtype": ("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2"),
    "logits": ("last", "all", "observed"),
    "device": ("auto", "cpu", "cuda"),
    "load_format": ("auto", "dummy"),
    "quantization": (None, "fp8"),
    "launch": ("spawn", "external"),
    "cuda_graphs": ("decode", "off"),
}
_COUNTS = ("tp", "ep", "dp", "page_size", "max_running", "ageing_steps", "kv_bytes")
_FLAGS = ("prefix_cache", "prefix_affinity", "check", "batch_invariant", "async_scheduling")
_TIMEOUTS = ("waiting_timeout_s", "running_timeout_s")
_RENDEZVOUS = re.compile(r"tcp://[^\s:/]+:[0-9]{1,5}")


def _is_choice(choices: tuple[str | None, ...], value: Any, _: Any) -> bool:
    return value in choices


def _is_globs(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(glob, str) for glob in value)


def _is_seconds(value: Any) -> bool:
    return is_number(value) and value > 0


def _is_place(value: Any) -> bool:
    return isinstance(value, str) and _RENDEZVOUS.fullmatch(value) is not None


_COUNT, _SECONDS = "must be a whole number above 0", "must be a number of seconds above 0"
_RULES = (
    *(_Rule(n, partial(_is_choice, c), f"must be one of {', '.join(map(str, c))}") for n, c in _CHOICES.items()),
    *(_Rule(name, lambda value, _: is_count(value), _COUNT) for name in _COUNTS),
    _Rule("ep", lambda ep, others: others["tp"] % ep == 0, "must divide tp={tp}"),
    _Rule(
        "dp_rank",
        lambda rank, others: type(rank) is int and 0 <= rank < others["dp"],
        "must be a whole number from 0, below dp={dp}",
    ),
    _Rule("dp", lambda dp, others: dp == 1 or others["launch"] == "spawn", "needs launch='spawn'"),
    _Rule("num_pages", lambda n, _: n is None or is_count(n), f"{_COUNT}, or None to size it from kv_bytes"),
    _Rule("max_tokens_per_step", lambda n, _: n is None or is_count(n), f"{_COUNT}, or None for the device's default"),
    _Rule("seed", lambda seed, _: type(seed) is int and seed >= 0, "must be a whole number from 0"),
    _Rule("rank_timeout_s", lambda limit, _: _is_seconds(limit), _SECONDS),
    *(_Rule(n, lambda limit, _: limit is None or _is_seconds(limit), f"{_SECONDS}, or None") for n in _TIMEOUTS),
    *(_Rule(name, lambda value, _: type(value) is bool, "must be true or false") for name in _FLAGS),
    _Rule("exclude_modules", lambda globs, _: _is_globs(globs), "must be a list of globs"),
    _Rule(
        "exclude_modules",
        lambda globs, others: not globs or others["quantization"] is not None,
        "has a meaning only with quantization",
    ),
    _Rule("quantization_param_path", lambda path, _: path is None or isinstance(path, str), "must be a path, or None"),
    _Rule("rendezvous", lambda url, _: url is None or _is_place(url), "must be tcp://HOST:PORT, or None"),
    _Rule("rendezvous", lambda url, others: url is None or others["launch"] == "external", "needs launch='external'"),
    _Rule("watermark", lambda share, _: is_number(share) and 0 <= share < 1, "must be a number from 0, below 1"),
)


def check(settings: Settings) -> None:
    """Raise ConfigError for the first rule that ``settings`` break, naming the field, the value and the rule."""
    for rule in _RULES:
        value = settings[rule.field]
        require(ConfigError, rule.holds(value, settings), rule.field, value, rule.words.format(**settings))
