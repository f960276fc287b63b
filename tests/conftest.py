"""Shared test configuration: tests use the installed package, never the directories at the repository root.

Tests marked ``gpu`` are skipped and counted without a CUDA device. Other tests never see a GPU, so that
``device="auto"`` means the same on every machine.
"""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from compile_tests import compile_all
from forkserver_pool import RANKS, WarmRecorder, share_servers, worker_command
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from soak_cases import EXAMPLES

import tapscope

_ROOT = str(Path(__file__).resolve().parent.parent)
# `python -m pytest` puts the root on sys.path, where engine/, dumper/ and kernels/ would shadow other packages.
sys.path[:] = [entry for entry in sys.path if entry not in ("", _ROOT)]


gc.disable()  # until collection ends: imported objects stay alive, so collecting garbage would find none
for _name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):  # terminal settings must not affect the tests
    os.environ.pop(_name, None)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several test files run in parallel, and each starts processes
# Without bytecode, every process started by a test would spend half a second compiling tapscope.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background shell job; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not Path("/proc/driver/nvidia").exists():  # Triton reads it on import, and when a kernel is defined
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """Set the Hypothesis profile: equal examples in every run and no deadline; `--hypothesis-seed N` draws others."""
    settings.register_profile(
        "tests",
        max_examples=50,
        deadline=None,
        derandomize=config.getoption("--hypothesis-seed") is None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("tests")
    # Hypothesis also draws constants from our loaded modules, which depend on the files that a worker ran before.
    providers._get_local_constants = lambda: providers._local_constants


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile all files and share the fork servers before pytest-xdist starts its workers."""
    if session.config.getoption("numprocesses", None):
        compile_all(session.config, (Path(__file__).parent, Path(tapscope.__file__).parent))
        share_servers()
        session.config.option.tx = [f"popen//python={worker_command()}" for _ in session.config.option.tx]


@pytest.fixture(autouse=True, scope="session")
def _warm_ranks() -> Iterator[None]:
    """Start ranks of engines in the test process with torch already imported; other processes spawn their ranks."""
    from tapscope.engine.distributed import worker_processes

    if Path("/proc/driver/nvidia").exists():  # the visible GPUs are fixed when a rank's own process starts
        yield
        return
    with patch.object(worker_processes, "SPAWN_CONTEXT", RANKS):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Enable garbage collection after test collection, every 10,000 objects; every 700 takes 7 % of the CPU time."""
    try:
        return (yield)
    finally:
        gc.set_threshold(10_000)
        gc.enable()


def pytest_collection_finish() -> None:
    """Freeze imported and collected objects, so that no garbage collection visits them again."""
    # Some collected file has interpreted kernels; kernels for a GPU are compiled by Triton itself.
    if "triton.runtime.interpreter" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        import quick_interpreter

        quick_interpreter.install()
    gc.collect()
    gc.freeze()


def pytest_make_parametrize_id(val: object) -> str | None:
    """Shorten long parameter ids: every worker sends all ids and failures print them, up to half a megabyte each."""
    if isinstance(val, (str, bytes)) and len(val) > 1000:
        return f"{val[:40]!r} to {len(val)}"
    return None


_NO_GPU = "needs a CUDA device"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Multiply the examples of every property by EXAMPLES; skip `gpu` tests without a CUDA device.

    `make test` runs the first quarter of the examples, or 10: the same ones in every run.
    """
    for test in {getattr(item, "function", None) for item in items}:
        if own := getattr(test, "_hypothesis_internal_use_settings", None):
            first = max(min(own.max_examples, 10), own.max_examples // 4)
            count = first if EXAMPLES == 1 else own.max_examples * EXAMPLES
            test._hypothesis_internal_use_settings = settings(own, max_examples=count)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason=_NO_GPU))


@pytest.fixture(autouse=True, scope="session")
def _warm_recorders() -> Iterator[None]:
    """Start recorders of the test process with all imports already done; other processes start their own."""
    from tapscope.dumper.pipeline import recorder_process

    starter = SimpleNamespace(Popen=WarmRecorder, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
    with patch.object(recorder_process, "subprocess", starter):
        yield


@pytest.fixture(autouse=True, scope="session")
def _small_rings() -> None:
    import small_rings  # noqa: F401


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Hide the GPUs from every test that is not marked `gpu`, and from its fixtures."""
    if item.get_closest_marker("gpu") or not Path("/proc/driver/nvidia").exists():
        return (yield)
    with _no_gpu():
        return (yield)


@contextmanager
def _no_gpu() -> Iterator[None]:
    """Hide the GPUs from this process, which may already use CUDA, and from its child processes."""
    import torch

    answers = {"is_available": lambda: False, "device_count": lambda: 0}
    with patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""), patch.multiple(torch.cuda, **answers):
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report the number of skipped `gpu` tests."""
    skipped = sum(_NO_GPU in str(report.longrepr) for report in terminalreporter.stats.get("skipped", ()))
    if skipped:
        terminalreporter.write_line(f"{skipped} gpu tests skipped: no CUDA device here")
