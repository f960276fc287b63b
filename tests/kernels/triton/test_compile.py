"""Every Triton kernel compiles for every GPU that is served; and where none is, callers learn why."""

import os
import re
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
    """Python without Triton's interpreter."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=kept | environment, cwd="/")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("launches", mostly_soak(["first", "all"], default=["first"]))
def test_kernels_compile_for_every_target(launches: str) -> None:
    """What was compiled before, of the same source, is found in the cache."""
    pytest.importorskip("triton")
    done = python(
        ROOT / "tests/support/triton_compile.py", launches, *TARGETS, TRITON_CACHE_DIR=str(ROOT / ".cache/triton")
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = {(int(target), name) for target, name in re.findall(r"sm_(\d+) (\w+)", done.stdout)}
    files = [file for file in (ROOT / "kernels/triton").glob("*.py") if "@triton.jit" in file.read_text()]
    kernels = {name for file in files for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.MULTILINE)}
    assert len(kernels) >= 5
    assert compiled == {(target, name) for target in TARGETS for name in kernels}


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


def test_missing_triton_is_reported() -> None:
    program = """
import sys
sys.meta_path.insert(0, type("Without", (), {"find_spec": lambda self, name, *_: self.fail(name),
    "fail": lambda self, name: (_ for _ in ()).throw(ModuleNotFoundError(name)) if name == "triton" else None})())
import torch
from tapscope.kernels.triton import why_not
try:
    print(why_not(torch.device("cuda")))
except ModuleNotFoundError:
    print("raised")
"""
    done = python("-c", program)
    assert done.stdout == "Triton is not installed (pip install triton, in the version that torch asks for)\n", done


def test_wrapper_refuses_cpu_tensors() -> None:
    pytest.importorskip("triton")
    program = """
import torch
from tapscope.kernels.triton.activation import gated
gated(torch.ones(2, 4), None, "silu")
"""
    done = python("-c", program)
    assert done.stderr.splitlines()[-1] == (
        "tapscope.core.errors.UsageError: no Triton kernel for tensors on cpu: Triton compiles for CUDA, not for cpu"
    )
