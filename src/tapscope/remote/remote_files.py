"""RemoteFiles: the files below a URL; metadata is copied, payloads are read by ranges."""

import os
import re
import shutil
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn, TypeVar

import numpy as np

from tapscope.core.errors import (
    ConfigError,
    MissingExtraError,
    RunCorruptError,
    RunNotFoundError,
    UnreachableError,
)
from tapscope.core.extras import require
from tapscope.core.formatting import size
from tapscope.core.tempdirs import make_tempdir, remove_tempdir
from tapscope.run_format.manifest import INDEX, MANIFEST, TABLE
from tapscope.run_format.payload import Array

_SEGMENT = re.compile(r"rank-\d+/seg-[^/]*\.safetensors")
_WHOLE = (".pt", ".pth", ".bin", ".npz", ".npy")
_MAX_DEPTH = 6
_MAX_FILES = 200_000
_MAX_JSON = 64 << 20
_HEAD = 1 << 20
"""Number of bytes read from a .safetensors file to find its header."""
_BLOCK = 4 << 20
"""Block size in bytes of cached reads; consecutive requests are often adjacent."""
_CACHE_BYTES = 256 << 20
_PART = 16 << 20
"""Size in bytes of a range request; a larger tensor is split into several concurrent requests."""
_Result = TypeVar("_Result")


class RemoteFiles:
    """The files below a URL, and a temporary directory with copies of their metadata."""

    def __init__(self, url: str) -> None:
        require("fsspec", f"the URL {url}")
        self.url = self.base = url
        """``base`` is the URL of the directory; it differs from ``url`` if that is the URL of a file."""
        self._lock = Lock()
        self._filesystems: dict[int, Any] = {}
        self.root = ""
        self.filesystem()
        self.folder = make_tempdir()
        self.close = weakref.finalize(self, remove_tempdir, self.folder)
        self._sizes: dict[str, int] = {}
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def filesystem(self) -> Any:
        """Return the fsspec filesystem of this process: its threads and connections do not survive a fork."""
        filesystem = self._filesystems.get(os.getpid())
        if filesystem is None:
            filesystem = self._filesystems[os.getpid()] = self._open()
        return filesystem

    def _open(self) -> Any:
        from fsspec.core import url_to_fs
        from fsspec.registry import known_implementations, registry

        protocol = self.url.partition(":")[0]
        try:
            filesystem, self.root = url_to_fs(self.url)
        except ImportError as error:
            driver = known_implementations.get(protocol, {}).get("err") or str(error)
            raise MissingExtraError(f"{self.url}: the driver is not installed ({driver})") from None
        except Exception as error:  # noqa: BLE001 - drivers raise their libraries' own errors
            if isinstance(error, ValueError) and protocol not in {*known_implementations, *registry}:
                raise ConfigError(f"{self.url}: unknown protocol {protocol!r}: {error}") from None
            self._fail(error)
        return filesystem

    def call(self, work: Callable[[], _Result]) -> _Result:
        """Run a request and return its result; raises RunNotFoundError, or UnreachableError with the URL."""
        try:
            return work()
        except FileNotFoundError as error:
            raise RunNotFoundError(f"{self.url}: {_reason(error)}") from None
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)

    def _fail(self, error: Exception) -> NoReturn:
        raise UnreachableError(f"{self.url}: the store failed: {_reason(error)}") from None

    def named(self, text: str) -> str:
        """Replace the temporary directory in a message by the URL."""
        return text.replace(str(self.folder), self.base)

    def copy(self) -> Path:
        """Copy the metadata and return the directory or file to open. Raises like :meth:`call`."""
        fs = self.filesystem()
        listed = self.call(lambda: fs.find(self.root, maxdepth=_MAX_DEPTH, detail=True))
        root = self.root.rstrip("/")
        files = {path.removeprefix(root).lstrip("/"): info for path, info in listed.items() if info["type"] == "file"}
        if not files:
            raise RunNotFoundError(f"{self.url}: no bucket or file of this name, or no permission to list it")
        if len(files) > _MAX_FILES:
            raise RunNotFoundError(f"{self.url}: holds {len(files):,} files; give the directory of one run")
        only = ""
        if set(files) == {""}:
            only = root.rpartition("/")[2]
            root = self.root = root.rpartition("/")[0]
            self.base = self.url.rpartition("/")[0]
            files = {only: files[""]}
        self._sizes = {name: int(info["size"] or 0) for name, info in files.items()}
        sparse = [name for name in files if name.endswith(".safetensors")]
        whole = [name for name in files if not name.endswith(".safetensors") and self._is_needed(name)]
        self._check_space(sum(self._sizes[name] for name in whole))
        for name in (*sparse, *whole):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        if whole:
            paths = [f"{root}/{name}" for name in whole]
            self.call(lambda: fs.get(paths, [str(self.folder / name) for name in whole]))
        self._copy_headers([name for name in sparse if not _SEGMENT.fullmatch(name)])
        for name in sparse:
            with (self.folder / name).open("ab") as file:
                file.truncate(self._sizes[name])
        return self.folder / only

    def _is_needed(self, name: str) -> bool:
        last = name.rpartition("/")[2]
        is_table = last.startswith(Path(TABLE).stem) and last.endswith(Path(TABLE).suffix)
        is_line = is_table or last in (MANIFEST, INDEX)
        return is_line or last.endswith(_WHOLE) or (last.endswith(".json") and self._sizes[name] <= _MAX_JSON)

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise RunNotFoundError(
                f"{self.url}: {size(needed)} of files have to be copied to {self.folder.parent}, which has "
                f"{size(free)} free; set TMPDIR to a larger disk"
            )

    def _copy_headers(self, names: list[str]) -> None:
        heads = self._ranges([(name, 0, min(_HEAD, self._sizes[name])) for name in names])
        for name, head in zip(names, heads, strict=True):
            end = 8 + int.from_bytes(head[:8], "little")
            if len(head) < end <= self._sizes[name]:
                head = self.read(name, 0, end).tobytes()
            (self.folder / name).write_bytes(head)

    def read(self, name: str, begin: int, end: int) -> Array:
        """Read bytes ``begin`` to ``end`` of a file; raises RunCorruptError if the file is shorter, and
        UnreachableError."""
        if end > self._sizes.get(name, 0):
            raise RunCorruptError(
                f"{self.base}/{name}: truncated: {self._sizes.get(name, 0)} bytes, a record needs {end}"
            )
        if end - begin > _BLOCK:
            buffer = np.empty(end - begin, np.uint8)
            spans = [(name, at, min(at + _PART, end)) for at in range(begin, end, _PART)]
            for i in range(0, len(spans), 4):
                for (_, at, _), data in zip(spans[i : i + 4], self._ranges(spans[i : i + 4]), strict=True):
                    buffer[at - begin : at - begin + len(data)] = np.frombuffer(data, np.uint8)
            return buffer
        first, last = begin // _BLOCK, (end - 1) // _BLOCK
        data = b"".join(self._block(name, at) for at in range(first, last + 1))
        return np.frombuffer(data, np.uint8)[begin - first * _BLOCK : end - first * _BLOCK]

    def _block(self, name: str, at: int) -> bytes:
        with self._lock:
            block = self._blocks.pop((name, at), None)
            if block is not None:
                self._blocks[name, at] = block
                return block
        (block,) = self._ranges([(name, at * _BLOCK, min((at + 1) * _BLOCK, self._sizes[name]))])
        with self._lock:
            self._blocks[name, at] = block
            while len(self._blocks) * _BLOCK > _CACHE_BYTES:
                self._blocks.popitem(last=False)
        return block

    def _ranges(self, spans: list[tuple[str, int, int]]) -> list[bytes]:
        """Read the byte ranges (file, begin, end), requested concurrently."""
        if not spans:
            return []
        fs = self.filesystem()
        paths = [f"{self.root.rstrip('/')}/{name}" for name, _, _ in spans]
        begins, ends = [begin for _, begin, _ in spans], [end for _, _, end in spans]
        try:
            chunks: list[bytes] = self.call(lambda: fs.cat_ranges(paths, begins, ends, on_error="raise"))
        except RunNotFoundError as error:
            self._fail(error)
        for data, (name, begin, end) in zip(chunks, spans, strict=True):
            if len(data) != end - begin:
                raise UnreachableError(
                    f"{self.base}/{name}: the store gave {len(data)} of {end - begin} bytes; has the file changed?"
                )
        return chunks


def _reason(error: BaseException) -> str:
    """Format an error of a driver in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:200] if isinstance(error, OSError) else f"{type(error).__name__}: {text[:200]}"
