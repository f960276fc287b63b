"""Runs for tests of the screen and of `ls`, `show` and `info`, with fixed values."""

from pathlib import Path

import ml_dtypes
import numpy as np
from factories import RunFactory

from tapscope.core.observe import RowSpan

PREFILL = [RowSpan("0", 0, 5, 0, 0), RowSpan("1", 0, 2, 0, 5)]


def toy_run(path: Path) -> Path:
    """Write a run of four layers, tp=2, four steps.

    One site is non-finite in step 1, one is always zero, and layers have no values.
    """
    with RunFactory(path, mesh={"tp": 2}, model="toy-llama", dtype="bfloat16", created="2026-01-02T03:04:05Z") as run:
        for step in range(4):
            decode = [RowSpan("0", 4 + step, 1, 0, 0), RowSpan("1", 1 + step, 1, 0, 1)]
            rows = PREFILL if step == 0 else decode
            num = sum(row.count for row in rows)
            phase = "prefill" if step == 0 else "decode"
            run.step(phase=phase, grid=(num,), rows=rows, token_ids=range(num))
            for writer in run.writers.values():
                writer.line({"type": "metric", "step": step, "name": "latency_s", "value": 0.25 * (step + 1)})
            _step(run, step, num)
    return path


def _step(run: RunFactory, step: int, num: int) -> None:
    run.put("model.embed_tokens:out", {0: wave(num, 64, 0), 1: wave(num, 64, 0)}, dims="t h")
    for layer in range(4):
        for i, port in enumerate(("q_proj:out", "o_proj:in[input]", "o_proj:out")):
            values = wave(num, 64, layer + i)
            if (layer, step, port) == (2, 1, "o_proj:out"):
                values[1, 7], values[1, 9] = np.nan, np.inf
            run.put(f"model.layers.{layer}.self_attn.{port}", {0: values, 1: wave(num, 64, i)}, dims="t h[tp]")
        for i, name in enumerate(("gate_proj", "down_proj")):
            run.put(f"model.layers.{layer}.mlp.{name}:out", {0: wave(num, 64, i), 1: wave(num, 64, layer)})
        run.put(f"model.layers.{layer}:out", {0: wave(num, 64, layer).astype(np.float32)}, keep="stats")
    run.put("model.norm:out", {0: wave(num, 64, 9)}, dims="t h")
    run.put("lm_head:out", {0: np.zeros((num, 128), np.float32)}, dims="t v")


def wave(rows: int, columns: int, phase: int) -> np.ndarray:
    """Return deterministic bf16 values; a different pattern for each ``phase``."""
    at = np.arange(rows * columns, dtype=np.float64).reshape(rows, columns)
    return (np.sin(at * 0.7 + phase) * (1 + at % 11) / 4).astype(ml_dtypes.bfloat16)
