"""Models of transformers that hold their values in ways of their own, against our engine, over several decode steps."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
from checkpoints import make_checkpoint
from compare_runs import diff
from factories import RunFactory
from moe_checkpoints import make_moe
from safetensors.torch import load_file, save_file
from torch import Tensor

from tapscope.cli import main
from tapscope.comparator import Report, Verdict
from tapscope.core.observe import RowSpan

PROMPTS = ("def main(): return", "import os", "for i in range(10):", "x")
BASES = {"full_attention": 1.0, "sliding_attention": 2.0}


def dump(checkpoint: Path, out: Path, *flags: str) -> Path:
    assert main(["dump", str(checkpoint), "-o", str(out), "-q", *flags]) == 0
    return out


def compared(baseline: Path, target: Path) -> Report:
    return diff(baseline, target)


def damaged(checkpoint: Path, out: Path, name: str, change: Callable[[Tensor], Tensor]) -> Path:
    copytree(checkpoint, out)
    weights = load_file(out / "model.safetensors")
    weights[name] = change(weights[name]).contiguous()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


CASES: Mapping[str, tuple[Callable[[Path], Path], str]] = {
    # As many heads as requests: [batch, heads, s, d] must not be read as [heads, batch, s, d].
    "gemma3": (lambda path: make_checkpoint(path, "gemma3"), "model.layers.1.self_attn.q_norm"),
    "deepseek_v3": (lambda path: make_moe(path, "deepseek_v3"), "model.layers.1.self_attn.kv_b_proj"),
}


@pytest.mark.parametrize("family", CASES)
def test_families_transformers_matches_the_engine_at_every_site_and_names_a_bug(tmp_path: Path, family: str) -> None:
    make, culprit = CASES[family]
    checkpoint = make(tmp_path / "original")
    flags = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    reference = dump(checkpoint, tmp_path / "reference", "--backend", "hf", "--max-new-tokens", "3", *flags)
    report = compared(reference, dump(checkpoint, tmp_path / "served", "--tokens-from", str(reference)))
    assert report.exit_code == 0
    found = {f.site: f for f in report.findings}
    special = found[f"{culprit}:out"]
    assert (special.verdict.is_bad, special.rows.num_compared) == (False, report.coverage.num_rows_aligned)
    wrong = damaged(checkpoint, tmp_path / "wrong", f"{culprit}.weight", lambda w: w * 1.3)
    report = compared(reference, dump(wrong, tmp_path / "bad", "--tokens-from", str(reference)))
    assert report.first_divergence is not None
    assert report.first_divergence.module == culprit


def rotary(path: Path, order: Sequence[str], wrong: float = 0.0) -> Path:
    with RunFactory(path) as run:
        for _ in range(2):
            run.step()
            for kind in order:
                run.put_value("rotary_emb:in[layer_type]", kind)
                run.put("rotary_emb:out[0]", np.full((4, 6), BASES[kind] + wrong, np.float32))
    return path


def test_families_calls_are_matched_by_a_distinguishing_plain_argument(tmp_path: Path) -> None:
    one, two = list(BASES), list(BASES)[::-1]
    baseline = rotary(tmp_path / "b", one)
    assert compared(baseline, rotary(tmp_path / "t", two)).exit_code == 0
    assert compared(baseline, rotary(tmp_path / "bad", two, wrong=0.5)).exit_code == 1
    assert compared(baseline, rotary(tmp_path / "twice", one[:1] * 2)).exit_code == 1  # another set of values


LENGTHS = (5, 1, 2)
"""Tokens of each step, of two requests."""


def latents(path: Path, *, cached: bool, wrong: int = -1, room: int = 0, padding: float | None = None) -> Path:
    """Two requests in steps of LENGTHS; with ``cached`` every step holds all positions, with ``room`` in a table.
    ``padding``: the second request lacks its first token, and that is what lies there."""
    values = np.random.default_rng(0).standard_normal((2, sum(LENGTHS), 6)).astype(np.float32)
    with RunFactory(path) as run:
        run.site("kv_b_proj:out", params={"weight": (6, 4)})
        first = 0
        for step, count in enumerate(LENGTHS):
            last = first + count
            rows = [RowSpan(name, first, count, 0, i * count) for i, name in enumerate("ab")]
            if padding is not None:
                short = first == 0
                rows[1] = RowSpan("b", max(first - 1, 0), count - short, 0, count + short)
                values[1, 0] = padding
            grid = (2, count) if cached else (2 * count,)
            run.step(grid=grid, rows=rows, token_ids=[7] * sum(r.count for r in rows))
            held = values[:, :last] if cached else values[:, first:last].reshape(2 * count, 6)
            held = held + np.float32(step == wrong)
            if room:
                held = np.concatenate([held, np.zeros((2, room - last, 6), np.float32)], 1)
            run.put("kv_b_proj:out", held[:, None] if cached else held)
            run.put("norm:out", values[:, first:last].reshape((2, count, 6) if cached else (2 * count, 6)))
            first = last
    return path


def test_families_last_rows_of_a_growing_cache_belong_to_the_step(tmp_path: Path) -> None:
    engine = latents(tmp_path / "engine", cached=False)
    report = compared(latents(tmp_path / "cached", cached=True), engine)
    found = next(f for f in report.findings if f.site == "kv_b_proj:out")
    assert (report.exit_code, found.verdict, found.rows.num_compared) == (0, Verdict.SAME, 2 * sum(LENGTHS))
    assert any("22 rows of earlier steps" in note for note in found.notes)
    report = compared(latents(tmp_path / "wrong", cached=True, wrong=2), engine)
    assert report.first_divergence is not None
    assert (report.first_divergence.module, report.first_divergence.step) == ("kv_b_proj", 2)
    # A table of fixed size does not hold the step's rows last: nobody guesses where they are.
    assert compared(latents(tmp_path / "table", cached=True, room=9), engine).exit_code == 1


def test_families_padding_of_a_growing_cache_is_ignored(tmp_path: Path) -> None:
    baseline = latents(tmp_path / "b", cached=True, padding=0.0)
    assert compared(baseline, latents(tmp_path / "t", cached=True, padding=5.0)).exit_code == 0
    report = compared(baseline, latents(tmp_path / "wrong", cached=True, padding=5.0, wrong=1))
    assert report.first_divergence is not None
    assert (report.first_divergence.module, report.first_divergence.step) == ("kv_b_proj", 1)


def test_families_growing_caches_of_different_chunks_are_compared_by_token(tmp_path: Path) -> None:
    """Both sides hold all positions of one unpadded request, in steps of different lengths."""
    values = np.random.default_rng(0).standard_normal((1, 12, 6)).astype(np.float32)
    for name, lengths, error in (("b", (4, 4, 4), 0.0), ("t", (8, 4), 0.5)):
        with RunFactory(tmp_path / name) as run:
            run.site("kv_b_proj:out", params={"weight": (6, 4)})
            first = 0
            for count in lengths:
                last = first + count
                run.step(grid=(1, count), rows=[RowSpan("a", first, count, 0, 0)], token_ids=[7] * count)
                run.put("kv_b_proj:out", (values[:, :last] + np.float32(error))[:, None])
                run.put("norm:out", values[:, first:last] + np.float32(error))
                first = last
    report = compared(tmp_path / "b", tmp_path / "t")
    assert report.first_divergence is not None
    assert (report.first_divergence.module, report.first_divergence.step) == ("kv_b_proj", 0)
