"""Imported, it gives dumpers of this process that leave the size of their ring open 4 MiB.

The default is 64, which take both sides 56 ms to allocate and map, at every open. Where there is a GPU, tests copy into
rings of the default size.
"""

from pathlib import Path

from tapscope.dumper.config import DumperConfig
from tapscope.dumper.pipeline import recorder_process

_default, _ring = DumperConfig().shm_bytes, recorder_process.ShmRing
if not Path("/proc/driver/nvidia").exists():
    recorder_process.ShmRing = lambda nbytes: _ring(4 << 20 if nbytes == _default else nbytes)  # type: ignore[misc, assignment]
