"""CUDA core dumps: the environment variables that make a failing kernel write one."""

import logging
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

from tapscope.core.errors import ConfigError

_log = logging.getLogger("tapscope")

_SETTINGS = {
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
    "CUDA_COREDUMP_SHOW_PROGRESS": "1",
    # Keep only the state that locates the failure; with memory, the file would be as large as device memory.
    "CUDA_COREDUMP_GENERATION_FLAGS": "skip_nonrelocated_elf_images,skip_global_memory,skip_shared_memory,"
    "skip_local_memory,skip_constbank_memory",
}
_FILE = "CUDA_COREDUMP_FILE"


def enable_cuda_coredumps(directory: str | os.PathLike[str], environ: MutableMapping[str, str] | None = None) -> str:
    """Make CUDA errors in this process and its children write a GPU core dump; return the file name pattern.

    In the pattern, ``%h``, ``%p`` and ``%t`` stand for host, process and time. Open a dump with ``cuda-gdb -ex 'target
    cudacore FILE'``. Call this function before CUDA is initialized. ``environ`` may be the environment of a process to
    be started, in place of the current one. Variables that are already set keep their values; NVIDIA's CUDA-GDB manual
    describes them under "GPU core dump support". Raises ConfigError if the directory cannot be created.
    """
    target = os.environ if environ is None else environ
    folder = Path(directory).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"CUDA core dumps: cannot create {folder}: {error.strerror}") from None
    for name, value in {**_SETTINGS, _FILE: str(folder / "cuda_coredump_%h.%p.%t")}.items():
        if target.setdefault(name, value) != value:
            _log.warning("tapscope: %s is set already and stays %s", name, target[name])
    torch = sys.modules.get("torch")
    if environ is None and torch is not None and torch.cuda.is_initialized():
        _log.warning("tapscope: CUDA is initialized already, so this process writes no core dump; enable them earlier")
    return target[_FILE]
