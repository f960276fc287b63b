"""Export of a run to other formats: SGLang dump, .npz or .pt files, CSV tables, scalars over steps.

Exported tensors are read back as the same sites, see :mod:`.site_names` and :mod:`tapscope.sglang.filenames`. In npz
and pt, later calls and recomputation become separate sites (``….call1``, ``….recompute``).
"""

import csv
import json
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tapscope.core.errors import MissingExtraError, RunCorruptError, RunExistsError
from tapscope.core.formatting import plural
from tapscope.core.site import layer_of
from tapscope.run_format.record import RECOMPUTE, Record
from tapscope.run_format.run import Run
from tapscope.sglang.filenames import CORE, GRAD, HOOK, PARAM
from tapscope.tensor_files.site_names import name_of_site
from tapscope.tensor_files.torch_save_writer import save

FORMATS = ("sglang", "npz", "pt", "csv", "tensorboard", "wandb")
_UNSAFE = re.compile(r"[^\w.,()+@=-]")
_MAX_NAME_LENGTH = 200
"""Maximum number of characters of a file name that are derived from a site."""
_COLUMNS = ("step", "rank", "site", "occurrence", "micro", "pass", "model", "dtype", "shape", "dims", "value")
_SCALARS = ("mean", "std", "rms", "absmax")
"""Statistics exported as curves to TensorBoard and Weights & Biases, in addition to the number of non-finite values."""
_STATS = ("count", "min", "max", "mean", "std", "rms", "absmax", "nan", "posinf", "neginf", "zeros")


@dataclass(slots=True)
class Exported:
    """Counts of exported, omitted and converted values."""

    num_files: int = 0
    num_values: int = 0
    nbytes: int = 0
    statistics_only: int = 0
    """Number of records omitted because the run has only their statistics."""
    plain: int = 0
    """Number of non-tensor values omitted because the format cannot represent them."""
    widened: int = 0
    """Number of bfloat16 and FP8 tensors written as float32, because NumPy lacks these dtypes."""

    def notes(self) -> list[str]:
        """Return one sentence for each kind of omitted or converted value."""
        sentences = []
        if self.statistics_only:
            sentences.append(f"{plural(self.statistics_only, 'record')} left out: only statistics were captured")
        if self.plain:
            sentences.append(f"{plural(self.plain, 'value')} left out: the format has no place for them")
        if self.widened:
            sentences.append(f"{plural(self.widened, 'tensor')} written as float32: numpy has no bfloat16 or FP8")
        return sentences

    def to_json(self) -> dict[str, int]:
        """Return the counts by name."""
        return asdict(self)


def export_run(
    run: Run, records: Iterable[Record], to: str, out: Path, advance: Callable[[int], None] = lambda n: None
) -> Exported:
    """Write ``records`` to the new or empty directory ``out``; ``to`` is one of :data:`FORMATS`.

    Raises RunExistsError if ``out`` is in use, RunCorruptError if values cannot be read or files cannot be written, and
    MissingExtraError for ``tensorboard`` and ``wandb`` without the package.
    """
    if to in ("tensorboard", "wandb") and find_spec(to) is None:
        raise MissingExtraError(f"export to {to}: {to} is not installed; pip install {to}")
    try:
        if out.exists() and (not out.is_dir() or next(out.iterdir(), None) is not None):
            raise RunExistsError(f"{out} exists and is not an empty directory; export to another directory")
        out.mkdir(parents=True, exist_ok=True)
        writers = {"sglang": _sglang, "npz": _npz, "pt": _pt, "csv": _csv, "tensorboard": _tensorboard, "wandb": _wandb}
        done = Exported()
        for path in writers[to](run, records, out, done):
            done.num_files += 1
            done.nbytes += path.stat().st_size
            advance(1)
    except OSError as error:
        raise RunCorruptError(f"{error.filename or out}: cannot be written: {error.strerror or error}") from None
    return done


def _values(run: Run, records: Iterable[Record], done: Exported) -> Iterator[tuple[Record, Any]]:
    """Yield records with their arrays or plain values; other records are counted in ``done``."""
    for record in records:
        if record.dtype is None:
            value = _plain(record.value)
            if value is _UNSUPPORTED:
                done.plain += 1
            else:
                yield record, value
        elif record.entry is None:
            done.statistics_only += 1
        else:
            yield record, run.array(record)


_UNSUPPORTED = object()


def _plain(value: Any) -> Any:
    """Decode a non-tensor value from its JSON form.

    Returns ``_UNSUPPORTED`` for objects, truncated values and integers beyond 128 bits. Floats inside a list remain
    strings, as in the run.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "float":
        return float(value["value"])
    if (kind == "int" and value["value"].bit_length() > 127) or (kind is not None and "cut" in value):
        return _UNSUPPORTED
    return value.get("value") if kind in ("none", "bool", "int", "str", "list") else _UNSUPPORTED


def _pt(run: Run, records: Iterable[Record], out: Path, done: Exported) -> Iterator[Path]:
    names = _Names()
    for record, value in _values(run, records, done):
        path = _folder(run, record, out) / f"{names.of(record)}.pt"
        save(path, value)
        done.num_values += 1
        yield path


def _npz(run: Run, records: Iterable[Record], out: Path, done: Exported) -> Iterator[Path]:
    """Write one file per step and rank, array by array."""
    names = _Names()
    groups: dict[tuple[int, int], list[Record]] = {}
    for record in records:
        groups.setdefault((record.key.step, record.key.rank), []).append(record)
    for (step, rank), group in groups.items():
        path = out / (f"step{step}_rank{rank}.npz" if len(run.ranks) > 1 else f"step{step}.npz")
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for record, value in _values(run, group, done):
                if record.dtype is None:
                    done.plain += 1
                    continue
                if value.dtype.kind == "V" or value.dtype.name.startswith(("bfloat16", "float8")):
                    value, done.widened = value.astype(np.float32), done.widened + 1
                with archive.open(f"{names.of(record)}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.ascontiguousarray(value).reshape(value.shape))
                done.num_values += 1
        yield path


def _sglang(run: Run, records: Iterable[Record], out: Path, done: Exported) -> Iterator[Path]:
    dump = _SglangDump(run, out)
    has_arguments = any(site.startswith(":in[") and site[4:-1] in CORE for site in run.sites)
    begun: set[tuple[int, int]] = set()
    for record, value in _values(run, records, done):
        step, rank = record.key.step, record.key.rank
        if not has_arguments and (step, rank) not in begun:
            begun.add((step, rank))
            for name, argument in _arguments(run, step, rank):
                yield dump.write(step, rank, name, argument, {})
        name, tags = _dumped_name(record.key.site)
        if record.key.pass_ == RECOMPUTE:
            tags["recompute_status"] = "recompute"
        if record.dims is not None:
            tags["dims"] = record.dims
        yield dump.write(step, rank, name, value, tags)
        done.num_values += 1


class _SglangDump:
    """Writer for files with the names and contents of SGLang's dumper."""

    def __init__(self, run: Run, out: Path) -> None:
        self._run, self._out = run, out
        self._indices: Counter[int] = Counter()

    def write(self, step: int, rank: int, name: str, value: Any, tags: dict[str, Any]) -> Path:
        """Write one value; ``tags`` are additional to the standard tags."""
        self._indices[rank] += 1
        own = {key: each for key, each in tags.items() if key != "dims"}
        about = {"step": step, "rank": rank, "dump_index": self._indices[rank], "name": name}
        about |= {"recompute_status": "disabled", **own}
        mesh, coords = self._run.mesh, self._run.coords(rank)
        sizes = {f"{axis}_size": size for axis, size in mesh.items()}
        places = {f"{axis}_rank": coords.get(axis, 0) for axis in mesh}
        meta = about | tags | {"world_rank": rank, "world_size": self._run.world_size}
        meta["sglang_parallel_info"] = sizes | places
        in_name = {**about, "name": _UNSAFE.sub("_", name)[:_MAX_NAME_LENGTH]}
        path = self._out / ("___".join(f"{key}={each}" for key, each in in_name.items()) + ".pt")
        save(path, {"value": value, "meta": meta})
        return path


def _dumped_name(site: str) -> tuple[str, dict[str, Any]]:
    """Return the name that SGLang's dumper would use for a site, and its additional tags."""
    path, _, port = site.removesuffix(".grad").rpartition(":")
    key = port.partition("[")[2].removesuffix("]")
    dotted, tags = f"{path}." if path else "", {}
    if port.startswith("param["):
        name = f"{PARAM}{dotted}{key}"
    elif port.startswith("in[") and not path and key in CORE:
        name = key
    elif port.startswith("in["):
        name = f"{HOOK}{dotted}inputs.{key.removeprefix('args.')}"
    elif port.startswith("out"):
        name = f"{HOOK}{dotted}output" + (f".{key}" if key else "")
    else:
        name = key
        if (layer := layer_of(path)) is not None:
            tags["layer_id"] = layer
    return (f"{GRAD}{name}" if site.endswith(".grad") else name), tags


def _arguments(run: Run, step: int, rank: int) -> list[tuple[str, Any]]:
    """Return the model arguments that determine the token rows of a step; empty if unknown or not packed."""
    line = run.steps.get(step, {}).get(rank)
    if line is None or not line.info.rows or len(line.info.grid) != 1:
        return []
    rows, at = line.info.rows, 0
    for row in rows:
        if row.slot != at:
            return []
        at += row.count
    positions = np.concatenate([np.arange(row.position, row.position + row.count) for row in rows])
    arguments: list[tuple[str, Any]] = []
    if len(line.info.token_ids) == at:
        arguments.append(("input_ids", np.asarray(line.info.token_ids, np.int64)))
    arguments += [("positions", positions), ("seq_lens", np.array([row.position + row.count for row in rows]))]
    return [*arguments, ("rids", [row.request for row in rows])]


def _csv(run: Run, records: Iterable[Record], out: Path, done: Exported) -> Iterator[Path]:
    """Write ``records.csv`` with one line per record, and ``metrics.csv`` with one line per metric and step, if there
    are metrics."""
    path = out / "records.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow([*_COLUMNS, *_STATS])
        for record in records:
            key, stats = record.key, record.stats
            about = (key.step, key.rank, key.site, key.occurrence, key.micro, key.pass_, key.model)
            shape = "x".join(map(str, record.shape)) if record.dtype else ""
            numbers = [None if stats is None else getattr(stats, name) for name in _STATS]
            cells = (*about, record.dtype, shape, record.dims, _scalar(run, record), *numbers)
            table.writerow(map(_no_formula, cells))
            done.num_values += 1
    yield path
    if metrics := run.metrics():
        path = out / "metrics.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(["step", "rank", "name", "value"])
            table.writerows([one.step, one.rank, _no_formula(one.name), one.value] for one in metrics)
        yield path


def _tensorboard(run: Run, records: Iterable[Record], out: Path, done: Exported) -> Iterator[Path]:
    """Write one event file per rank, in separate directories for several ranks; steps are those of the run."""
    from tensorboard.summary import Writer

    writers = {rank: Writer(str(out / f"rank{rank}" if len(run.ranks) > 1 else out)) for rank in run.ranks}
    for rank, step, name, number in _curves(run, records, done):
        writers[rank].add_scalar(name, number, step=step)
    for writer in writers.values():
        writer.close()
    yield from sorted(out.rglob("events.out.tfevents.*"))


def _wandb(run: Run, records: Iterable[Record], out: Path, done: Exported) -> Iterator[Path]:
    """Write one offline run per rank, grouped for several ranks; steps are those of the run. No data is sent.

    wandb runs that the caller has open stay open.
    """
    import wandb

    in_use = wandb.setup().most_recent_active_run is not None

    curves: dict[int, dict[int, dict[str, float]]] = {}
    for rank, step, name, number in _curves(run, records, done):
        curves.setdefault(rank, {}).setdefault(step, {})[name] = number
    settings = wandb.Settings(
        silent=True, console="off", save_code=False, disable_git=True,
        x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True,
    )  # fmt: skip
    several = len(run.ranks) > 1
    for rank in sorted(curves):
        name, group = (f"{run.path.name} rank {rank}", run.path.name) if several else (run.path.name, None)
        with wandb.init(
            mode="offline", project="tapscope", name=name, group=group, dir=str(out), settings=settings,
            reinit="create_new",
        ) as writer:  # fmt: skip
            for step in sorted(curves[rank]):  # wandb drops steps that are out of order
                writer.log(curves[rank][step], step=step)
    if not in_use:  # teardown() would end the open runs as well
        wandb.teardown()  # finish() returns before the wandb process has written the end of the file
    yield from sorted(out.rglob("*.wandb"))


def _curves(run: Run, records: Iterable[Record], done: Exported) -> Iterator[tuple[int, int, str, float]]:
    """Yield (rank, step, name, number) for statistics and scalar values of the records, then for the run's metrics."""
    names = _Names()
    for record in records:
        name, stats, value = names.of(record), record.stats, _scalar(run, record)
        scalars = {"value": value} if isinstance(value, int | float) else {}
        if stats is not None:
            scalars |= {each: getattr(stats, each) for each in _SCALARS}
            scalars["nonfinite"] = stats.nan + stats.posinf + stats.neginf
        for each, number in scalars.items():
            yield record.key.rank, record.key.step, f"{name}/{each}", number
        done.num_values += bool(scalars)
        done.plain += not scalars
    for metric in run.metrics():
        yield metric.rank, metric.step, f"metrics/{metric.name}", metric.value


def _no_formula(cell: Any) -> Any:
    """Prefix a string that a spreadsheet would evaluate with an apostrophe: names in a run are untrusted."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell


def _scalar(run: Run, record: Record) -> Any:
    """Return the value of a plain value or of a one-element tensor; None for other records."""
    if record.dtype is None:
        value = _plain(record.value)
        return None if value is _UNSUPPORTED else json.dumps(value) if isinstance(value, list) else value
    if record.entry is None or any(size != 1 for size in record.shape):
        return None
    return run.array(record).reshape(-1)[0].item()


def _folder(run: Run, record: Record, out: Path) -> Path:
    folder = out / f"step_{record.key.step}"
    if len(run.ranks) > 1:
        folder /= f"rank{record.key.rank}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class _Names:
    """Generates unique names of records within a step and rank."""

    def __init__(self) -> None:
        self._used: Counter[tuple[int, int, str]] = Counter()

    def of(self, record: Record) -> str:
        """Return e.g. ``model.layers.0.mlp.output``; for the second record of the same name ``….output.call1``."""
        name = _UNSAFE.sub("_", name_of_site(record.key.site))[:_MAX_NAME_LENGTH]
        if record.key.pass_ == RECOMPUTE:
            name += ".recompute"
        place = record.key.step, record.key.rank, name
        self._used[place] += 1
        return name if self._used[place] == 1 else f"{name}.call{self._used[place] - 1}"
