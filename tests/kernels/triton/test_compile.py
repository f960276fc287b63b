"""Every Triton kernel compiles for every supported GPU; on other devices callers get the reason."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from soak_cases import mostly_soak

from tapscope.kernels.triton import is_interpreted, why_not

ROOT = Path(__file__).resolve().parents[3]
TARGETS = (80, 100, 90)


def python(*words: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run Python without Triton's interpreter."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=kept | environment, cwd="/")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("launches", mostly_soak(["last", "first", "all"], default=["last"]))
def test_kernels_compile_for_every_target(launches: str) -> None:
    """Compile for the last target by default; `make check` compiles for all targets.

    Kernels compiled earlier from the same source are found in the cache.
    """
    pytest.importorskip("triton")
    done = python(
        ROOT / "tests/support/triton_compile.py", launches, *TARGETS, TRITON_CACHE_DIR=str(ROOT / ".cache/triton")
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = {(int(target), name) for target, name in re.findall(r"sm_(\d+) (\w+)", done.stdout)}
    files = [file for file in (ROOT / "kernels/triton").glob("*.py") if "@triton.jit" in file.read_text()]
    kernels = {name for file in files for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.MULTILINE)}
    assert len(kernels) >= 5
    for target in TARGETS[-1:] if launches == "last" else TARGETS:
        assert {name for each, name in compiled if each == target} == kernels
    early = {int(count) for count in re.findall(r"sm_(?:90|100) _scaled_few_kernel \d+ (\d+)", done.stdout)}
    assert early
    assert all(early) or launches == "all", "a row's product reads its weight before it waits for the previous kernel"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_attention_compiles_for_gpus_with_little_shared_memory() -> None:
    """Compute capability 12.0 has FP8 and 99 KiB of shared memory per program; larger kernels fail to compile."""
    pytest.importorskip("triton")
    done = python(ROOT / "tests/support/triton_compile.py", "small", 120, TRITON_CACHE_DIR=str(ROOT / ".cache/triton"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(re.findall(r"sm_120 (\w+)", done.stdout)) >= {
        "_decode_kernel",
        "_prefill_kernel",
        "_index_scores_kernel",
    }


def test_kernels_for_a_gpu_alone_are_compiled_ahead_in_threads(tmp_path: Path) -> None:
    """CPU tensors are refused, and without a GPU nothing is launched.

    The second run finds every kernel in Triton's cache.
    """
    pytest.importorskip("triton.runtime._async_compile")
    done = python(ROOT / "tests/support/triton_ahead.py", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    parts = "choose", "collect", "draw", "hold", "narrow", "search", "span", "start"
    refused = "no Triton kernel for tensors on cpu: Triton compiles for CUDA, not for cpu"
    names = [f"_{part}_kernel" for part in parts]
    assert done.stdout.splitlines() == [refused, " ".join([*names, "8"]), "10"]


def test_unsupported_device_is_reported_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    cpu = torch.device("cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert is_interpreted()
    assert why_not(cpu) is None
    assert "on a CPU" in str(why_not(torch.device("cuda")))
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "compiles for CUDA, not for cpu" in str(why_not(cpu))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert "compute capability (7, 5)" in str(why_not(torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert why_not(torch.device("cuda")) is None


def test_missing_triton_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package imports without Triton."""
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(sys, "meta_path", [WithoutTriton(), *sys.meta_path])
    found = runpy.run_path(str(ROOT / "kernels/triton/__init__.py"))
    assert found["why_not"](torch.device("cuda")) == (
        "Triton is not installed (pip install triton, in the version that torch asks for)"
    )


class WithoutTriton:
    """Import finder that makes Triton look uninstalled."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "triton":
            raise ModuleNotFoundError(name)
