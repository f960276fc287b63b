"""Manifest: ``run.json`` and where the parts of a run lie (docs/format.md is normative)."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

from tapscope.errors import RunCorruptError, RunNotFoundError, RunVersionError
from tapscope.text import short

FORMAT = "tapscope-run"
VERSION = 2
"""Newest format version this reader knows."""
HASH_VERSION = 2
"""Version of the hash that this tapscope computes; hashes of another version can not be compared with it."""
MANIFEST = "run.json"
INDEX = "records.jsonl"
MAX_RANKS = 1_000_000
"""A manifest that says more is damaged."""
TABLE = "records.parquet"
"""The records of a compacted rank; a second compaction makes ``records-2.parquet``, and so on."""
COMPACTED = "compacted"
"""Kind of the event that names a table."""
LOCK = ".lock"
"""Locked while a recorder writes the run."""


def rank_dir(run: Path, rank: int) -> Path:
    """Where a rank's lines and segments lie."""
    return run / f"rank-{rank:05d}"


def segment_path(run: Path, rank: int, name: str) -> Path:
    """Where a segment lies; never outside the rank's directory, whatever a line says."""
    return rank_dir(run, rank) / Path(name).name


def rank_dirs(run: Path) -> dict[int, Path]:
    """The directories of ranks that wrote lines, by rank; anything else is no part of the format."""
    found = {}
    for index in run.glob(f"rank-*/{INDEX}"):
        number = index.parent.name.removeprefix("rank-")
        if number.isdecimal() and index.parent == rank_dir(run, int(number)):
            found[int(number)] = index.parent
    return dict(sorted(found.items()))


def write_manifest(run: Path, content: dict[str, Any]) -> None:
    """Write ``run.json`` atomically; format, version and time are put in."""
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    content = {"format": FORMAT, "version": VERSION, "created": created, **content}
    temporary = run / f".{MANIFEST}.{os.getpid()}"
    temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    temporary.replace(run / MANIFEST)


def read_manifest(path: Path) -> dict[str, Any]:
    """The checked content of ``run.json``.

    Raises RunNotFoundError when there is none, RunVersionError when it was written by a newer format, and
    RunCorruptError when it cannot be read or is none of ours.
    """
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
    except FileNotFoundError:
        hint = "it does not exist" if not path.exists() else f"it holds no {MANIFEST}"
        if any(path.glob("*___*.pt")):
            raise RunNotFoundError(
                f"{path} is an SGLang dump: it can be looked at and compared, but not changed"
            ) from None
        raise RunNotFoundError(f"{path} is no run: {hint}; make one with: tapscope dump MODEL -o {path}") from None
    except NotADirectoryError:
        raise RunNotFoundError(f"{path} is a file; a run is a directory with a {MANIFEST}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunCorruptError(f"{file} cannot be read: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise RunCorruptError(f'{file} is no manifest of a tapscope run: it lacks "format": "{FORMAT}"')
    version = manifest.get("version")
    if not _is_count(version):
        raise RunCorruptError(f"{file} has no format version: it must be a whole number from 1, not {short(version)}")
    if version > VERSION:
        raise RunVersionError(
            f"{path} was written in format version {version}; this tapscope reads up to {VERSION}: upgrade tapscope"
        )
    for name, (is_good, words) in _MEMBERS.items():
        if (value := manifest.get(name)) is not None and not is_good(value):
            raise RunCorruptError(f"{file}: {name} is {short(value)}; it must be {words}")
    return manifest


def is_mesh(value: object) -> bool:
    """Whether it says how large each axis of a mesh is."""
    return isinstance(value, dict) and all(_is_count(size) for size in value.values())


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_RANKS


def _is_numbers(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(n, int | float) for n in value.values())


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_MEMBERS: dict[str, tuple[Callable[[object], bool], str]] = {
    "hash_version": (_is_count, "a whole number from 1"),
    "world_size": (_is_count, f"a whole number from 1 to {MAX_RANKS:,}"),
    "model_config": (_is_numbers, 'an object of name and number, e.g. {"num_attention_heads": 8}'),
    "mesh": (is_mesh, 'an object of axis and size, e.g. {"tp": 2}'),
    "own_steps": (_is_texts, 'a list of mesh axes, e.g. ["dp"]'),
    **dict.fromkeys(("framework", "model", "dtype", "kv_cache_dtype", "created", "tapscope"), (_is_text, "a text")),
}
"""Member of the manifest that readers rely on -> its check, and what it must be."""
