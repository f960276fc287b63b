"""Runs at an fsspec URL: read as a local copy is, from stores that fail too. `memory://` always, S3 where moto is."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from factories import RunFactory
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from sglang_dumps import SglangDump

from tapscope import open_run
from tapscope.cli import main
from tapscope.comparator.pair_analysis import pool
from tapscope.core.errors import RunCorruptError, TapscopeError, UnreachableError
from tapscope.core.observe import RowSpan
from tapscope.remote import remote_files
from tapscope.remote.remote_files import RemoteFiles
from tapscope.remote.remote_payloads import RemotePayloads
from tapscope.sources import require_run

Capture = pytest.CaptureFixture[str]


class FlakyFileSystem(MemoryFileSystem):
    """A store that answers so many range requests, and then no more."""

    protocol = "flaky"
    answers = 10**9

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.removeprefix("flaky://"))

    def cat_ranges(self, paths, starts, ends, **how):  # type: ignore[no-untyped-def]
        FlakyFileSystem.answers -= 1
        if FlakyFileSystem.answers < 0:
            raise TimeoutError("the connection timed out\nafter 3 attempts")
        return super().cat_ranges(paths, starts, ends, **how)


fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)


@pytest.fixture(autouse=True)
def _empty_store() -> Iterator[None]:
    FlakyFileSystem.answers = 10**9
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def write_runs(folder: Path) -> None:
    """``base`` and ``target``, which differs in layer 3."""
    values = np.random.default_rng(0).standard_normal((5, 6, 8)).astype(np.float32)
    for name, change in (("base", 0.0), ("target", 0.5)):
        with RunFactory(folder / name, mesh={"tp": 2}) as run:
            run.step(rows=[RowSpan("0", 0, 6, 0, 0)], token_ids=range(6), grid=(6,))
            for i, value in enumerate(values):
                halves = dict(enumerate(np.split(value + change * (i == 3), 2, axis=1)))
                run.put(f"model.layers.{i}.mlp:out", halves, dims="t h[tp]")


def upload(folder: Path, prefix: str = "store") -> None:
    fsspec.filesystem("memory").put(f"{folder}/", f"/{prefix}", recursive=True)


def diff_lines(left: object, right: object, capsys: Capture, *flags: str) -> tuple[int, str]:
    capsys.readouterr()
    code = main(["diff", str(left), str(right), "--json", *flags])
    return code, capsys.readouterr().out


def test_runs_at_a_url_are_compared_as_local_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    write_runs(tmp_path)
    upload(tmp_path)
    expected = diff_lines(tmp_path / "base", tmp_path / "target", capsys)
    assert expected[0] == 1
    found = diff_lines("memory://store/base/", "memory://store/target", capsys)
    assert (found[0], found[1].replace("memory://store", str(tmp_path))) == expected
    monkeypatch.setattr(pool, "MAX_BATCH", 2)
    assert diff_lines("memory://store/base", "memory://store/target", capsys, "--jobs", "2") == found
    for words in (["info"], ["ls", "--json"], ["show", "--json"], ["verify"]):
        shown = []
        for place in (str(tmp_path), "memory://store"):
            site = ["model.layers.3.mlp:out", "--rank", "1"] if words[0] == "show" else []
            assert main([words[0], f"{place}/target", *site, *words[1:]]) == 0
            shown.append(capsys.readouterr().out.replace(place, "PLACE"))
        assert shown[0] == shown[1]


def test_nothing_of_the_values_is_stored_and_the_copy_is_removed(tmp_path: Path) -> None:
    write_runs(tmp_path)
    upload(tmp_path)
    with open_run("memory://store/base") as run:
        assert isinstance(run.payloads, RemotePayloads)
        folder = run.payloads._remote.folder
        (segment,) = folder.glob("rank-00001/*.safetensors")
        assert segment.stat().st_size == (tmp_path / "base/rank-00001" / segment.name).stat().st_size
        assert segment.stat().st_blocks == 0
        assert str(run.path) == "memory://store/base"
        assert not run.path.exists()
        assert (run.name, run.problems) == ("base", [])
    assert not folder.exists()


def test_checkpoints_and_files_at_a_url(tmp_path: Path, capsys: Capture) -> None:
    rng = np.random.default_rng(1)
    weights = {f"model.layers.{i}.mlp.up_proj.weight": rng.standard_normal((9, 7)).astype(np.float32) for i in range(3)}
    for name in ("a", "b"):
        weights = {key: value + (name == "b" and "1" in key) for key, value in weights.items()}
        (tmp_path / f"ckpt-{name}").mkdir()
        save_file(weights, tmp_path / f"ckpt-{name}/model.safetensors")
        (tmp_path / f"ckpt-{name}/config.json").write_text("{}")
        for step in range(2):
            (tmp_path / f"files-{name}/{step}").mkdir(parents=True)
            np.savez(tmp_path / f"files-{name}/{step}/x.npz", x=weights["model.layers.0.mlp.up_proj.weight"])
        torch.save({"y": torch.ones(3) + (name == "b")}, tmp_path / f"{name}.pt")
        dump = SglangDump(tmp_path / f"dump-{name}")
        dump.dump("x", torch.arange(6.0).reshape(2, 3))
    upload(tmp_path)
    for left, right, code in (
        ("ckpt-a", "ckpt-b", 1),
        ("files-a/{step}/{name}.npz", "files-b/{step}/{name}.npz", 0),
        ("a.pt", "b.pt", 1),
        ("dump-a", "dump-b", 0),
        ("ckpt-a/model.safetensors", "ckpt-b/model.safetensors", 1),
    ):
        local = diff_lines(tmp_path / left, tmp_path / right, capsys)
        found = diff_lines(f"memory://store/{left}", f"memory://store/{right}", capsys)
        assert (found[0], found[1].replace("memory://store", str(tmp_path))) == local, left
        assert local[0] == code, left


@pytest.mark.parametrize("where", ["__init__", "find", "cat_ranges"])
def test_an_invalid_endpoint_is_one_sentence(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Drivers raise ValueError for it: botocore for AWS_ENDPOINT_URL without http://."""
    write_runs(tmp_path)
    upload(tmp_path)

    def refuse(*args: object, **kwargs: object) -> None:
        raise ValueError("Invalid endpoint: minio:9000")

    monkeypatch.setattr(FlakyFileSystem, where, refuse)
    FlakyFileSystem.clear_instance_cache()
    assert main(["diff", "flaky://store/base", "flaky://store/target"]) == 4
    error = "tapscope: error: flaky://store/base: the store failed: ValueError: Invalid endpoint: minio:9000\n"
    assert capsys.readouterr().err.replace("store/target", "store/base") == error


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(spans=st.lists(st.tuples(st.integers(0, 999), st.integers(1, 400)), max_size=12))
def test_ranges_are_the_bytes_of_the_file(spans: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_BLOCK", 32), ("_PART", 64), ("_CACHE_BYTES", 96), ("_HEAD", 16)):
        monkeypatch.setattr(remote_files, name, value)
    data = np.random.default_rng(2).integers(0, 256, 1000, np.uint8)
    fsspec.filesystem("memory").pipe("/ranges/seg.safetensors", data.tobytes())
    one = RemoteFiles("memory://ranges")
    one._sizes = {"seg.safetensors": 1000}
    for begin, length in spans:
        end = min(begin + length, 1000)
        assert one.read("seg.safetensors", begin, end).tobytes() == data[begin:end].tobytes()
    assert len(one._blocks) <= 3
    with pytest.raises(RunCorruptError, match="truncated: 1000 bytes, a record needs 1001"):
        one.read("seg.safetensors", 990, 1001)
    one.close()


@pytest.mark.parametrize("answers", [0, 3])
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_store_that_fails_half_way_is_one_sentence(
    tmp_path: Path, answers: int, jobs: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(pool, "MAX_BATCH", 2)
    monkeypatch.setattr(remote_files, "_BLOCK", 64)
    write_runs(tmp_path)
    upload(tmp_path)
    FlakyFileSystem.answers = answers
    html = tmp_path / "report.html"
    where = ["flaky://store/base", "flaky://store/target"]
    assert main(["diff", *where, "--jobs", jobs, "--html", str(html)]) == 4
    out, err = capsys.readouterr()
    assert (out, html.exists()) == ("", False)
    assert err.startswith("tapscope: error: flaky://store/")
    assert err.endswith(": the store failed: the connection timed out after 3 attempts\n")


def test_a_file_that_became_shorter_is_one_sentence(tmp_path: Path, capsys: Capture) -> None:
    write_runs(tmp_path)
    upload(tmp_path)
    with open_run("memory://store/base") as run:
        for path in [path for path in MemoryFileSystem.store if path.endswith("seg-000000.safetensors")]:
            fsspec.filesystem("memory").pipe(path, b"short")
        with pytest.raises(UnreachableError, match=r"the store gave 5 of \d+ bytes; has the file changed\?"):
            run.array(run.records[0])


@pytest.mark.parametrize(
    ("url", "code", "words"),
    [
        (
            "memory://store/nothing",
            3,
            "memory://store/nothing: no bucket or file of this name, or no permission to list it",
        ),
        (
            "memory://store",
            3,
            "memory://store is not a tapscope run: it contains 2 runs (base, target); give one of them",
        ),
        ("nope://store", 2, "nope://store: unknown protocol 'nope'"),
        ("oci://store", 2, "oci://store: the driver is not installed (Install ocifs to access OCI Object Storage)"),
    ],
)
def test_wrong_urls_are_one_sentence(tmp_path: Path, url: str, code: int, words: str, capsys: Capture) -> None:
    write_runs(tmp_path)
    upload(tmp_path)
    for command in (["info", url], ["diff", url, str(tmp_path / "base")]):
        assert main(command) == code
        out, err = capsys.readouterr()
        assert not out
        assert err.count("\n") == 1
        assert words in err
    if "contains" not in words:  # found when it is opened
        with pytest.raises(TapscopeError):
            require_run(url)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a bucket of a real S3 server in another process."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in (
        ("ENDPOINT_URL", f"http://127.0.0.1:{port}"),
        ("ACCESS_KEY_ID", "x"),
        ("SECRET_ACCESS_KEY", "y"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], env=environment, **quiet)
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.1)
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
    finally:
        server.terminate()
        server.wait()


def test_runs_on_s3_are_compared_as_local_ones(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(pool, "MAX_BATCH", 2)
    write_runs(tmp_path)
    for name in ("base", "target"):
        fsspec.filesystem("s3").put(f"{tmp_path / name}/", f"bucket/runs/{name}", recursive=True)
    expected = diff_lines(tmp_path / "base", tmp_path / "target", capsys)
    shutil.rmtree(tmp_path / "target")
    for flags in ((), ("--jobs", "2")):
        code, out = diff_lines(f"{bucket}/runs/base", f"{bucket}/runs/target", capsys, *flags)
        assert (code, out.replace(f"{bucket}/runs", str(tmp_path))) == expected
    assert main(["info", "s3://no-such-bucket/run"]) == 3
    assert capsys.readouterr().err.count("\n") == 1
