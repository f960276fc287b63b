"""Profiler: torch's profiler over the steps of one rank."""

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tapscope.core.errors import OutputError


class Profiler:
    """Recording of every operator, and on a GPU every kernel, between :meth:`start` and :meth:`stop`."""

    def __init__(self, device: torch.device) -> None:
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._running: Any = None

    @property
    def is_running(self) -> bool:
        """Whether steps are being recorded."""
        return self._running is not None

    def start(self) -> None:
        """Start recording operators of the calling thread, which must be the thread that runs the steps."""
        self._running = profile(activities=self._activities, record_shapes=True)
        self._running.start()

    def stop(self, file: Path) -> None:
        """Write the recording in Chrome's trace format, which ui.perfetto.dev opens; raises OutputError."""
        running, self._running = self._running, None
        running.stop()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(file))
        except (OSError, RuntimeError) as error:
            raise OutputError(f"{file} cannot be written: {error}") from None
