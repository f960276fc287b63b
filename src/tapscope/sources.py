"""Open any supported source of records: a tapscope run, an SGLang dump, a checkpoint, or a directory of tensor
files."""

from pathlib import Path

from tapscope.core.errors import RunNotFoundError
from tapscope.core.formatting import listed
from tapscope.core.gc_control import gc_paused
from tapscope.remote import open_remote, require_remote, url_of
from tapscope.run_format.index import read_index
from tapscope.run_format.manifest import MANIFEST, rank_dirs, read_manifest, runs_within
from tapscope.run_format.run import Run


def open_run(path: str | Path, pattern: str | None = None) -> Run:
    """Open the run at ``path``, or read another source as one.

    ::

        with open_run("run") as run:
            for record in run.select(["*.mlp:out"], steps=[0]):
                print(record.key.site, record.stats.rms, run.array(record).shape)

    Other sources: a directory written by SGLang's dumper (:mod:`tapscope.sglang.reader`), a checkpoint of Hugging Face
    or Megatron-LM (:mod:`tapscope.tensor_files.checkpoint`, ``.megatron_checkpoint``), a golden file
    (:mod:`tapscope.run_format.golden`), and a file or directory of .pt, .npz, .npy or .safetensors files
    (:mod:`tapscope.tensor_files.directory`). ``pattern``, or a path that contains one (``dump/{step}/{name}.pt``),
    defines the names of tensor files. ``path`` may be an fsspec URL (:mod:`tapscope.remote`).

    Raises RunNotFoundError if there is no run, RunVersionError if it was written by a newer format version,
    RunCorruptError if the manifest or all files are unreadable, ConfigError for an invalid pattern, and
    UnreachableError if an object store fails. Damaged lines and files are reported in :attr:`Run.problems`.
    """
    with gc_paused():
        path, pattern = with_pattern(path, pattern)
        if (url := url_of(path)) is not None:
            return open_remote(url, pattern, open_run)
        if pattern is None and path.is_file():
            from tapscope.run_format.golden import is_golden, read_golden

            if is_golden(path):
                return read_golden(path)
        if (pattern is not None or not (path / MANIFEST).exists()) and (foreign := _foreign(path, pattern)) is not None:
            return foreign
        manifest = read_manifest(path)
        ranks = {rank: read_index(folder, rank) for rank, folder in rank_dirs(path).items()}
        return Run(path, manifest, ranks)


def require_run(path: str | Path) -> None:
    """Raise the errors of :func:`open_run` for a missing run, a newer format version or an unreadable manifest.

    Reads only the manifest.
    """
    path, pattern = with_pattern(path, None)
    if (url := url_of(path)) is not None:
        require_remote(url)
        return
    if pattern is not None or not (path / MANIFEST).exists():
        from tapscope.run_format.golden import is_golden
        from tapscope.sglang.reader import find_dump
        from tapscope.tensor_files.checkpoint import is_checkpoint
        from tapscope.tensor_files.directory import has_tensor_files
        from tapscope.tensor_files.file_pattern import SUFFIXES
        from tapscope.tensor_files.megatron_checkpoint import find_megatron_checkpoint

        if find_megatron_checkpoint(path) is not None:
            return
        if pattern is not None or find_dump(path) is not None or is_checkpoint(path):
            return
        if has_tensor_files(path) and not runs_within(path):
            _refuse_checkpoints_within(path)
            return
        if path.is_file() and (path.suffix in SUFFIXES or is_golden(path)):
            return
    read_manifest(path)


def with_pattern(path: str | Path, pattern: str | None) -> tuple[Path, str | None]:
    """Return the directory and the pattern for its files, from ``pattern`` or from a pattern contained in ``path``."""
    if pattern is None and "{" in str(path) and not Path(path).exists():
        from tapscope.tensor_files.file_pattern import split_pattern

        folder, pattern = split_pattern(str(path))
        return Path(folder), pattern
    return Path(path), pattern


def _foreign(path: Path, pattern: str | None) -> Run | None:
    """Read a source that is not a tapscope run; None if there is no supported source either."""
    from tapscope.sglang.reader import find_dump, read_dump

    if pattern is None and (folder := find_dump(path)) is not None:
        dump = read_dump(folder)
        return Run(folder, dump.manifest, dump.ranks, dump.payloads)
    from tapscope.tensor_files import checkpoint, directory, distributed_checkpoint, megatron_checkpoint
    from tapscope.tensor_files.file_pattern import SUFFIXES

    if pattern is None and (folder := megatron_checkpoint.find_megatron_checkpoint(path)) is not None:
        if megatron_checkpoint.is_distributed(folder):
            files = distributed_checkpoint.read_distributed_checkpoint(folder)
        else:
            files = megatron_checkpoint.read_megatron_checkpoint(folder)
        return Run(path, files.manifest, files.ranks, files.payloads)
    if pattern is None and checkpoint.is_checkpoint(path):
        files = checkpoint.read_checkpoint(path)
        return Run(path, files.manifest, files.ranks, files.payloads)
    if path.is_file() and path.suffix in SUFFIXES:
        files = directory.read_one_file(path)
        return Run(path, files.manifest, files.ranks, files.payloads)
    if pattern is None:
        if runs_within(path):
            return None  # files below a folder of runs belong to one of the runs
        _refuse_checkpoints_within(path)
        if not directory.has_tensor_files(path):
            return None
    files = directory.read_directory(path, pattern)
    named = path if pattern is None else path / pattern
    return Run(named, files.manifest, files.ranks, files.payloads, name=path.name)


def _refuse_checkpoints_within(path: Path) -> None:
    """Raise RunNotFoundError for a folder of checkpoints whose names do not distinguish steps or ranks.

    Read as one run, their tensors would become repeated calls of the same sites.
    """
    from tapscope.tensor_files.checkpoint import is_checkpoint
    from tapscope.tensor_files.file_pattern import fields_of
    from tapscope.tensor_files.megatron_checkpoint import find_megatron_checkpoint

    if not path.is_dir():
        return
    folders = [folder for folder in sorted(path.iterdir()) if folder.is_dir()]
    names = [f.name for f in folders if is_checkpoint(f) or find_megatron_checkpoint(f) is not None]
    places = {(fields.step, fields.rank) for fields in (fields_of(f"{name}/model.safetensors") for name in names)}
    if len(names) > len(places):
        raise RunNotFoundError(
            f"{path} is not a tapscope run: it contains {len(names)} checkpoints ({listed(names)}); "
            f"give one of them, such as {path / names[0]}"
        )
