"""Attention weights meet by the token of their row and of their column; what padding holds is nobody's fault."""

from pathlib import Path

import numpy as np
import pytest
from compare_runs import diff, findings_by_site
from factories import RunFactory

from tapscope.comparator import Verdict
from tapscope.core.observe import RowSpan

LENGTHS, HEADS = (7, 5), 3
SITE = "attn:out[1]"


def weights(noise: float = 0.0, seed: int = 1) -> list[np.ndarray]:
    """[heads, queries, keys] of each request, causal, rows adding up to 1."""
    rng, found = np.random.default_rng(seed), []
    for n in LENGTHS:
        scores = np.exp(np.random.default_rng(n).standard_normal((HEADS, n, n))) * np.tril(np.ones((n, n)))
        found.append(scores / scores.sum(-1, keepdims=True) * (1 + noise * rng.standard_normal((HEADS, n, n))))
    return found


def write(path: Path, parts: list[np.ndarray], *, length: int = 7, left: bool = False, rubbish: float = 0.0) -> None:
    """One step, its batch padded to a length, with rubbish in the rows of padding."""
    grid = np.zeros((len(parts), HEADS, length, length), np.float32)
    grid += np.float32(rubbish) / length
    rows, ids = [], []
    for i, part in enumerate(parts):
        n = part.shape[1]
        at = slice(length - n, length) if left else slice(0, n)
        grid[i, :, at] = 0
        grid[i, :, at, at] = part
        rows.append(RowSpan("ab"[i], 0, n, 0, i * length + at.start))
        ids += range(10 * i, 10 * i + n)
    with RunFactory(path) as run:
        run.step(grid=(len(parts), length), rows=rows, token_ids=ids)
        hidden = np.zeros((len(parts), length, 4), np.float32)
        run.put("attn:in[hidden_states]", hidden)
        run.put(SITE, grid)


@pytest.mark.parametrize("left", [False, True])
def test_attention_weight_rows_exclude_padding(tmp_path: Path, left: bool) -> None:
    write(tmp_path / "b", weights(), left=left)
    write(tmp_path / "t", weights(1e-7), left=left, rubbish=1.0)
    report = diff(tmp_path / "b", tmp_path / "t")
    found = findings_by_site(report).get(SITE)
    assert found is not None
    assert (found.verdict, found.rows.num_compared) == (Verdict.CLOSE, sum(LENGTHS))
    assert report.exit_code == 0


def test_attention_weight_rows_use_the_common_keys(tmp_path: Path) -> None:
    write(tmp_path / "b", weights())
    write(tmp_path / "t", weights(1e-7), length=8)
    report = diff(tmp_path / "b", tmp_path / "t")
    found = findings_by_site(report).get(SITE)
    assert found is not None
    assert (found.verdict, found.rows.num_compared) == (Verdict.CLOSE, sum(LENGTHS))
    assert report.exit_code == 0


def test_attention_weight_rows_wrong_row_is_found_at_its_token(tmp_path: Path) -> None:
    parts = weights()
    parts[1][:, 3] = np.roll(parts[1][:, 3], 1, axis=-1)
    write(tmp_path / "b", weights())
    write(tmp_path / "t", parts, length=8)
    found = findings_by_site(diff(tmp_path / "b", tmp_path / "t")).get(SITE)
    assert found is not None
    assert found.verdict is Verdict.DIFFERS
    assert found.worst is not None
    assert (found.worst.request, found.worst.position) == ("b", 3)


def test_attention_weight_rows_with_different_key_positions_do_not_match(tmp_path: Path) -> None:
    write(tmp_path / "b", weights())
    write(tmp_path / "t", weights(), left=True)
    report = diff(tmp_path / "b", tmp_path / "t")
    found = findings_by_site(report).get(SITE)
    assert found is None
    assert any("keys at other positions" in note for note in report.coverage.warnings)
    assert report.exit_code == 0


def test_attention_weight_rows_gradients_exclude_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SITE", f"{SITE}.grad")
    write(tmp_path / "b", weights())
    write(tmp_path / "t", weights(), rubbish=1.0)
    report = diff(tmp_path / "b", tmp_path / "t")
    found = findings_by_site(report).get(SITE)
    assert (report.exit_code, found) == (0, None)
    assert any("which includes padding" in warning for warning in report.coverage.warnings)
