"""Opens whatever holds records: a tapscope run, or a directory that SGLang's dumper wrote."""

from pathlib import Path

from tapscope.core.gc_control import gc_paused
from tapscope.run_format.index import read_index
from tapscope.run_format.manifest import MANIFEST, rank_dirs, read_manifest
from tapscope.run_format.run import Run


def open_run(path: str | Path) -> Run:
    """Open the run at ``path``, or the directory that SGLang's dumper wrote there (see :mod:`tapscope.sglang.reader`).

    Raises RunNotFoundError when there is none, RunVersionError when it was written by a newer format, and
    RunCorruptError when the manifest cannot be read. Damaged lines are reported in :attr:`Run.problems`.
    """
    path = Path(path)
    with gc_paused():
        if not (path / MANIFEST).exists():
            from tapscope.sglang.reader import find_dump, read_dump

            if (folder := find_dump(path)) is not None:
                dump = read_dump(folder)
                return Run(folder, dump.manifest, dump.ranks, dump.payloads)
        manifest = read_manifest(path)
        ranks = {rank: read_index(folder, rank) for rank, folder in rank_dirs(path).items()}
        return Run(path, manifest, ranks)


def require_run(path: str | Path) -> None:
    """Raise what :func:`open_run` raises where there is no run, a newer one, or a manifest that cannot be read; reads
    nothing else of it."""
    path = Path(path)
    if not (path / MANIFEST).exists():
        from tapscope.sglang.reader import find_dump

        if find_dump(path) is not None:
            return
    read_manifest(path)
