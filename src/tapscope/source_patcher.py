"""Source patcher: replaces source lines in functions of imported modules, and restores them.

A YAML file lists functions and their edits::

    patches:
      - target: mypkg.attention:Attention.forward
        edits:
          - match: scores = scores * self.scale
            replace: scores = scores.float() * self.scale
          - match: return output
            prepend: dumper.dump("scores", scores)

The whole source file is compiled with the edits, and the code object of each function is exchanged. Decorators are
therefore not executed again, references to the function stay valid, and closures and ``super()`` work. Tracebacks show
the patched lines.
"""

import ast
import functools
import hashlib
import importlib
import inspect
import linecache
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Self

from msgspec import Struct

from tapscope.core.errors import ConfigError
from tapscope.core.yaml_file import read_yaml

__all__ = ["Edit", "FunctionPatch", "SourcePatches", "read_patches"]

_HOW = ("replace", "prepend", "append")
_MARK = " (patched by tapscope)"
"""Suffix of the file name of patched code, under which tracebacks look up its lines."""


class Edit(Struct, frozen=True):
    """A change to a function: the lines ``match``, which must occur exactly once, and how to change them."""

    match: str
    how: str
    """``replace``, ``prepend`` (lines before the match) or ``append`` (after it)."""
    text: str
    """New lines, indented like the matched lines. Empty with ``replace``: the lines are deleted."""


class FunctionPatch(Struct, frozen=True):
    """The edits to one function."""

    target: str
    """``module:qualname``, such as ``pkg.mod:Class.method``."""
    edits: tuple[Edit, ...]


class _Target(Struct, frozen=True):
    """A function and the location of its source."""

    patch: FunctionPatch
    function: Any
    """A FunctionType; declared as Any because mypy would treat it as a method."""
    file: str
    first: int
    """Index of the ``def`` line."""
    stop: int
    """Index after the last line."""
    nth: int
    """Index among the functions with the same qualified name in the file."""


def read_patches(path: str | Path) -> list[FunctionPatch]:
    """Read the patches in a YAML file; raises ConfigError with the file, the entry and the valid format."""
    content = read_yaml(Path(path))
    entries = content.get("patches")
    if set(content) != {"patches"} or not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: must hold one list, 'patches', of target and edits")
    return [_patch(f"{path}: patches[{i}]", entry) for i, entry in enumerate(entries)]


def _patch(where: str, entry: Any) -> FunctionPatch:
    if not isinstance(entry, Mapping) or set(entry) != {"target", "edits"}:
        raise ConfigError(f"{where}: must have the keys target and edits, and no others")
    target, edits = entry["target"], entry["edits"]
    if not isinstance(target, str) or not all(target.partition(":")) or target.count(":") != 1:
        raise ConfigError(f"{where}: target {target!r} must be module:qualname, such as pkg.mod:Class.method")
    if not isinstance(edits, list) or not edits:
        raise ConfigError(f"{where}: edits must be a list of match with one of {', '.join(_HOW)}")
    return FunctionPatch(target, tuple(_edit(f"{where}.edits[{i}]", edit) for i, edit in enumerate(edits)))


def _edit(where: str, edit: Any) -> Edit:
    names = set(edit) if isinstance(edit, Mapping) else set()
    if len(names) != 2 or "match" not in names or not names & set(_HOW):
        raise ConfigError(f"{where}: must have match and exactly one of {', '.join(_HOW)}")
    how = next(name for name in _HOW if name in names)
    if not isinstance(edit["match"], str) or not isinstance(edit[how], str):
        raise ConfigError(f"{where}: match and {how} must be strings; quote them or write them as a block (|)")
    if not edit["match"].strip():
        raise ConfigError(f"{where}: match is empty; name the lines to {how}")
    return Edit(edit["match"], how, edit[how])


class SourcePatches:
    """Context manager that applies source patches while it is open.

    ::

        with SourcePatches.of("patches.yaml"):
            model(...)

    All patches are checked before the first one is applied.
    """

    def __init__(self, patches: Sequence[FunctionPatch]) -> None:
        """Import the modules and check every patch; raises ConfigError. Does not change any function yet."""
        by_file: dict[str, list[_Target]] = {}
        for patch in patches:
            one = _find(patch)
            if any(one.function is other.function for other in by_file.get(one.file, ())):
                raise ConfigError(f"{patch.target}: the function is named twice; give it one entry with all edits")
            by_file.setdefault(one.file, []).append(one)
        self.targets = tuple(patch.target for patch in patches)
        self._sources: dict[str, list[str]] = {}
        self._new: list[tuple[FunctionType, CodeType]] = []
        self._old: list[tuple[FunctionType, CodeType]] = []
        for file, functions in by_file.items():
            self._new += self._compiled(file, functions)

    @classmethod
    def of(cls, path: str | Path) -> "SourcePatches":
        """Read the patches from a YAML file; raises like :func:`read_patches` and the constructor."""
        return cls(read_patches(path))

    def apply(self) -> Self:
        """Replace the code of every function; no effect if already applied."""
        if not self._old:
            for name, lines in self._sources.items():
                linecache.cache[name] = sum(map(len, lines)), None, lines, name
            self._old = [(function, function.__code__) for function, _ in self._new]
            for function, code in self._new:
                function.__code__ = code
        return self

    def undo(self) -> None:
        """Restore the original code of every function."""
        for function, code in self._old:
            function.__code__ = code
        self._old = []

    def __enter__(self) -> Self:
        return self.apply()

    def __exit__(self, *exc: object) -> None:
        self.undo()

    def _compiled(self, file: str, functions: Sequence[_Target]) -> Iterator[tuple[FunctionType, CodeType]]:
        """Yield the functions of one file with their patched code objects."""
        lines = linecache.getlines(file)
        for one in sorted(
            functions, key=lambda one: one.first, reverse=True
        ):  # from the end, so that earlier indices stay valid
            lines = [*lines[: one.first], *_edited(one.patch, lines[one.first : one.stop]), *lines[one.stop :]]
        text = "".join(lines)
        # A unique name per text: running calls keep the lines their code was compiled from.
        name = f"{file}{_MARK} {hashlib.sha256(text.encode()).hexdigest()[:8]}"
        names = ", ".join(one.patch.target for one in functions)
        try:
            module = compile(text, name, "exec", dont_inherit=True)
        except SyntaxError as error:
            shown = (error.text or "").strip()
            raise ConfigError(f"{names}: the patched source does not compile: {error.msg}, at {shown!r}") from None
        self._sources[name] = lines
        for one in functions:
            code = _codes(module, one.function.__code__.co_qualname)[one.nth]
            _check_exchangeable(one, code)
            yield one.function, code


def _find(patch: FunctionPatch) -> _Target:
    """Locate the function of a patch; raises ConfigError with the reason if it cannot be patched."""
    module_name, _, qualname = patch.target.partition(":")
    if "<locals>" in qualname:
        raise ConfigError(
            f"{patch.target}: each call of the outer function creates this one again; patch the outer one"
        )
    try:
        value: Any = importlib.import_module(module_name)
    except Exception as error:  # noqa: BLE001 - importing a module can raise anything
        raise ConfigError(f"{patch.target}: cannot import {module_name}: {type(error).__name__}: {error}") from None
    for name in qualname.split("."):
        if isinstance(value, type) and name not in vars(value) and hasattr(value, name):
            owner = next(each for each in value.__mro__ if name in vars(each))
            raise ConfigError(
                f"{patch.target}: {name} is inherited from {owner.__module__}:{owner.__qualname__}; patch it "
                "there, for all of its subclasses"
            )
        try:
            value = inspect.getattr_static(value, name)
        except AttributeError:
            raise ConfigError(f"{patch.target}: {_name_of(value)} has no attribute {name!r}") from None
    function = _function_in(value, patch.target)
    code = function.__code__
    if _MARK in code.co_filename:
        raise ConfigError(f"{patch.target}: the function is already patched; undo that first, or join the files")
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename)
    if not lines:
        raise ConfigError(f"{patch.target}: its source, {code.co_filename}, is not available")
    tree = ast.parse("".join(lines))
    nodes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and min([node.lineno, *(each.lineno for each in node.decorator_list)]) == code.co_firstlineno
    ]
    same = _codes(compile(tree, code.co_filename, "exec", dont_inherit=True), code.co_qualname)
    nth = next((i for i, each in enumerate(same) if each == code), None)
    if not nodes or nth is None:
        kind = "a lambda" if function.__name__ == "<lambda>" else "changed since it was imported, or generated"
        raise ConfigError(f"{patch.target}: the source in {code.co_filename} is {kind}; it cannot be patched")
    return _Target(patch, function, code.co_filename, nodes[0].lineno - 1, nodes[0].end_lineno or 0, nth)


def _function_in(value: Any, target: str) -> FunctionType:
    """Return the function itself, unwrapped from its decorators, by its qualified name."""
    qualname, queue, seen = target.partition(":")[2], [value], list[Any]()
    name = qualname.rpartition(".")[2]
    functions = []
    while queue:
        each = queue.pop(0)
        if any(each is other for other in seen) or len(seen) > 100:
            continue
        seen.append(each)
        if isinstance(each, FunctionType):
            code = each.__code__
            if code.co_qualname == qualname:
                return each
            functions.append(each)
            queue += [cell.cell_contents for cell in each.__closure__ or () if _is_set(cell)]
        if isinstance(each, property):
            queue.append(each.fget)
        elif isinstance(each, functools.partial | functools.partialmethod | functools.cached_property):
            queue.append(each.func)
        queue += [inside for at in ("__wrapped__", "__func__") if (inside := getattr(each, at, None)) is not None]
    namesakes = [each for each in functions if each.__name__ == name or each.__code__.co_name == name]
    if namesakes:  # a method assigned from another class, or a closure assigned to a name
        return namesakes[0]
    if not functions:
        raise ConfigError(f"{target}: {_name_of(value)} holds no Python function; only these can be patched")
    return functions[0]


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _codes(code: CodeType, qualname: str) -> list[CodeType]:
    """Return the code objects of functions with this qualified name inside ``code``, in order."""
    codes = []
    for each in code.co_consts:
        if isinstance(each, CodeType):
            codes += [each] * (each.co_qualname == qualname) + _codes(each, qualname)
    return codes


def _check_exchangeable(one: _Target, new: CodeType) -> None:
    old, target = one.function.__code__, one.patch.target
    kinds = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    takes = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    count = old.co_argcount + old.co_kwonlyargcount
    counts = [(c.co_argcount, c.co_posonlyargcount, c.co_kwonlyargcount, c.co_flags & takes) for c in (old, new)]
    if counts[0] != counts[1] or old.co_varnames[:count] != new.co_varnames[:count]:
        raise ConfigError(f"{target}: the patch changes its parameters; only the lines below them can be patched")
    if old.co_flags & kinds != new.co_flags & kinds:
        raise ConfigError(f"{target}: the patch makes it a generator or a coroutine, or no longer one")
    if old.co_freevars != new.co_freevars:
        names = ", ".join(sorted(set(old.co_freevars) ^ set(new.co_freevars)))
        raise ConfigError(
            f"{target}: the patch uses other variables of the enclosing function ({names}); these are fixed when "
            "the function is created"
        )


def _edited(patch: FunctionPatch, lines: list[str]) -> list[str]:
    """Apply the edits to the lines of a function, in order; raises ConfigError unless each matches exactly once."""
    for edit in patch.edits:
        wanted = _dedented(edit.match)
        at = [i for i in range(len(lines)) if _dedented("".join(lines[i : i + len(wanted)])) == wanted]
        if len(at) != 1:
            count = "does not occur" if not at else f"occurs {len(at)} times"
            hint = "" if at else _nearest(wanted, lines)
            raise ConfigError(f"{patch.target}: match {wanted[0]!r} {count}{hint}; it must occur exactly once")
        first, stop = at[0], at[0] + len(wanted)
        lead = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
        new = [f"{lead}{line}\n" if line else "\n" for line in _dedented(edit.text)]
        old = lines[first:stop]
        middle = {"replace": new, "prepend": [*new, *old], "append": [*old, *new]}[edit.how]
        lines = [*lines[:first], *middle, *lines[stop:]]
    return lines


def _dedented(text: str) -> list[str]:
    """Return the lines without common indentation, trailing blanks, and leading and trailing empty lines."""
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[0]:
        lines.pop(0)
    while lines and not lines[-1]:
        lines.pop()
    return textwrap.dedent("\n".join(lines)).split("\n") if lines else []


def _nearest(wanted: list[str], lines: Sequence[str]) -> str:
    """Return a hint about the closest match, for an error message."""
    import difflib

    present = [line.strip() for line in lines]
    if wanted[0].strip() in present:
        return " with the lines after it" if len(wanted) > 1 else " at this indentation"
    near = difflib.get_close_matches(wanted[0].strip(), present, 1, 0.6)
    return f" (the nearest line is {near[0]!r})" if near else ""


def _name_of(value: Any) -> str:
    return str(getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or type(value).__name__)
