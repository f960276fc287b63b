"""Damaged and hostile files, by number: `python tests/faults/fuzz_files.py [--cases N] [--seed S] [--only KIND]`.

Each case damages one part of a tapscope run, a compacted run or a dump of SGLang's dumper, and runs `info`, `ls`,
`verify` and `diff` (against the undamaged one) on it in processes of bounded time and memory. Prints what was counted:
hangs, crashes (tracebacks, signals), memory above 1 GiB, and silent passes, in which a byte of a payload was changed
and `verify` says that all is there. Exit code 1 where there is any; the number of a case makes it again.
"""

import argparse
import json
import os
import random
import shutil
import struct
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))  # where it is run as a script

from factories import RunFactory
from memory_limit import Limited, Outcome
from sglang_dumps import SglangDump

from tapscope.core.observe import RowSpan
from tapscope.run_format.compact import compact_run
from tapscope.sources import open_run

VERBS = ("info", "ls", "verify", "diff")


def make_run(path: Path) -> Path:
    """Two ranks, three steps, tensors of some dtypes, shards, plain values."""
    rng = np.random.default_rng(7)
    with RunFactory(path, mesh={"tp": 2}) as run:
        for layer in range(2):
            run.site(f"layers.{layer}:out", params={"weight": [8, 8]})
            run.site(f"layers.{layer}.mlp:out")
        run.site(":in[scale]")
        for step in range(3):
            run.step(rows=[RowSpan("a", 4 * step, 4, 0, 0)], token_ids=range(4), grid=(4,))
            run.put_value(":in[scale]", 0.5)
            for layer in range(2):
                whole = rng.standard_normal((4, 16)).astype(np.float32)
                run.put(f"layers.{layer}:out", {0: whole, 1: whole}, dims="t h")
                run.put(f"layers.{layer}.mlp:out", {0: whole[:, :8], 1: whole[:, 8:]}, dims="t h[tp]")
    return path


def make_compacted(path: Path) -> Path:
    """The same as tables."""
    make_run(path)
    compact_run(path)
    return path


def make_dump(path: Path) -> Path:
    """Two ranks, two steps, as SGLang's dumper leaves them."""
    torch.manual_seed(7)
    dump = SglangDump(path, tp=2)
    for step in range(2):
        dump.step(input_ids=[5, 6, 7], positions=[3 * step, 3 * step + 1, 3 * step + 2], rids=["x"])
        whole = torch.randn(3, 32)
        dump.hook("model.layers.0.mlp", output={0: whole, 1: whole}, dims="t h")
        dump.dump("q", {0: whole[:, :16].bfloat16(), 1: whole[:, 16:].bfloat16()}, dims="t h[tp]", layer_id=0)
        dump.dump("scale", 0.5)
    return path


SOURCES = {"run": make_run, "compacted": make_compacted, "dump": make_dump}


@dataclass
class Case:
    """One damage, done to a copy of a source."""

    number: int
    rng: random.Random
    source: str
    path: Path
    file: Path
    payloads: list[tuple[int, int]]
    """(first byte, end) of the payloads within the file."""
    hits_payload: bool = False
    """Whether a byte of a payload is another one now."""
    kind: str = ""


def flip(case: Case) -> None:
    """One to three bytes become others; mostly where they hurt."""
    data = bytearray(case.file.read_bytes())
    for _ in range(case.rng.choice((1, 1, 3))):
        at = case.rng.randrange(len(data))
        if case.payloads and case.rng.random() < 0.5:
            at = case.rng.randrange(*case.rng.choice(case.payloads))
        data[at] ^= case.rng.randrange(1, 256)
        case.hits_payload |= any(begin <= at < end for begin, end in case.payloads)
    case.file.write_bytes(data)


def truncate(case: Case) -> None:
    """The end is gone."""
    size = case.rng.randrange(case.file.stat().st_size)
    os.truncate(case.file, size)
    case.hits_payload = any(size < end for _, end in case.payloads)


def remove(case: Case) -> None:
    """The file is gone."""
    case.file.unlink()
    case.hits_payload = bool(case.payloads)


def append(case: Case) -> None:
    """Something stands behind the end."""
    with case.file.open("ab") as file:
        file.write(case.rng.randbytes(case.rng.choice((1, 64, 5000))))


def shuffle(case: Case) -> None:
    """A piece of the file stands where another one should."""
    data = bytearray(case.file.read_bytes())
    size = min(case.rng.choice((4, 64, 512)), len(data) // 3)
    one, two = (case.rng.randrange(len(data) - size + 1) for _ in range(2))
    before = bytes(data)
    data[one : one + size] = before[two : two + size]
    case.hits_payload = any(data[begin:end] != before[begin:end] for begin, end in case.payloads)
    case.file.write_bytes(data)


def special(case: Case) -> None:
    """A file that is none."""
    case.file.unlink()
    made: list[Callable[[], object]] = [
        lambda: os.mkfifo(case.file),
        lambda: case.file.symlink_to("/dev/zero"),
        lambda: case.file.symlink_to(case.file.name),
        lambda: case.file.symlink_to(case.path),
        lambda: case.file.mkdir(),
        lambda: os.truncate(os.open(case.file, os.O_CREAT | os.O_WRONLY), 1 << 36),
    ]
    case.rng.choice(made)()
    case.hits_payload = bool(case.payloads)


ODD = (None, True, -1, 0, 1 << 62, 1 << 63, 10**30, 1e308, -0.5, "", "x" * 3000, "\ud800", "a\nb", [], {}, [[]], "../x")


def odd_json(case: Case) -> None:
    """A member of a line is of another type or size, or the line is deep."""
    lines = case.file.read_bytes().splitlines()
    whole = case.file.suffix == ".json"
    at = 0 if whole else case.rng.randrange(len(lines))
    content = json.loads(case.file.read_bytes() if whole else lines[at])
    place = content
    while isinstance(place, dict | list) and place:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = case.rng.choice(keys)
        if isinstance(place[key], dict | list) and place[key] and case.rng.random() < 0.7:
            place = place[key]
            continue
        place[key] = case.rng.choice(ODD)
        break
    text = json.dumps(content).encode()
    if case.rng.random() < 0.1:
        text = case.rng.choice((b"[" * 100_000, b"9" * 100_000, b'{"a":' * 5000, b"[" + b"{}," * 3_000_000 + b"{}]"))
    if whole:
        case.file.write_bytes(text)
    else:
        case.file.write_bytes(b"\n".join([*lines[:at], text, *lines[at + 1 :], b""]))


def odd_pickle(case: Case) -> None:
    """The pickle of a `.pt` file is another program; the rest stays."""
    with zipfile.ZipFile(case.file) as old:
        members = {info.filename: old.read(info) for info in old.infolist()}
    (name,) = [each for each in members if each.endswith("data.pkl")]
    members[name] = case.rng.choice(_PROGRAMS)(case.rng, members[name])
    packed = case.rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(case.file, "w", packed) as new:
        for each, content in members.items():
            new.writestr(each, content)


def _changed(rng: random.Random, data: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(rng.choice((1, 2, 5))):
        found[rng.randrange(len(found))] = rng.randrange(256)
    return bytes(found)


def _repeated(rng: random.Random, _: bytes) -> bytes:
    opcode = rng.choice(
        (b"]", b"}", b"\x8f", b")", b"(", b"N", b"]q\x00", b"K\x01", b"]\x94", b")\x85", b"}K\x01K\x01s")
    )
    return b"\x80\x04" + opcode * rng.choice((1000, 3_000_000)) + b"."


def _laughing(rng: random.Random, _: bytes) -> bytes:
    """A list of lists of lists, each many times the one before, under a key."""
    width, key = rng.choice((2, 10, 200)), rng.choice((b"value", b"meta", b"name"))
    levels = b"".join(b"](" + (b"h" + bytes([n])) * width + b"eq" + bytes([n + 1]) for n in range(30))
    leaf = rng.choice((b"]", b"K\x01", b"N", b"X\x03\x00\x00\x00abc", b"}", b"](K\x01Ne"))
    head = b"}X" + struct.pack("<I", len(key)) + key
    return b"\x80\x02" + head + b"(" + leaf + b"q\x00" + levels + b"ts."


def _spread(rng: random.Random, data: bytes) -> bytes:
    """Sizes and strides become others."""
    found = bytearray(data)
    places = [at for at in range(len(found) - 1) if found[at] == 0x4B]
    for at in rng.sample(places, min(3, len(places))):
        found[at + 1] = rng.choice((0, 1, 2, 255))
    wide = bytes(found)
    return wide.replace(b"K\x01", b"J\xff\xff\xff\x7f", 1) if rng.random() < 0.3 else wide


def _random(rng: random.Random, _: bytes) -> bytes:
    opcodes = b"]})(Nq\x00h\x00uesat\x85\x86\x87K\x01\x88\x89\x8f\x90R\x81Qb"
    return bytes(rng.choice(opcodes) for _ in range(rng.choice((10, 100, 2000)))) + b"."


def _calls(rng: random.Random, _: bytes) -> bytes:
    name = rng.choice(("torch\nSize", "collections\nOrderedDict", "builtins\nset", "torch\ndevice", "os\nsystem"))
    argument = b"](" + b"K\x01" * rng.choice((1, 100_000)) + b"e"
    return (
        b"](" + argument + b"q\x00c" + name.encode() + b"\nq\x01" + b"h\x01h\x00\x85R" * rng.choice((1, 50_000)) + b"e."
    )


_PROGRAMS = (_changed, _changed, _changed, _repeated, _laughing, _spread, _spread, _random, _calls)


def odd_zip(case: Case) -> None:
    """A number in a header of the archive is another one."""
    data = bytearray(case.file.read_bytes())
    marks = [at for mark in (b"PK\x01\x02", b"PK\x05\x06", b"PK\x03\x04", b"PK\x06\x06") for at in _all(data, mark)]
    at = case.rng.choice(marks) + case.rng.randrange(4, 46)
    width = case.rng.choice((1, 2, 4))
    data[at : at + width] = case.rng.choice((b"\xff" * width, b"\0" * width, case.rng.randbytes(width)))
    case.file.write_bytes(data)


def _all(data: bytes | bytearray, mark: bytes) -> list[int]:
    found, at = [], data.find(mark)
    while at >= 0:
        found.append(at)
        at = data.find(mark, at + 1)
    return found


KINDS: dict[str, tuple[Callable[[Case], None], tuple[str, ...], str]] = {
    "flip": (flip, ("run", "compacted", "dump"), "*"),
    "truncate": (truncate, ("run", "compacted", "dump"), "*"),
    "remove": (remove, ("run", "compacted", "dump"), "*"),
    "append": (append, ("run", "compacted", "dump"), "*"),
    "shuffle": (shuffle, ("run", "compacted", "dump"), "*"),
    "special": (special, ("run", "compacted", "dump"), "*"),
    "odd json": (odd_json, ("run", "compacted"), "*.json*"),
    "odd pickle": (odd_pickle, ("dump",), "*.pt"),
    "odd zip": (odd_zip, ("dump",), "*.pt"),
    "table": (flip, ("compacted",), "*.parquet"),
    "table cut": (shuffle, ("compacted",), "*.parquet"),
}
"""Name -> what is done, to which sources, to which of their files."""


@dataclass
class Count:
    """What came of many cases."""

    cases: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    hits: int = 0
    """Cases in which a byte of a payload was changed or gone."""
    slowest: float = 0.0
    largest: int = 0

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} {number}" for name, number in sorted(self.cases.items()))
        cost = f"slowest command {self.slowest:.1f} s, most memory {self.largest >> 20} MiB"
        cases = f"{sum(self.cases.values())} cases ({kinds})"
        return f"{cases}; {self.hits} with changed payloads; {cost}; {len(self.bad)} bad"


class Fuzz:
    """Makes the sources once, then cases by number."""

    def __init__(self, place: Path, limited: Limited) -> None:
        self._place, self._limited = place, limited
        self._sources = {name: make(place / name) for name, make in SOURCES.items()}
        self._payloads: dict[Path, list[tuple[int, int]]] = {}
        for path in self._sources.values():
            with open_run(path) as run:
                for record in run.records:
                    if record.entry is not None and record.entry.nbytes:
                        folder = path if path.name == "dump" else path / f"rank-{record.key.rank:05d}"
                        span = record.entry.offset, record.entry.offset + record.entry.nbytes
                        self._payloads.setdefault(folder / record.entry.file, []).append(span)
        self.count = Count()

    def make(self, number: int, only: str = "") -> Case:
        """Damage a copy."""
        rng = random.Random(number)
        kind = rng.choice([name for name in KINDS if only in name])
        damage, sources, pattern = KINDS[kind]
        source = rng.choice(sources)
        original, path = self._sources[source], self._place / "case"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(original, path)
        files = sorted(each for each in path.rglob(pattern) if each.is_file() and each.name != ".lock")
        file = rng.choice(files)
        case = Case(
            number, rng, source, path, file, self._payloads.get(original / file.relative_to(path), []), kind=kind
        )
        damage(case)
        return case

    def attempt(self, number: int, only: str = "") -> list[str]:
        """What is wrong with the answers to one case."""
        case = self.make(number, only)
        self.count.cases[case.kind] += 1
        self.count.hits += case.hits_payload
        said = []
        for verb in VERBS:
            more = [self._sources[case.source]] if verb == "diff" else []
            end = self._limited.run(verb, case.path, *more)
            self.count.slowest = max(self.count.slowest, end.seconds)
            self.count.largest = max(self.count.largest, end.rss)
            if wrong := end.wrong or _silent(case, verb, end):
                where = f"case {number} ({case.kind} of {case.file.relative_to(case.path)} in {case.source})"
                said.append(f"{where}: {wrong}: {end}")
        self.count.bad += said
        return said


def _silent(case: Case, verb: str, end: Outcome) -> str:
    return "passed in silence" if verb == "verify" and case.hits_payload and end.code == 0 else ""


def main() -> int:
    """Try many, print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1, help="number of the first case")
    parser.add_argument("--only", default="", help="kinds of damage whose name holds this text")
    args = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="tapscope-fuzz-"))
    try:
        with Limited() as limited:
            fuzz = Fuzz(place, limited)
            for number in range(args.seed, args.seed + args.cases):
                for said in fuzz.attempt(number, args.only):
                    print(said, flush=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(fuzz.count)
    return 1 if fuzz.count.bad else 0


if __name__ == "__main__":
    sys.exit(main())
