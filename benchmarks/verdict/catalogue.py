"""Catalogue: validated case files of a directory. One Python file describes one bug, or one benign change."""

import importlib.util
import inspect
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.verdict.families import FAMILIES
from benchmarks.verdict.models import Model
from benchmarks.verdict.patching import Patch
from benchmarks.verdict.setup import Setup
from tapscope.core.errors import ConfigError, UsageError

VISIBILITIES = ("strong", "subtle")
PATCHES = ("transformers", "engine", "megatron", "checkpoint", "trainer")
_KNOWN = ("FAMILY", "PATCHES", "EXPECT", "VISIBILITY", "CAUSE", "BASELINE", "TARGET", "BOTH", "WHERE", "MODEL")
_MEGATRON: Mapping[str, Any] = {
    "schedule": "whole",
    "batch": "right",
}  # the only settings Megatron supports, so the other side uses them too
_PLACE = ("step", "rank", "request", "position")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A baseline, a target, and the expected result of comparing them."""

    name: str
    """The file name; family and changed settings are appended if a file describes several cases."""
    model: Model
    baseline: Setup
    target: Setup
    patches: str = "transformers"
    """Argument of ``patch``: one of :data:`PATCHES`."""
    patch: Patch | None = None
    expect: tuple[str, ...] = ()
    """Globs of the module to be named, or with a ``:`` of the site. Empty for a benign change."""
    visibility: str = ""
    cause: tuple[str, ...] = ()
    """Case-insensitive regular expressions, any of which accepts the stated cause; empty if the cause is not scored."""
    where: Mapping[str, Any] = field(default_factory=dict)
    """The place to be named: any of step, rank, request, position."""
    path: Path
    """The case file."""
    about: str = ""
    """First line of the file's docstring."""

    @property
    def family(self) -> str:
        """The model's family."""
        return self.model.family

    @property
    def fits_one_gpu(self) -> bool:
        """Whether both sides can run with device ``cuda``."""
        return self.baseline.fits_one_gpu and self.target.fits_one_gpu

    @property
    def needs_cuda(self) -> bool:
        """Whether either side runs on a GPU."""
        return "cuda" in (self.baseline.device, self.target.device)

    def on(self, device: str) -> "Case":
        """Return the case with both sides on this device."""
        sides = {"baseline": self.baseline.but({"device": device}), "target": self.target.but({"device": device})}
        return replace(self, **sides)

    @property
    def is_bug(self) -> bool:
        """Whether the case is a bug rather than a benign change."""
        return bool(self.expect)


def load(folder: Path, *, bugs: bool) -> list[Case]:
    """Return the cases of every ``*.py`` in a directory, ordered by name; raises UsageError for an invalid file."""
    if not folder.is_dir():
        raise UsageError(
            f"not a directory: {folder}; give a directory of case files (see benchmarks/verdict/README.md)"
        )
    files = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))
    if not files:
        raise UsageError(f"no case file (*.py) in {folder}")
    return [case for path in files for case in read(path, is_bug=bugs)]


def read(path: Path, *, is_bug: bool) -> list[Case]:
    """Return the cases of one file; raises UsageError with the invalid setting and the valid ones."""
    module = _imported(path)
    names = [name for name in vars(module) if name.isupper() and not name.startswith("_")]
    unknown = [name for name in names if name not in _KNOWN]
    _require(not unknown, path, f"unknown setting {unknown[:1]}; valid settings: {', '.join(_KNOWN)}")
    values = {name: getattr(module, name) for name in _KNOWN if hasattr(module, name)}
    patch = getattr(module, "patch", None)
    patches = values.get("PATCHES", "transformers")
    _require(patches in PATCHES, path, f"PATCHES is {patches!r}; it must be one of {', '.join(PATCHES)}")
    expect = _strings(path, "EXPECT", values.get("EXPECT", ()))
    visibility = values.get("VISIBILITY", "")
    if is_bug:
        _require(callable(patch), path, "a bug needs a function patch(model)")
        _require("EXPECT" in values, path, "a bug needs EXPECT, the module that is at fault, e.g. 'model.norm'")
        _require(visibility in VISIBILITIES, path, f"VISIBILITY is {visibility!r}; it must be strong or subtle")
    else:
        _require(not expect and not visibility, path, "a benign change has no EXPECT and no VISIBILITY")
    cause = _strings(path, "CAUSE", values.get("CAUSE", ()))
    _require(is_bug or not cause, path, "a benign change has no CAUSE")
    for expression in cause:
        _require(_is_regex(expression), path, f"CAUSE has {expression!r}; it must be a regular expression")
    _require(patch is None or _takes_one(patch), path, "patch must take one argument, the model or the weights")
    lasting = patches == "megatron" and inspect.isgeneratorfunction(patch)
    _require(
        not lasting,
        path,
        "Megatron's ranks outlive the case: its patch may change only the model, and cannot be a generator",
    )
    about = (module.__doc__ or "").strip().partition("\n")[0]
    _require(bool(about), path, "a case file must begin with a docstring that describes the bug")
    where = dict(values.get("WHERE", {}))
    strange = [name for name in where if name not in _PLACE]
    _require(not strange, path, f"unknown field {strange[:1]} in WHERE; valid fields: {', '.join(_PLACE)}")
    shared = {"patches": patches, "patch": patch, "expect": expect if is_bug else ()}
    shared |= {"cause": cause, "visibility": visibility, "where": where, "about": about, "path": path.resolve()}
    return [Case(**fields, **shared) for fields in _expanded(path, values, patches, patched=patch is not None)]


def _expanded(path: Path, values: Mapping[str, Any], patches: str, *, patched: bool) -> list[dict[str, Any]]:
    """Return the fields of one case per combination of family, MODEL, BOTH, BASELINE and TARGET."""
    families = _strings(path, "FAMILY", values.get("FAMILY", "llama"))
    framework = patches if patches in ("engine", "megatron") else "transformers"
    found = []
    groups = [_settings(path, name, values.get(name, {})) for name in ("MODEL", "BOTH", "BASELINE", "TARGET")]
    for name, sizes, shared, left, right in itertools.product(families, *groups):
        frameworks = [framework, *(side.get("framework") for side in (shared, left, right))]
        try:
            model = Model.of(name, sizes)
            start = Setup(framework=framework, **_MEGATRON if "megatron" in frameworks else {}).but(shared)
            sides = {"baseline": start.but(left), "target": start.but(right)}
        except (ConfigError, UsageError) as error:
            raise UsageError(f"{path}: {error}") from None
        trains = bool(sides["target"].optimizer)
        _require(trains or patches != "trainer", path, "a trainer's patch needs the setting optimizer, adamw or sgd")
        _require(
            not trains or patches != "transformers" or not patched, path, "with an optimizer PATCHES must be 'trainer'"
        )
        words = [] if len(families) == 1 else [name]
        for group, chosen in zip(groups, (sizes, shared, left, right), strict=True):
            words += [] if len(group) == 1 else [_settings_text(chosen)]
        case = path.stem + (f"[{','.join(words)}]" if words else "")
        found.append({"name": case, "model": model} | sides)
    return found


def _settings_text(settings: Mapping[str, Any]) -> str:
    """Format settings as part of a name, for example ``bfloat16 tp=2``."""
    return " ".join(v if isinstance(v, str) else f"{k}={v}" for k, v in settings.items()) or "same"


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"verdict_case_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # noqa: BLE001 - any exception of a user's file is reported with its path
        raise UsageError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from None
    return module


def _takes_one(patch: Any) -> bool:
    try:
        inspect.signature(patch).bind(None)
    except TypeError:
        return False
    return True


def _is_regex(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _strings(path: Path, name: str, value: Any) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else (None,)
    _require(
        all(isinstance(v, str) for v in found), path, f"{name} is {value!r}; expected a string or a list of strings"
    )
    if name == "FAMILY":
        _require(bool(found), path, f"FAMILY is empty; families are {', '.join(FAMILIES)}")
    return found


def _settings(path: Path, name: str, value: Any) -> Sequence[Mapping[str, Any]]:
    found = list(value) if isinstance(value, list | tuple) else [value]
    good = found and all(isinstance(v, Mapping) for v in found)
    _require(bool(good), path, f"{name} is {value!r}; it must be a dict of settings, or a list of such")
    return found


def _require(holds: bool, path: Path, sentence: str) -> None:
    if not holds:
        raise UsageError(f"{path}: {sentence}")
