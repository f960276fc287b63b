"""Backend selection, in fresh processes because the selection is made once per process."""

import functools
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
from native_helpers import needs_library

import tapscope
from tapscope.kernels.native import backend, use_backend

ROOT = Path(__file__).resolve().parents[3]


def fresh(program, *first, **environment):
    """Run a program in a new process and return the lines of its stdout."""
    path = os.pathsep.join([*map(str, first), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_library
def test_library_load_keeps_subnormal_numbers():
    program = """
import ctypes
import numpy as np
from tapscope.kernels.native import backend, compare_rows, digest_of, summarize_array, take
tiny = np.full((2, 4096), 2.0**-149, np.float32)
summarize_array(tiny), compare_rows(tiny, tiny * 3), digest_of(tiny.ctypes.data, tiny.nbytes)
copy = np.empty_like(tiny)
take(tiny.ctypes.data, tiny.size, "float32", copy.ctypes.data)
take(tiny.ctypes.data, tiny.size, "float16")
half = np.float32(2.0**-126) * np.float32(0.5)
print(backend()[0], half > 0, float(tiny[0, 0]) + 0.0 == 2.0**-149, 2.2250738585072014e-308 / 2 > 0)
print(summarize_array(tiny).stats.sum == 8192 * 2.0**-149, compare_rows(tiny, tiny * 3).total().max_abs == 2.0**-148)
"""
    assert fresh(program) == ["c++ True True True", "True True"]


def test_library_can_be_disabled_by_environment():
    program = "from tapscope.kernels.native import backend; print(*backend())"
    assert fresh(program, TAPSCOPE_NATIVE="0") == ["numpy TAPSCOPE_NATIVE=0"]


def test_library_setting_error_names_variable_value_and_rule():
    program = """
from tapscope.core.errors import ConfigError
from tapscope.kernels.native import backend
try:
    backend()
except ConfigError as error:
    print(error)
"""
    assert fresh(program, TAPSCOPE_NATIVE="yes") == [
        "TAPSCOPE_NATIVE='yes' must be 0 (numpy only) or 1 (the C++ library if it was built) or avx2 (the same without"
        " what is written for 64-byte vectors)"
    ]


@pytest.fixture
def copied(tmp_path):
    """A copy of the package as installed without a compiler."""
    source = Path(tapscope.__file__).parent
    shutil.copytree(source, tmp_path / "tapscope", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


WHERE = """
from tapscope.kernels.native import backend, summarize_array
import numpy as np
print(*backend())
print(summarize_array(np.arange(10, dtype=np.float32)).hash)
"""


def test_library_missing_falls_back_to_numpy_with_a_reason(copied):
    assert fresh(WHERE, copied, TAPSCOPE_NATIVE="1") == [
        "numpy the C++ library was not built; reinstall tapscope where a C++17 compiler is found",
        "6a50ca7236346a366a15b1ceee88b5e6",
    ]


def test_library_load_failure_falls_back_to_numpy_and_names_it(copied):
    broken = copied / "tapscope" / "kernels" / "native" / f"_tapscope{EXTENSION_SUFFIXES[0]}"
    broken.write_bytes(b"not a library")
    lines = fresh(WHERE, copied, TAPSCOPE_NATIVE="1")
    assert lines[0].startswith(f"numpy {broken.name} cannot be loaded: ")
    assert lines[1] == "6a50ca7236346a366a15b1ceee88b5e6"


def test_library_requested_but_not_built_is_an_error_with_a_reason(copied):
    program = """
from tapscope.core.errors import ConfigError
from tapscope.kernels.native import use_backend
try:
    with use_backend("c++"):
        print("served")
except ConfigError as error:
    print(error)
"""
    assert fresh(program, copied) == [
        "use_backend('c++'): the C++ library was not built; reinstall tapscope where a C++17 compiler is found"
    ]


def test_backend_context_restores_the_previous_backend():
    before = backend()
    with use_backend("numpy"):
        assert backend() == ("numpy", "chosen by use_backend('numpy')")
    assert backend() == before


@needs_library
def test_library_is_built_next_to_its_sources():
    kind, path = backend()
    assert kind == "c++"
    assert "_tapscope" in os.path.basename(path)


SUMMARIES = """
import numpy as np
from tapscope.core import dtypes
from tapscope.kernels.native import backend, compare_rows, summarize, take
from tapscope.kernels.native.compare import compare_reference
print(backend()[0])

def ordinary(name, rng, width):
    values = rng.standard_normal((3, width)) * 4
    values = values > 0 if name == "bool" else abs(values) if name[0] == "u" else values
    return values.astype(dtypes.numpy_dtype(name))

names = [name for name in dtypes.NAMES if name not in dtypes.COMPLEX]
mixed = [("float32", "bfloat16"), ("bfloat16", "float16"), ("float16", "float32"), ("int64", "float32")]
for one, two in [*((name, name) for name in names), *mixed]:
    for width in (1, 7, 33, 64, 127, 300, 9001):
        rng = np.random.default_rng(width)
        a, b = ordinary(one, rng, width), ordinary(two, rng, width)
        a[0] = b[0].astype(a.dtype)
        if dtypes.is_float(one):
            a[1, width // 2] = np.nan
        found, plain = compare_rows(a, b, rtol=0.5), compare_reference(a, b, pairs=3, rtol=0.5)
        close = np.allclose(found.floats[:5], plain.floats[:5], rtol=3e-6, atol=0)
        print(one, two, width, found.integers.tolist(), found.max_abs.tolist(), close)
        assert close, (one, two, width, found.floats, plain.floats)
for name in dtypes.NAMES:
    kind = dtypes.numpy_dtype(name)
    for length in (0, 1, 7, 33, 1000, 5001):
        rng = np.random.default_rng(length)
        raw = rng.integers(0, 256, length * kind.itemsize, dtype=np.uint8)
        array = (raw & 1 if name == "bool" else raw).view(kind)
        digest = take(array.ctypes.data, length, name)[1]
        stats, _, bag = summarize(array.ctypes.data, length, name)
        print(name, length, digest.hex(), bag, *(getattr(stats, field) for field in stats.__struct_fields__[:9]))
"""


@functools.cache
def tuned():
    return fresh(SUMMARIES)


@needs_library
def test_library_results_do_not_depend_on_vector_width():
    assert fresh(SUMMARIES, TAPSCOPE_NATIVE="avx2") == tuned()


@needs_library
@pytest.mark.soak  # also in `make check`: compilation takes half a minute of CPU time
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build with")
@pytest.mark.parametrize("build", ["TS_PORTABLE", "TS_NARROW"])
def test_library_portable_builds_agree_with_the_tuned_build(copied, build):
    """Builds for other compilers and CPUs; sums may differ and are excluded."""
    declared = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
    flags = [flag for flag in declared["FLAGS"] if not flag.startswith("-O")]
    sources = sorted(map(str, (ROOT / declared["NATIVE"]).glob("*.cpp")))
    assert len(sources) > 5
    target = copied / "tapscope" / "kernels" / "native" / f"_tapscope{EXTENSION_SUFFIXES[0]}"
    headers = f"-I{sysconfig.get_path('include')}"
    command = ["g++", *flags, "-O0", f"-D{build}", headers, "-fPIC", "-shared", *sources, "-o", str(target)]
    subprocess.run(command, check=True)
    other = fresh(SUMMARIES, copied)
    assert other[0] == "c++"
    assert other == tuned()
