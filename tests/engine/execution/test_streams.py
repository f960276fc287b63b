"""The current CUDA stream, imitated on a CPU."""

from typing import Any

import pytest
import torch

from tapscope.engine.execution import streams


def test_current_stream_makes_one_object_for_each_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    current, made = {0: 40, 1: 40}, []

    def make(index: int) -> Any:
        made.append((index, current[index]))
        return made[-1]

    monkeypatch.setattr(streams, "_known", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", current.__getitem__, raising=False)
    monkeypatch.setattr(streams.cuda, "current_stream", make)
    assert [streams.current_stream(index) for index in (0, 1, 0)] == [(0, 40), (1, 40), (0, 40)]
    current[0] = 48
    assert [streams.current_stream(0) for _ in range(2)] == [(0, 48)] * 2
    assert made == [(0, 40), (1, 40), (0, 48)]
