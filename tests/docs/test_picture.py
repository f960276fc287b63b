"""The picture in the README is rendered by the real report from real runs, never by hand."""

import io
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from factories import RunFactory
from rich.console import Console
from rich.text import Text

from tapscope.comparator import compare
from tapscope.comparator.report.table import render
from tapscope.core.observe import RowSpan
from tapscope.sources import open_run

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "diff.svg"
PROMPT = [RowSpan("chat-1", 0, 5, 0, 0), RowSpan("chat-2", 0, 3, 0, 5)]
CULPRIT = "model.layers.2.mlp.down_proj"


def _run(path: Path, *, engine: bool) -> None:
    """Write a run with powers of two, so that every number in the picture is the same on any machine."""
    whole = np.exp2(np.arange(8 * 16) % 5).reshape(8, 16).astype(np.float32)
    mesh, framework, dtype = ({"tp": 2}, "tapscope", "bfloat16") if engine else ({}, "transformers", "float32")
    with RunFactory(path, mesh=mesh, framework=framework, dtype=dtype, model="Llama-tiny") as run:
        run.step(grid=(8,), rows=PROMPT, token_ids=range(8))
        scale = 1.0
        for site, dims in _sites():
            if engine and site == f"{CULPRIT}:out":
                scale = 1.25
            value = whole * scale
            if not engine:
                run.put(site, value, dims="t h")
                continue
            halves = np.split(value.astype(ml_dtypes.bfloat16), 2, axis=1)
            shards = dict(enumerate(halves if "[tp]" in dims else [value.astype(ml_dtypes.bfloat16)] * 2))
            run.put(site, shards, dims=dims)


def _sites() -> list[tuple[str, str]]:
    whole, split = "t h # tp:replicated", "t h[tp]"
    sites = [("model.embed_tokens:out", whole)]
    for layer in (f"model.layers.{i}" for i in range(4)):
        sites += [(f"{layer}.input_layernorm:out", whole), (f"{layer}.self_attn.o_proj:in[input]", split)]
        sites += [(f"{layer}.self_attn.o_proj:out", whole), (f"{layer}.mlp.down_proj:in[input]", split)]
        sites += [(f"{layer}.mlp.down_proj:out", whole), (f"{layer}:out", whole)]
    return [*sites, ("model.norm:out", whole), ("lm_head:out", split)]


def test_readme_picture_is_the_output_of_diff(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    _run(tmp_path / "reference", engine=False)
    _run(tmp_path / "target", engine=True)
    report = compare(open_run(tmp_path / "reference"), open_run(tmp_path / "target"))
    console = Console(record=True, width=118, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print("$ tapscope diff reference target", style="bold")
    for line in render(report, width=118):
        console.print(Text(line.plain.replace(f"{tmp_path}/", ""), style=line.style))
    drawn = console.export_svg(title="tapscope diff", unique_id="tapscope-diff")
    if request.config.getoption("update_snapshots"):
        PICTURE.write_text(drawn)
    assert report.first_divergence is not None
    assert CULPRIT in str(report.first_divergence)
    assert drawn == PICTURE.read_text(), "the report looks different now: make snapshots, and look at docs/diff.svg"
