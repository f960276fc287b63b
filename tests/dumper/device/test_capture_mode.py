"""The capture mode of a thread, with a fake CUDA driver."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from tapscope.dumper.device.capture_mode import RELAXED, THREAD_LOCAL, exchange_capture_mode
from tapscope.dumper.device.cuda_graphs import relaxed


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of modes that the thread sets, starting with mode 0; the last one is the current mode."""
    modes = [0]

    def exchange(pointer: Any) -> int:
        value = pointer._obj
        modes.append(value.value)
        value.value = modes[-2]
        return 0

    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    return modes


def test_relaxed_restores_the_mode_also_after_an_exception(modes: list[int]) -> None:
    assert exchange_capture_mode(THREAD_LOCAL) == 0
    with pytest.raises(ZeroDivisionError), relaxed():
        assert modes[-1] == RELAXED
        1 / 0  # noqa: B018
    assert modes == [0, THREAD_LOCAL, RELAXED, THREAD_LOCAL]


def test_without_a_driver_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert exchange_capture_mode(RELAXED) is None
    with relaxed():
        pass
