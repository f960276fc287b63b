"""Cost of copying bytes from shared memory into a new file: median CPU time relative to ``write()``.

    python benchmarks/segment_copy.py [--mib 512] [--rounds 5] [--out DIR]

Answers whether the recorder could be cheaper. ``write`` is the recorder's method, to new pages; ``overwrite`` is the
same to existing pages. ``copy_file_range`` (within one file system) and ``sendfile`` leave the copy to the kernel. If
the ring itself were the segment, the producer would need new pages instead of a copy: ``allocate`` (``fallocate``) and
``map_pages``, or ``fault_in``, page by page, or ``huge_pages`` of 2 MiB (``MADV_COLLAPSE``, Linux 6.1, tmpfs only).

Predicted before the first run, for tmpfs, relative to ``write()``: ``copy_file_range`` and ``sendfile`` 0.95 to 1.3, as
they copy too; ``allocate`` alone 0.4 to 0.7; ``overwrite`` 0.7; ``fault_in`` 1.3 to 1.6; ``huge_pages`` 0.3 to 0.5. The
measured figures are in benchmarks/RESULTS.md.
"""

import argparse
import contextlib
import ctypes
import math
import mmap
import os
import resource
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

_RING = 64 << 20
_PIECE = 4 << 20
_HUGE = 2 << 20
_MADV_COLLAPSE = 25
Way = Callable[[int, int, memoryview, int], float | None]
"""(new file, ring file, ring memory, bytes) -> CPU seconds, or None if the full call counts."""


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def write(file: int, ring_file: int, ring: memoryview, nbytes: int) -> None:
    for at in range(0, nbytes, _PIECE):
        os.write(file, ring[at % _RING : at % _RING + _PIECE])


def copy_file_range(file: int, ring_file: int, ring: memoryview, nbytes: int) -> None:
    done = 0
    while done < nbytes:
        left = _PIECE - done % _PIECE
        done += os.copy_file_range(ring_file, file, left, done % _RING, done)


def sendfile(file: int, ring_file: int, ring: memoryview, nbytes: int) -> None:
    done = 0
    while done < nbytes:
        done += os.sendfile(file, ring_file, done % _RING, _PIECE - done % _PIECE)


def allocate(file: int, ring_file: int, ring: memoryview, nbytes: int) -> None:
    os.posix_fallocate(file, 0, nbytes)


def map_pages(file: int, ring_file: int, ring: memoryview, nbytes: int) -> float:
    os.posix_fallocate(file, 0, nbytes)
    before = cpu_s()
    with mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE):
        return cpu_s() - before


def overwrite(file: int, ring_file: int, ring: memoryview, nbytes: int) -> float:
    write(file, ring_file, ring, nbytes)
    os.lseek(file, 0, os.SEEK_SET)
    before = cpu_s()
    write(file, ring_file, ring, nbytes)
    return cpu_s() - before


def fault_in(file: int, ring_file: int, ring: memoryview, nbytes: int) -> None:
    os.ftruncate(file, nbytes)
    with mmap.mmap(file, nbytes) as memory:
        for at in range(0, nbytes, mmap.PAGESIZE):
            memory[at] = 1


def huge_pages(file: int, ring_file: int, ring: memoryview, nbytes: int) -> float:
    """Collapse an aligned mapping to huge pages; the mapping replaces part of a larger one, because mmap aligns only to
    small pages."""
    os.ftruncate(file, nbytes)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_size_t] * 5]
    libc.munmap.argtypes, libc.madvise.argtypes = (
        [ctypes.c_void_p, ctypes.c_size_t, *more] for more in ([], [ctypes.c_int])
    )
    begin = libc.mmap(None, nbytes + _HUGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 2**64 - 1, 0)
    aligned = -(-begin // _HUGE) * _HUGE
    map_fixed = 0x10
    before = cpu_s()
    libc.mmap(aligned, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | map_fixed, file, 0)
    for at in range(0, nbytes, _HUGE):  # the kernel collapses only ranges with at least one page
        ctypes.memset(aligned + at, 1, 1)
    failed = libc.madvise(aligned, nbytes, _MADV_COLLAPSE)
    spent = cpu_s() - before
    libc.munmap(begin, nbytes + _HUGE)
    if failed:
        raise OSError(ctypes.get_errno(), "no huge pages")
    return spent


def measure(way: Way, out: Path, ring_file: int, ring: memoryview, nbytes: int) -> float:
    path = out / "tapscope-segment-copy"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        before = cpu_s()
        apart = way(file, ring_file, ring, nbytes)
        return cpu_s() - before if apart is None else apart
    finally:
        os.close(file)
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("/dev/shm"), help="directory of the new files")
    args = parser.parse_args()
    nbytes = (args.mib << 20) // _PIECE * _PIECE
    ways: list[Way] = [write, overwrite, copy_file_range, sendfile, allocate, map_pages, fault_in, huge_pages]
    with tempfile.TemporaryFile(dir="/dev/shm", buffering=0) as ring_at:
        found = compare(ways, args.out, ring_at.fileno(), nbytes, args.rounds)
    base = statistics.median(found["write"])
    for name, each in found.items():
        middle = statistics.median(each) if each else math.nan
        rates = [spent / nbytes * 2**30 for spent in each or [math.nan]]
        spread = f"{min(rates):.2f} to {max(rates):.2f}"
        print(f"{name:<16} {middle / nbytes * 2**30:.3f} CPU s/GiB ({spread})  {middle / base:.2f} of write()")


def compare(ways: list[Way], out: Path, ring_file: int, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each method in every round; a method that these file systems do not support has
    none."""
    found: dict[str, list[float]] = {way.__name__: [] for way in ways}
    os.posix_fallocate(ring_file, 0, _RING)
    with mmap.mmap(ring_file, _RING) as memory, memoryview(memory) as ring:
        ring[:] = os.urandom(1 << 20) * (_RING >> 20)
        for number in range(rounds):
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                with contextlib.suppress(OSError):
                    found[way.__name__].append(measure(way, out, ring_file, ring, nbytes))
    return found


if __name__ == "__main__":
    main()
