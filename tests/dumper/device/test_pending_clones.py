"""Clones with pending copies: reuse of their memory, and no references that keep them alive."""

from typing import Any

import torch

from tapscope.dumper.device.pending_clones import PendingClones


class Stream:
    """A fake CUDA stream that records the events it waits for."""

    def __init__(self, number: int) -> None:
        self.cuda_stream = number
        self.waits: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waits.append(event)


def test_oldest_clone_of_the_size_is_overwritten() -> None:
    clones, stream = PendingClones(), Stream(0)
    kept = [torch.full((4, 2), value) for value in (1.0, 2.0)]
    for number, clone in enumerate(kept):
        clones.add(stream, clone, f"copied {number}")  # type: ignore[arg-type]
    value = torch.arange(16, dtype=torch.float16).view(2, 8).t()  # the same number of bytes, not contiguous
    again = clones.overwrite(stream, value)  # type: ignore[arg-type]
    assert again is not None
    assert stream.waits == ["copied 0"]
    assert again.data_ptr() == kept[0].data_ptr()
    assert again.is_contiguous()
    assert torch.equal(again, value)
    assert torch.equal(kept[1], torch.full((4, 2), 2.0))


def test_other_sizes_streams_and_devices_are_left_alone() -> None:
    """The default streams of all devices have the same handle."""
    clones, value = PendingClones(), torch.zeros(8)
    kept = [torch.zeros(4), torch.zeros(8), torch.zeros(8, device="meta")]
    for clone, number in zip(kept, (0, 1, 0), strict=True):
        clones.add(Stream(number), clone, "copied")  # type: ignore[arg-type]
    assert clones.overwrite(Stream(0), value) is None  # type: ignore[arg-type]


def test_clones_that_have_arrived_are_forgotten() -> None:
    clones, stream = PendingClones(), Stream(0)
    for size in range(1, 200):
        clones.add(stream, torch.zeros(size), "copied")  # type: ignore[arg-type]
    assert len(clones) <= 2
    assert clones.overwrite(stream, torch.zeros(199)) is None  # type: ignore[arg-type]
