"""Open a run at a URL."""

from collections.abc import Callable
from pathlib import Path

from tapscope.core.errors import RunNotFoundError, TapscopeError
from tapscope.remote.remote_files import RemoteFiles
from tapscope.remote.remote_path import RemotePath
from tapscope.remote.remote_payloads import RemotePayloads
from tapscope.run_format.run import Run


def open_remote(url: str, pattern: str | None, open_local: Callable[[Path, str | None], Run]) -> Run:
    """Open the run at a URL; ``open_local(directory, pattern)`` reads the copy of its metadata.

    Raises MissingExtraError without fsspec or the driver, ConfigError for an unknown protocol, RunNotFoundError if the
    URL does not exist, UnreachableError if the store fails, and the errors of ``open_local``.
    """
    remote = RemoteFiles(url)
    local = remote.copy()
    try:
        run = open_local(local, pattern)
    except TapscopeError as error:
        error.args = tuple(remote.named(arg) if isinstance(arg, str) else arg for arg in error.args)
        raise
    run.path = RemotePath(remote.named(str(run.path)))
    name = remote.base.rpartition("/")[2]
    run.name = run.name.replace(remote.folder.name, name)
    if run.manifest.get("model") == remote.folder.name:  # a checkpoint is named after its directory
        run.manifest["model"] = name
    run.problems[:] = map(remote.named, run.problems)
    run.payloads = RemotePayloads(run.payloads, remote)
    return run


def require_remote(url: str) -> None:
    """Raise the errors of :func:`open_remote` if the URL does not exist; reads no file."""
    remote = RemoteFiles(url)
    if not remote.call(lambda: remote.filesystem().exists(remote.root)):
        raise RunNotFoundError(f"{url}: no such file or directory")
