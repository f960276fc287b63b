"""Source patches: changes to functions of a real module on disk, refused patches, and restoring the originals."""

import importlib
import sys
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from tapscope.core.errors import ConfigError
from tapscope.dumper import Dumper
from tapscope.source_patcher import Edit, FunctionPatch, SourcePatches, read_patches
from tapscope.sources import open_run

SOURCE = '''
import functools

import torch


def hidden(function):
    def wrapper(*args):
        return function(*args) + 1000
    return wrapper


def kept(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args) + 100
    return wrapper


def double(x):
    if x > 0:
        y = x
        return y * 2
    return 0


class Base:
    def value(self, x):
        return x


class Child(Base):
    __secret = 5

    def value(self, x, *, more=1):
        """Doc."""
        y = super().value(x) + self.__secret
        return y + more

    @staticmethod
    def static(x):
        return x + 1

    @classmethod
    def clazz(cls, x):
        return x + 2

    @property
    def size(self):
        return 7

    @torch.no_grad()
    def forward(self, x):
        return x + 3

    @kept
    def wrapped(x):
        return x + 4


@hidden
def buried(x):
    return x + 5


@functools.lru_cache
def cached(x):
    return x + 6


def make(n):
    def scaled(x):
        return x * n
    return scaled


twice = make(2)


def outer(x):
    def inner(y):
        return y
    return inner(x)


def fails(x):
    return 1 / 0


short = lambda x: x
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    name = "patched_module"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop(name, None)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def patch(qualname: str, *edits: tuple[str, str, str]) -> FunctionPatch:
    return FunctionPatch(f"patched_module:{qualname}", tuple(Edit(*edit) for edit in edits))


CASES: list[tuple[str, tuple[str, str, str], Any, Any, Any]] = [
    ("double", ("y = x", "append", "y += 1"), lambda m: m.double(3), 6, 8),
    ("double", ("return y * 2", "prepend", "if y == 3:\n    y = 10\n"), lambda m: m.double(3), 6, 20),
    ("double", ("  y = x\n  return y * 2", "replace", "return -x"), lambda m: m.double(3), 6, -3),
    ("double", ("if x > 0:\n    y = x\n    return y * 2", "replace", ""), lambda m: m.double(3), 6, 0),
    ("Child.value", ("return y + more", "replace", "return y * 2 + more"), lambda m: m.Child().value(1), 7, 13),
    ("Child.static", ("return x + 1", "replace", "return x - 1"), lambda m: m.Child.static(1), 2, 0),
    ("Child.clazz", ("return x + 2", "replace", "return cls.static(x) * 2"), lambda m: m.Child.clazz(1), 3, 4),
    ("Child.size", ("return 7", "replace", "return 8"), lambda m: m.Child().size, 7, 8),
    ("Child.forward", ("return x + 3", "replace", "return x - 3"), lambda m: m.Child().forward(1), 4, -2),
    ("Child.wrapped", ("return x + 4", "replace", "return x - 4"), lambda m: m.Child.wrapped(1), 105, 97),
    ("buried", ("return x + 5", "replace", "return x - 5"), lambda m: m.buried(1), 1006, 996),
    ("twice", ("return x * n", "replace", "return x * n * n"), lambda m: m.twice(3), 6, 12),
    ("outer", ("return y", "replace", "return y + x"), lambda m: m.outer(3), 3, 6),
]


@pytest.mark.parametrize(("qualname", "edit", "call", "before", "after"), CASES)
def test_patch_changes_the_function_and_undo_restores_it(
    module: ModuleType, qualname: str, edit: tuple[str, str, str], call: Any, before: Any, after: Any
) -> None:
    double = module.double
    assert call(module) == before
    with SourcePatches([patch(qualname, edit)]):
        assert call(module) == after
        assert module.double is double
        assert module.make(3)(2) == 6  # other closures of the same code are unchanged
    assert call(module) == before


def test_several_edits_and_functions_of_one_file_apply_together(module: ModuleType) -> None:
    patches = [
        patch("Child.static", ("return x + 1", "prepend", "x = x * 10")),
        patch("double", ("y = x", "replace", "y = x\nz = 1"), ("return y * 2", "replace", "return y * 2 + z")),
    ]
    with SourcePatches(patches) as applied:
        applied.apply()  # a second call has no effect
        assert (module.Child.static(1), module.double(3)) == (11, 7)
    assert (module.Child.static(1), module.double(3)) == (2, 6)


def test_traceback_shows_the_patched_lines(module: ModuleType) -> None:
    with SourcePatches([patch("fails", ("return 1 / 0", "replace", "zero = 0\nreturn 2 / zero"))]):
        with pytest.raises(ZeroDivisionError) as caught:
            module.fails(1)
        text = "".join(traceback.format_exception(caught.value))
        assert "return 2 / zero" in text
        assert "patched_module.py (patched by tapscope)" in text


REFUSED = [
    (patch("double", ("z = x", "replace", "")), r"match 'z = x' does not occur \(the nearest line is 'y = x'\)"),
    (patch("double", ("return", "replace", "")), "'return' does not occur"),
    (patch("Child.value", ("y = 1\nreturn", "replace", "")), "does not occur"),
    (patch("double", ("if x > 0:\ny = x", "append", "")), "does not occur with the lines after it"),
    (patch("double", ("y = x", "append", "y = x"), ("y = x", "replace", "")), "'y = x' occurs 2 times"),
    (patch("double", ("y = x", "replace", "y = (")), "the patched source does not compile"),
    (patch("double", ("def double(x):", "replace", "def double(x, z):")), "changes its parameters"),
    (patch("double", ("y = x", "append", "yield y")), "makes it a generator"),
    (patch("twice", ("return x * n", "replace", "return x")), r"other variables of the enclosing function \(n\)"),
    (patch("outer.<locals>.inner", ("return y", "replace", "")), "patch the outer one"),
    (patch("missing", ("x", "replace", "")), "patched_module has no attribute 'missing'"),
    (patch("Child.missing", ("x", "replace", "")), "Child has no attribute 'missing'"),
    (patch("short", ("x", "replace", "")), "is a lambda"),
    (patch("Child", ("x", "replace", "")), "Child holds no Python function"),
    (FunctionPatch("math:sqrt", (Edit("x", "replace", ""),)), "sqrt holds no Python function"),
    (FunctionPatch("no_such_module:f", (Edit("x", "replace", ""),)), "cannot import no_such_module"),
]


@pytest.mark.parametrize(("refused", "reason"), REFUSED)
def test_wrong_patch_is_refused_and_nothing_is_applied(module: ModuleType, refused: FunctionPatch, reason: str) -> None:
    good = patch("Child.static", ("return x + 1", "replace", "return 0"))
    with pytest.raises(ConfigError, match=reason):
        SourcePatches([good, refused]).apply()
    assert module.Child.static(1) == 2


def test_inherited_twice_named_and_already_patched_functions_are_refused(module: ModuleType) -> None:
    edit = ("return x", "replace", "return -x")
    with SourcePatches([patch("Base.value", edit)]):
        with pytest.raises(ConfigError, match="already patched"):
            SourcePatches([patch("Base.value", edit)])
        assert module.Child().value(1) == 5

    class Grandchild(module.Child):  # type: ignore[name-defined]
        pass

    module.Grandchild = Grandchild  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="value is inherited from patched_module:Child"):
        SourcePatches([patch("Grandchild.value", edit)])
    with pytest.raises(ConfigError, match="named twice"):
        SourcePatches([patch("Base.value", edit)] * 2)


def test_changed_source_is_refused(module: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "patched_module.py").write_text(SOURCE.replace("return y * 2", "return y * 3"))
    with pytest.raises(ConfigError, match="changed since it was imported"):
        SourcePatches([patch("double", ("y = x", "replace", "y = 1"))])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must hold one list, 'patches'"),
        ("patches: []", "must hold one list"),
        ("patches: [{target: 'a:b'}]", r"patches\[0\]: must have the keys target and edits"),
        ("patches: [{target: a.b, edits: [{match: x, replace: y}]}]", "target 'a.b' must be module:qualname"),
        ("patches: [{target: 'a:b', edits: [{match: x}]}]", "match and exactly one of replace, prepend, append"),
        ("patches: [{target: 'a:b', edits: [{match: x, replace: y, append: z}]}]", "exactly one of"),
        ("patches: [{target: 'a:b', edits: [{match: ' ', replace: y}]}]", "match is empty"),
        ("patches: [{target: 'a:b', edits: [{match: x, replace: 1}]}]", "must be strings"),
    ],
)
def test_wrong_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "patches.yaml").write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_patches(tmp_path / "patches.yaml")


def test_dumper_applies_patches_while_it_is_open_and_the_run_tells_it(module: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "patches.yaml"
    file.write_text(
        textwrap.dedent("""
        patches:
          - target: patched_module:double
            edits:
              - match: y = x
                append: y = y + 1
        """)
    )
    model = nn.Linear(2, 2)
    with Dumper(model, tmp_path / "run", source_patches=str(file)) as dumper, torch.no_grad():
        model(torch.ones(1, 2))
        assert module.double(3) == 8
        with pytest.raises(ConfigError, match="'source_patches' is fixed when the dumper starts"):
            dumper.configure(source_patches="other.yaml")
    assert module.double(3) == 6
    with open_run(tmp_path / "run") as run:
        (event,) = [e.fields for e in run.events() if e.kind == "source_patches"]
    assert event["functions"] == ["patched_module:double"]
    file.write_text("patches: 1")
    with pytest.raises(ConfigError, match="must hold one list"):
        Dumper(model, tmp_path / "other", source_patches=str(file)).open()
