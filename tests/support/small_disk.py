"""A file system of 1 MiB, and records to fill it with."""

import os
import subprocess
from pathlib import Path

import pytest

from tapscope.run_format import record
from tapscope.run_format.record import Key, Record


def lines_and_payloads(first: int, sizes: list[int]):
    """Return one batch: record lines and their payloads, each filled with its number."""
    lines, payloads = [], []
    for index, size in enumerate(sizes):
        key = Key("m:out", first + index)
        lines.append(record.encode(Record(key, first + index, "uint8", (size,))))
        payloads.append((index, first + index, key.tensor_name, "uint8", [size], bytes([(first + index) % 256]) * size))
    return lines, payloads


@pytest.fixture
def small_disk(tmp_path: Path):
    """Yield the directory of a 1 MiB file system."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
        ).returncode
    )
    if not mounted:
        pytest.skip("needs the right to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
