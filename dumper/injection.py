"""Injector: overwrites inputs and outputs of a live model's modules by values that a run recorded.

Rows are found by request and position, so the recorded run may have been scheduled in other steps. The compute stays
the model's: only the tensors that are named are replaced, by copies in the dtype and on the device of the live tensor.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from tapscope.core.errors import ConfigError, TapscopeError
from tapscope.core.observe import RowSpan, StepInfo
from tapscope.core.site import parse
from tapscope.dumper.records.flatten import flatten, path_part
from tapscope.dumper.taps.taps import Tap, find_taps
from tapscope.run_format.record import FORWARD, Record
from tapscope.run_format.run import Run

Slot = tuple[int, int]
"""(step, index in the flattened token grid)."""


class StoredTensors:
    """The tensors of a run of one rank, in the token layout of a live step.

    Raises ConfigError for a run of several ranks, whose tensors are shards.
    """

    def __init__(self, run: Run) -> None:
        if len(run.ranks) > 1:
            raise ConfigError(f"{run.path} has {len(run.ranks)} ranks; only the tensors of a run of one rank are whole")
        self._run = run
        self._records: dict[tuple[str, int, int], Record] = {}
        for record in run.records:
            key = record.key
            if record.entry is not None and key.pass_ == FORWARD and key.micro == 0:
                self._records[key.site, key.step, key.occurrence] = record
        self._sites = {site for site, _, _ in self._records}
        self._steps = {step: next(iter(lines.values())).info for step, lines in run.steps.items()}
        self._slots: dict[tuple[str, int], Slot] = {}
        for number in sorted(self._steps):
            for span in self._steps[number].rows:
                for i in range(span.count):
                    self._slots[span.request, span.position + i] = number, span.slot + i

    def has(self, site: str) -> bool:
        """Whether any step has values of the site."""
        return site in self._sites

    def read(self, site: str, step: StepInfo, live: torch.Tensor, occurrence: int = 0) -> torch.Tensor:
        """The recorded value in the place of ``live``; raises LookupError that names what is missing or does not fit.

        A tensor of the same step layout is taken whole. Otherwise each row comes from the step that computed it, and
        padding rows keep their live values.
        """
        same = self._same_step(step)
        if same is not None and (record := self._records.get((site, same, occurrence))) is not None:
            if tuple(record.shape) == tuple(live.shape) and record.slice is None:
                return _tensor(self._run, record).to(live.device, live.dtype)
            if not step.rows:
                raise LookupError(f"shape {_shape(live.shape)}, recorded {_shape(record.shape)}")
        return self._by_rows(site, step, live, occurrence)

    def _same_step(self, step: StepInfo) -> int | None:
        """The recorded step with the same rows in the same slots."""
        if not step.rows:
            return step.step if step.step in self._steps else None
        first = self._slots.get((step.rows[0].request, step.rows[0].position))
        if first is None:
            return None
        other = self._steps[first[0]]
        same = tuple(other.grid) == tuple(step.grid) and _places(other.rows) == _places(step.rows)
        return first[0] if same else None

    def _by_rows(self, site: str, step: StepInfo, live: torch.Tensor, occurrence: int) -> torch.Tensor:
        rows = _as_rows(live, step.grid)
        if not step.rows or rows is None:
            raise LookupError("not recorded at this step, and its rows are not tokens")
        result = rows.clone()
        missing, live_rows = 0, sum(span.count for span in step.rows)
        wanted: dict[int, tuple[list[int], list[int]]] = {}
        for span in step.rows:
            for i in range(span.count):
                found = self._slots.get((span.request, span.position + i))
                if found is None or (site, found[0], occurrence) not in self._records:
                    missing += 1
                    continue
                here, there = wanted.setdefault(found[0], ([], []))
                here.append(span.slot + i)
                there.append(found[1])
        if missing:
            raise LookupError(f"{missing} of {live_rows} token rows were not recorded")
        for number, (here, there) in wanted.items():
            record = self._records[site, number, occurrence]
            stored = (
                None if record.slice else _as_rows(_tensor(self._run, record), _grid_of(record, self._steps[number]))
            )
            if stored is None or stored.shape[1:] != rows.shape[1:]:
                raise LookupError(f"shape {_shape(live.shape)}, recorded {_shape(record.shape)}")
            if record.rows is not None:
                order = {slot: i for i, slot in enumerate(s for a, n in record.rows for s in range(a, a + n))}
                if lacking := sum(slot not in order for slot in there):
                    raise LookupError(f"{lacking} of {live_rows} token rows were not recorded")
                there = [order[slot] for slot in there]
            result[here] = stored[there].to(live.device, live.dtype)
        return result.reshape(live.shape)


def _places(rows: tuple[RowSpan, ...]) -> list[tuple[str, int, int, int]]:
    return [(span.request, span.position, span.count, span.slot) for span in rows]


def _grid_of(record: Record, step: StepInfo) -> tuple[int, ...]:
    """The token axes of a record, which may hold some slots of the step's grid only."""
    return tuple(step.grid) if record.rows is None else (sum(count for _, count in record.rows),)


def _as_rows(tensor: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor | None:
    """The tensor as ``[slots, ...]``; None if it does not begin with the token axes."""
    slots, shape = int(np.prod(grid, dtype=np.int64)), tuple(tensor.shape)
    if shape[:2] == tuple(grid) or shape[:2] == (1, slots):
        return tensor.reshape(slots, *shape[2:])
    return tensor if grid and shape[:1] == (slots,) else None


def _tensor(run: Run, record: Record) -> torch.Tensor:
    array = np.array(run.array(record))
    if array.dtype.kind == "V" or array.dtype.name.startswith(("bfloat16", "float8")):
        array = array.astype(np.float32)  # exact
    return torch.from_numpy(array)


def _shape(shape: Any) -> str:
    return "×".join(map(str, shape)) or "scalar"


def module_paths(model: nn.Module) -> set[str]:
    """Paths of the modules whose inputs and outputs can be overwritten."""
    return {tap.path for tap in find_taps(model)}


class Problem(NamedTuple):
    """A value that could not be injected; the model computed with its own."""

    site: str
    step: int
    reason: str


class Injector:
    """Overwrites values of a model while the context is open.

    ::

        with Injector(model, StoredTensors(run), {"layers.3.mlp:in[x]": "layers.3.mlp:in[x]"}, lambda: step):
            model(...)

    ``sites`` maps sites of the model (inputs or outputs) to those of the run. ``step`` returns the step being computed.
    What cannot be injected is listed in :attr:`problems`, and never raised in the model. Open it before or after a
    Dumper: its hooks come first, so the dumper records what was injected.
    """

    def __init__(
        self,
        model: nn.Module,
        values: StoredTensors,
        sites: Mapping[str, str],
        step: Callable[[], StepInfo | None],
    ) -> None:
        """Raises ConfigError for a site that no module of the model has."""
        self._model, self._values, self._step = model, values, step
        self._taps = {tap.path: tap for tap in find_taps(model)}
        self._sites: dict[tuple[str, str], dict[str, str]] = {}
        self.problems: list[Problem] = []
        self.injected: dict[str, int] = {}
        """Site -> number of tensors that were replaced."""
        self._occurrences: dict[tuple[str, str], tuple[int, int]] = {}
        self._handles: list[Any] = []
        for site, stored in sites.items():
            place = parse(site)
            if place.path not in self._taps or place.kind not in ("in", "out") or place.is_grad:
                raise ConfigError(f"{site} is not an input or output of a module of this model")
            self._sites.setdefault((place.path, place.kind), {})[place.name or ""] = stored

    def __enter__(self) -> "Injector":
        modules = dict(self._model.named_modules(remove_duplicate=False))
        for (path, kind), names in self._sites.items():
            tap, module = self._taps[path], modules[path]
            if kind == "in":
                self._handles.append(
                    module.register_forward_pre_hook(self._before(tap, names), prepend=True, with_kwargs=True)
                )
            else:
                self._handles.append(module.register_forward_hook(self._after(tap, names), prepend=True))
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, tap: Tap, names: Mapping[str, str]) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            changes = self._changes(tap, "in", tap.named_inputs(args, kwargs), names)
            if not changes:
                return None
            positional = [tap.names[i] if i < len(tap.names) else f"args.{i}" for i in range(len(args))]
            new = tuple(_replaced(value, name, changes) for name, value in zip(positional, args, strict=True))
            return new, {name: _replaced(value, path_part(name), changes) for name, value in kwargs.items()}

        return hook

    def _after(self, tap: Tap, names: Mapping[str, str]) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            changes = self._changes(tap, "out", output, names)
            return _replaced(output, "", changes) if changes else None

        return hook

    def _changes(self, tap: Tap, kind: str, value: Any, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Path of a leaf -> what replaces it."""
        step = self._step()
        if step is None:
            return {}
        before = self._occurrences.get((tap.path, kind))
        occurrence = before[1] + 1 if before is not None and before[0] == step.step else 0
        self._occurrences[tap.path, kind] = step.step, occurrence
        found: dict[str, torch.Tensor] = {}
        for path, leaf in flatten(value):
            if path not in names or not isinstance(leaf, torch.Tensor):
                continue
            site = f"{tap.path}:{kind}[{path}]" if path else f"{tap.path}:{kind}"
            try:
                found[path] = self._values.read(names[path], step, leaf, occurrence)
                self.injected[site] = self.injected.get(site, 0) + 1
            except (LookupError, TapscopeError) as error:
                self.problems.append(Problem(site, step.step, str(error)))
            except Exception as error:  # noqa: BLE001 - the model must go on
                self.problems.append(Problem(site, step.step, f"{type(error).__name__}: {error}"))
        return found


def _replaced(value: Any, path: str, changes: Mapping[str, torch.Tensor]) -> Any:
    """``value`` with the leaves of ``changes`` in their places, by the paths of :func:`flatten`."""
    if isinstance(value, torch.Tensor):
        return changes.get(path, value)
    if not any(name == path or name.startswith(f"{path}.") or not path for name in changes):
        return value

    def below(name: str) -> str:
        return f"{path}.{name}" if path else name

    if isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = [_replaced(x, below(n), changes) for n, x in zip(value._fields, value, strict=True)]
        return type(value)(*parts)
    if isinstance(value, tuple | list):
        return type(value)(_replaced(x, below(str(i)), changes) for i, x in enumerate(value))
    if isinstance(value, dict):
        new = copy.copy(value)  # a ModelOutput stays one, and the caller's mapping is not changed
        for key, each in value.items():
            new[key] = _replaced(each, below(path_part(str(key))), changes)
        return new
    return value
