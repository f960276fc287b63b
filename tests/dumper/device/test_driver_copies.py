"""Copies started through the driver without torch: the part testable on a CPU; tests/gpu has the rest."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tapscope.dumper.device import driver_copies
from tapscope.dumper.device.driver_copies import packed_copies, start_copies
from tapscope.dumper.pipeline.send_queue import SendQueue
from tapscope.kernels.native import library
from tapscope.kernels.triton.launch import DriverLaunch

DEVICE = torch.device("cuda", 1)


def test_driver_gets_the_copies_the_kernel_before_them_and_those_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    functions = SimpleNamespace(copy_async=lambda *args: not calls.append(args))
    monkeypatch.setattr(library, "functions", lambda: functions)
    monkeypatch.setattr(driver_copies._cuda, "_cuda_getCurrentRawStream", lambda index: 40 + index, raising=False)
    event: Any = SimpleNamespace(cuda_event=7)
    copies = packed_copies([(64, 32, 16), (96, 48, 8)])
    assert memoryview(copies).cast("q").tolist() == [64, 32, 16, 96, 48, 8]
    how = DriverLaunch(5, 256, 128, 64, overlaps=False)
    assert start_copies(DEVICE, event, copies)
    assert start_copies(DEVICE, event, copies, stream=3, merge=(how, 2, 4096))
    side: Any = SimpleNamespace(cuda_stream=9)
    more = packed_copies([(96, 64, 16)])
    assert start_copies(DEVICE, event, copies, aside=(side, more))
    assert calls == [
        (1, 41, 7, copies, None, None),
        (1, 3, 7, copies, (5, 2, 128, 64, False, 4096), None),
        (1, 41, 7, copies, None, (9, more)),
    ]


def test_driver_is_not_asked_with_an_event_that_does_not_exist_yet() -> None:
    never_recorded: Any = SimpleNamespace(cuda_event=0)
    assert not start_copies(DEVICE, never_recorded, b"", stream=0)


def test_queue_reserves_all_or_nothing() -> None:
    queue = SendQueue(1000, None, None)
    assert queue.reserve_all([600, 600]) is None
    assert queue.in_flight_bytes == 0
    slots = queue.reserve_all([600, 300])
    assert slots is not None
    assert [slot.nbytes for slot in slots] == [600, 300]
    assert queue.in_flight_bytes == 900
