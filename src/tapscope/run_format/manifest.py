"""Manifest: read and write ``run.json``, and name the files of a run (docs/reference/run-format.md is normative)."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

from tapscope.core.errors import RunCorruptError, RunNotFoundError, RunVersionError
from tapscope.core.formatting import listed, plural, short
from tapscope.core.regular_files import read_small

FORMAT = "tapscope-run"
CHECKPOINT_FORMAT = "checkpoint"
"""Value of ``format`` in the manifest of a checkpoint that is read as a run."""
VERSION = 3
"""Newest format version that this reader supports."""
HASH_VERSION = 2
"""Version of the hash function of this tapscope; hashes of different versions are not comparable."""
MANIFEST = "run.json"
MAX_MANIFEST_BYTES = 16 << 20
"""Size limit of the manifest and of other JSON files of a run; larger files are rejected."""
INDEX = "records.jsonl"
MAX_RANKS = 1_000_000
"""Upper limit of ranks and versions in a manifest; a larger value is treated as corruption."""
TABLE = "records.parquet"
"""Table of a compacted rank; further compactions create ``records-2.parquet``, and so on."""
COMPACTED = "compacted"
"""Kind of the event that references a table."""
LOCK = ".lock"
"""File that a recorder locks while it writes the run."""


def rank_dir(run: Path, rank: int) -> Path:
    """Return the directory with the lines and segments of ``rank``."""
    return run / f"rank-{rank:05d}"


def segment_path(run: Path, rank: int, name: str) -> Path:
    """Return the path of a segment; only the last component of ``name`` counts, so it is in the rank's directory."""
    return rank_dir(run, rank) / Path(name).name


def rank_dirs(run: Path) -> dict[int, Path]:
    """Return rank -> directory for every rank directory that contains lines; other directories are ignored."""
    folders = {}
    for folder in run.glob("rank-*"):
        number = folder.name.removeprefix("rank-")
        if number.isdecimal() and folder == rank_dir(run, int(number)) and _has_lines(folder):
            folders[int(number)] = folder
    return dict(sorted(folders.items()))


def _has_lines(folder: Path) -> bool:
    """Return whether a rank directory contains lines.

    True for an unreadable directory, so that the reader reports it instead of treating the rank as absent.
    """
    try:
        return (folder / INDEX).exists()
    except PermissionError:
        return True


def write_manifest(run: Path, content: dict[str, Any]) -> None:
    """Write ``run.json`` atomically, adding defaults for ``format``, ``version`` and ``created``."""
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    content = {"format": FORMAT, "version": VERSION, "created": created, **content}
    temporary = run / f".{MANIFEST}.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        temporary.replace(run / MANIFEST)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_manifest(path: Path) -> dict[str, Any]:
    """Read and validate ``run.json`` of the run at ``path``.

    Raises RunNotFoundError if there is no manifest, RunVersionError if its format version is too new, and
    RunCorruptError if it cannot be read or has another format.
    """
    file = path / MANIFEST
    try:
        manifest = json.loads(read_small(file, MAX_MANIFEST_BYTES))
    except FileNotFoundError:
        if any(path.glob("*___*.pt")):
            raise RunNotFoundError(
                f"{path} is an SGLang dump: it can be looked at and compared, but not changed"
            ) from None
        raise RunNotFoundError(f"{path} is not a tapscope run: {_reason_and_hint(path)}") from None
    except NotADirectoryError:
        raise RunNotFoundError(f"{path} is a file; a run is a directory with a {MANIFEST}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunCorruptError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return check_manifest(manifest, file, path)


def check_manifest(manifest: Any, file: Path, path: Path) -> dict[str, Any]:
    """Validate and return ``manifest``, read from ``file`` of the run ``path``; raises like :func:`read_manifest`."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise RunCorruptError(f'{file} is not the manifest of a tapscope run: missing "format": "{FORMAT}"')
    version = manifest.get("version")
    if not _is_count(version):
        raise RunCorruptError(f"invalid format version in {file}: expected an integer ≥ 1, not {short(version)}")
    if version > VERSION:
        raise RunVersionError(
            f"{path} was written in format version {version}; this tapscope reads up to {VERSION}: upgrade tapscope"
        )
    for name, (is_good, words) in _MEMBERS.items():
        if (value := manifest.get(name)) is not None and not is_good(value):
            raise RunCorruptError(f"{file}: {name} is {short(value)}; it must be {words}")
    return manifest


def _reason_and_hint(path: Path) -> str:
    """Return why ``path`` is not a run, with a hint: a run in its subdirectories or parent, or how to capture one."""
    if not path.exists():
        return f"it does not exist; capture a run with: tapscope dump MODEL -o {path}"
    if (path.resolve().parent / MANIFEST).exists():
        return f"it is part of the run {path.parent if path.name else path.resolve().parent}"
    if within := runs_within(path):
        return f"it contains {plural(len(within), 'run')} ({listed(within)}); give one of them"
    if (path / "config.json").exists():
        return f"it is a checkpoint; capture a run with: tapscope dump {path} -o RUN"
    if not any(path.iterdir()):
        way = f"capture a run with: tapscope dump MODEL -o {path}, or with SGLang's dumper"
        return f"it is empty; {way}"
    # The hint does not suggest ``path``: a run must not be written among foreign files.
    return f"it contains no {MANIFEST}; capture a run with: tapscope dump MODEL -o RUN"


def runs_within(path: Path) -> list[str]:
    """Return the names of the runs directly inside ``path``, sorted."""
    return sorted(manifest.parent.name for manifest in path.glob(f"*/{MANIFEST}"))


def is_mesh(value: object) -> bool:
    """Return whether ``value`` is a valid mesh: a dict of axis -> size."""
    return isinstance(value, dict) and all(_is_count(size) for size in value.values())


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_RANKS


def _is_numbers(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(n, int | float) for n in value.values())


def _is_string(value: object) -> bool:
    return isinstance(value, str)


def _are_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_MEMBERS: dict[str, tuple[Callable[[object], bool], str]] = {
    "hash_version": (_is_count, "an integer ≥ 1"),
    "world_size": (_is_count, f"an integer from 1 to {MAX_RANKS:,}"),
    "model_config": (_is_numbers, 'an object of name and number, e.g. {"num_attention_heads": 8}'),
    "mesh": (is_mesh, 'an object of axis and size, e.g. {"tp": 2}'),
    "own_steps": (_are_strings, 'a list of mesh axes, e.g. ["dp"]'),
    **dict.fromkeys(("framework", "model", "dtype", "kv_cache_dtype", "created", "tapscope"), (_is_string, "a string")),
}
"""Manifest field that readers rely on -> (validator, description of valid values)."""
