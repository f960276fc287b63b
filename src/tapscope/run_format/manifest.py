"""Manifest: ``run.json`` and the paths of a run's files (docs/reference/run-format.md is normative)."""

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
"""Format that a manifest states when the weights of a checkpoint are read as a run."""
VERSION = 3
"""Newest format version this reader knows."""
HASH_VERSION = 2
"""Version of the hash that this tapscope computes; hashes of other versions cannot be compared with it."""
MANIFEST = "run.json"
MAX_MANIFEST_BYTES = 16 << 20
"""Longer manifests, and other JSON files of the run, are rejected."""
INDEX = "records.jsonl"
MAX_RANKS = 1_000_000
"""Manifests with a larger value are damaged."""
TABLE = "records.parquet"
"""The records of a compacted rank; a second compaction makes ``records-2.parquet``, and so on."""
COMPACTED = "compacted"
"""Kind of the event that names a table."""
LOCK = ".lock"
"""Locked while a recorder writes the run."""


def rank_dir(run: Path, rank: int) -> Path:
    """The directory of a rank's lines and segments."""
    return run / f"rank-{rank:05d}"


def segment_path(run: Path, rank: int, name: str) -> Path:
    """The path of a segment; never outside the rank's directory, whatever a line contains."""
    return rank_dir(run, rank) / Path(name).name


def rank_dirs(run: Path) -> dict[int, Path]:
    """The directories of ranks that wrote lines, by rank; anything else is not part of the format."""
    folders = {}
    for folder in run.glob("rank-*"):
        number = folder.name.removeprefix("rank-")
        if number.isdecimal() and folder == rank_dir(run, int(number)) and _has_lines(folder):
            folders[int(number)] = folder
    return dict(sorted(folders.items()))


def _has_lines(folder: Path) -> bool:
    """Unreadable directories count: the reader reports them, so that the rank does not look absent."""
    try:
        return (folder / INDEX).exists()
    except PermissionError:
        return True


def write_manifest(run: Path, content: dict[str, Any]) -> None:
    """Write ``run.json`` atomically; format, version and time are added."""
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
    """The checked content of ``run.json``.

    Raises RunNotFoundError when there is none, RunVersionError when it was written by a newer format, and
    RunCorruptError when it cannot be read or has another format.
    """
    file = path / MANIFEST
    try:
        manifest = json.loads(read_small(file, MAX_MANIFEST_BYTES))
    except FileNotFoundError:
        if any(path.glob("*___*.pt")):
            raise RunNotFoundError(
                f"{path} is an SGLang dump: it can be looked at and compared, but not changed"
            ) from None
        raise RunNotFoundError(f"{path} is not a tapscope run: {_instead(path)}") from None
    except NotADirectoryError:
        raise RunNotFoundError(f"{path} is a file; a run is a directory with a {MANIFEST}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunCorruptError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return check_manifest(manifest, file, path)


def check_manifest(manifest: Any, file: Path, path: Path) -> dict[str, Any]:
    """``manifest``, read from ``file`` of the run ``path``; raises as :func:`read_manifest`."""
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


def _instead(path: Path) -> str:
    """Why this is not a run, and where one is: below, above, or nowhere."""
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
    return f"it contains no {MANIFEST}; capture a run with: tapscope dump MODEL -o RUN"  # not among foreign files


def runs_within(path: Path) -> list[str]:
    """Names of the runs directly below a directory, sorted."""
    return sorted(manifest.parent.name for manifest in path.glob(f"*/{MANIFEST}"))


def is_mesh(value: object) -> bool:
    """Whether it gives the size of each axis of a mesh."""
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
    "hash_version": (_is_count, "an integer ≥ 1"),
    "world_size": (_is_count, f"an integer from 1 to {MAX_RANKS:,}"),
    "model_config": (_is_numbers, 'an object of name and number, e.g. {"num_attention_heads": 8}'),
    "mesh": (is_mesh, 'an object of axis and size, e.g. {"tp": 2}'),
    "own_steps": (_is_texts, 'a list of mesh axes, e.g. ["dp"]'),
    **dict.fromkeys(("framework", "model", "dtype", "kv_cache_dtype", "created", "tapscope"), (_is_text, "a string")),
}
"""Member of the manifest that readers rely on -> its check, and a description of valid values."""
