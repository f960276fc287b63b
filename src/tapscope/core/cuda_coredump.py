"""CUDA core dumps: the environment variables that make a failing kernel leave one."""

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
    # What tells where a kernel failed; memory would make it as large as the device's.
    "CUDA_COREDUMP_GENERATION_FLAGS": "skip_nonrelocated_elf_images,skip_global_memory,skip_shared_memory,"
    "skip_local_memory,skip_constbank_memory",
}
_FILE = "CUDA_COREDUMP_FILE"


def enable_cuda_coredumps(directory: str | os.PathLike[str], environ: MutableMapping[str, str] | None = None) -> str:
    """Make a CUDA error of this process, or of its children, write a core dump of the GPU; returns the file's pattern.

    ``%h``, ``%p`` and ``%t`` stand for host, process and time. ``cuda-gdb -ex 'target cudacore FILE'`` opens the file.
    Call it before CUDA is initialized; ``environ`` may be the environment of a process to start instead of ours.
    Variables that are set already keep their values, see NVIDIA's CUDA-GDB manual, "GPU core dump support".
    Raises ConfigError if the directory cannot be created.
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
