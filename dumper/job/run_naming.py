"""RunNaming: locate the runs of a job, and agree on a run name across all ranks without a collective."""

import contextlib
import hashlib
import json
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapscope.core.errors import ConfigError, RecorderError, RunExistsError
from tapscope.dumper.job.processes import is_alive
from tapscope.run_format.directory import RECORDER_FILE

_log = logging.getLogger("tapscope")
NAME_TIMEOUT_S = 30.0
"""Timeout in seconds for rank 0 to publish the name of the run."""
_POLL_S = 0.02
_RENDEZVOUS = ".tapscope-name-"
_STALE_S = 60.0
_LAST_WAIT_S = 10.0
_DEFAULT_DIR = "tapscope-runs"
_YES, _NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLocation:
    """Location of the runs of the process-wide dumper: ``dir/exp_name``."""

    dir: Path = Path(_DEFAULT_DIR)
    exp_name: str | None = None
    """Name of the run; with None, rank 0 generates a name from the time and the other ranks read it."""
    cleanup_previous: bool = False
    """Whether a new run removes previous runs in ``dir``: only directories that are certainly runs and not in use."""

    def __post_init__(self) -> None:
        if not isinstance(self.dir, str | os.PathLike) or not str(self.dir):
            raise ConfigError(f"dir={self.dir!r}: must be a path")
        object.__setattr__(self, "dir", Path(self.dir))
        name = self.exp_name
        if name is not None and (not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name):
            raise ConfigError(f"exp_name={name!r}: must be a plain name without '/', or None for a name with the time")
        if not isinstance(self.cleanup_previous, bool):
            raise ConfigError(f"cleanup_previous={self.cleanup_previous!r}: must be true or false")

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> dict[str, Any]:
        """Return the settings in ``TAPSCOPE_DIR``, ``TAPSCOPE_EXP_NAME`` and ``TAPSCOPE_CLEANUP_PREVIOUS``.

        A blank variable counts as unset. Raises ConfigError for an invalid bool.
        """
        settings: dict[str, Any] = {}
        for name in FIELDS:
            if text := environ.get(f"TAPSCOPE_{name.upper()}", "").strip():
                settings[name] = text
        if (word := settings.get("cleanup_previous")) is not None:
            if word.lower() not in (*_YES, *_NO):
                raise ConfigError(f"TAPSCOPE_CLEANUP_PREVIOUS: cleanup_previous={word!r}: must be true or false")
            settings["cleanup_previous"] = word.lower() in _YES
        return settings


FIELDS = ("dir", "exp_name", "cleanup_previous")


class RunNaming:
    """Agreement on the name of one run: rank 0 generates and publishes the name, other ranks poll with a timeout.

    The name is published in the store of torch.distributed, if initialized, and in a file in ``folder``.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, number: int = 0) -> None:
        """``number`` counts the agreements of this process, which distinguishes them."""
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        self._number = number
        self._deadline = math.inf

    def agree(self, timeout_s: float = NAME_TIMEOUT_S) -> str:
        """Return the agreed name; blocks for up to ``timeout_s`` seconds, without a collective.

        Raises RecorderError if rank 0 does not publish the name in time.
        """
        if self._world_size <= 1:
            return new_name()
        if self._rank == 0:
            name = new_name()
            self._publish(name)
            return name
        self._deadline = min(self._deadline, time.monotonic() + timeout_s)
        while (entry := self._lookup()) is None:
            if time.monotonic() > self._deadline:
                raise RecorderError(
                    f"rank {self._rank}: rank 0 has not named the run in time ({timeout_s:g} s); does rank 0 use the "
                    "dumper too? Or give every rank the same exp_name (TAPSCOPE_EXP_NAME)"
                )
            time.sleep(_POLL_S)
        return entry

    def give_up(self) -> None:
        """Shorten the timeout to 10 s because the process exits; rank 0 may have just started."""
        self._deadline = min(self._deadline, time.monotonic() + _LAST_WAIT_S)

    def _publish(self, name: str) -> None:
        store = _store()
        if store is not None:
            store.set(self._key, name)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        place = self._rendezvous
        draft = place.with_name(f"{place.name}.{secrets.token_hex(4)}")
        content = {"name": name, "pid": os.getpid(), "host": socket.gethostname(), "started": _started(os.getpid())}
        draft.write_text(json.dumps(content))
        draft.replace(place)

    def _lookup(self) -> str | None:
        store = _store()
        if store is not None and store.check([self._key]):
            return bytes(store.get(self._key)).decode()
        try:
            entry = json.loads(self._rendezvous.read_text())
            alive = _is_current(entry) or self._is_recorded(entry["name"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return str(entry["name"]) if alive else None  # a dead entry is a leftover of another job's rank 0

    def _is_recorded(self, name: str) -> bool:
        """Return whether the run's recorder is alive, e.g. of a short job whose rank 0 has already exited."""
        recorder = json.loads((self._folder / name / RECORDER_FILE).read_text())
        return recorder["host"] != socket.gethostname() or is_alive(int(recorder["pid"]))

    def _sweep(self) -> None:
        """Remove rendezvous files of finished jobs on this host."""
        for path in self._folder.glob(f"{_RENDEZVOUS}*"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                if time.time() - path.lstat().st_mtime > _STALE_S and not _is_current(json.loads(path.read_text())):
                    path.unlink()

    @property
    def _key(self) -> str:
        return f"tapscope/run/{self._number}"

    @property
    def _rendezvous(self) -> Path:
        return self._folder / f"{_RENDEZVOUS}{_job(os.environ)}-{self._number}"


def new_name() -> str:
    """Return a unique name that sorts by time, e.g. ``dump-20261231-235959-123-a1b2c3``."""
    now = time.time()
    firing = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    return f"dump-{firing}-{int(now * 1000) % 1000:03d}-{secrets.token_hex(3)}"


def clean(folder: Path, *, keep: str | None) -> None:
    """Remove all runs in ``folder`` except ``keep``, symbolic links, and runs that are being recorded.

    Other files and directories stay. Logs the names of removed runs, and failures.
    """
    from tapscope.run_format.directory import is_run, remove_run

    removed = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name == keep or path.is_symlink() or not is_run(path):
            continue
        try:
            left = remove_run(path)
        except (OSError, RunExistsError) as error:
            _log.warning("tapscope: cleanup_previous left %s: %s", path, error)
            continue
        removed.append(path.name)
        if left:
            _log.warning(
                "tapscope: cleanup_previous left files that are not part of a run: %s", ", ".join(map(str, left))
            )
    if removed:
        _log.warning("tapscope: cleanup_previous removed %d runs from %s: %s", len(removed), folder, ", ".join(removed))


def _store() -> Any:
    """Return the default store of torch.distributed; None if there is none."""
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    try:
        get: Callable[[], Any] = torch.distributed.distributed_c10d._get_default_store
        return get()
    except Exception:  # noqa: BLE001 - a private function of torch
        return None


def _job(environ: Mapping[str, str]) -> str:
    """Return a key shared by all ranks of a job and unique among jobs, derived from the launcher's variables."""
    parts = [environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")]
    parts.append(environ.get("TORCHELASTIC_RESTART_COUNT", ""))
    if environ.get("LOCAL_WORLD_SIZE", environ.get("WORLD_SIZE")) == environ.get("WORLD_SIZE"):
        parent = os.getppid()  # all ranks run on this host as children of one launcher
        parts += [socket.gethostname(), str(parent), _started(parent)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _started(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot (unique together with its pid); empty if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _is_current(entry: Mapping[str, Any]) -> bool:
    """Return whether the rank 0 that published ``entry`` still runs; always True for another host."""
    pid = int(entry["pid"])
    return entry["host"] != socket.gethostname() or (is_alive(pid) and _started(pid) == entry["started"])
