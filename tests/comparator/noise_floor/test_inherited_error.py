"""Inherited errors: inputs that were not recorded directly, and the effect of logit errors on a loss gradient."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory

from tapscope.comparator.noise_floor.graph import Graph
from tapscope.comparator.noise_floor.node import Node
from tapscope.core.observe import RowSpan


def nodes(*sites: str) -> list[Node]:
    return [Node(*site.rpartition(":")[::2], numeric=True) for site in sites]


def test_inherited_error_of_a_layer_reaches_modules_after_the_layer_list() -> None:
    sites = ("model:in[x]", "model.embed:out", "model.layers.0:out", "model.layers.1:out", "model.norm:in[x]")
    found = Graph(nodes(*sites)).inputs(4)
    assert (found.nodes, found.source) == ((0, 1, 2, 3), "enclosing_module")


def test_inherited_error_gradient_seen_earlier_is_from_the_enclosing_module() -> None:
    sites = ("attn:in[x]", "attn.norm:in[x]", "attn:out.grad", "attn.core:in[q].grad", "attn.norm:in[x].grad")
    found = Graph(nodes(*sites, "attn.norm:out.grad")).inputs(4)
    assert found.source == "enclosing_module"
    assert 3 in found.nodes


def test_inherited_error_equal_integers_come_from_the_earlier_site() -> None:
    chosen = Node("gate", "out[1]", numeric=False, identities=("a", "b"))
    given = Node("experts", "in[index]", numeric=False, identities=("a", "b"))
    other = Node("experts", "in[mask]", numeric=False, identities=("a", "c"))
    graph = Graph([chosen, given, other])
    assert (graph.inputs(1).nodes, graph.inputs(1).source) == ((0,), "aliased")
    assert graph.inputs(2).nodes == ()


ROWS, VOCAB, WIDTH = 40, 64, 48
_RNG = np.random.default_rng(4)
LABELS = _RNG.integers(0, VOCAB, ROWS)
HEAD = (_RNG.standard_normal((VOCAB, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32)
HIDDEN = (10 * _RNG.standard_normal((ROWS, WIDTH)) + 6 * HEAD[LABELS]).astype(np.float32)


def write(path: Path, dtype: str, scale: float = 1.0) -> None:
    """Write logits and their cross-entropy gradient; logits are large, and some labels nearly certain."""
    narrow = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    hidden, head = HIDDEN.astype(narrow), HEAD.astype(narrow)
    logits = (hidden.astype(np.float32) @ head.astype(np.float32).T * 3).astype(narrow)
    exact = logits.astype(np.float64)
    shares = np.exp(exact - exact.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    shares[np.arange(ROWS), LABELS] -= 1
    with RunFactory(path, dtype=dtype) as run:
        run.step(grid=(ROWS,), rows=[RowSpan("a", 0, ROWS, 0, 0)], token_ids=range(ROWS))
        run.site("lm_head:out", params={"weight": HEAD.shape})
        run.put("lm_head:in[input]", hidden)
        run.put("lm_head:out", logits)
        run.put("lm_head:out.grad", (shares * scale / ROWS).astype(narrow))


def test_inherited_error_loss_gradient_relative_equals_logit_absolute(tmp_path: Path) -> None:
    write(tmp_path / "b", "float32")
    write(tmp_path / "t", "bfloat16")
    report = diff(tmp_path / "b", tmp_path / "t")
    logits, gradient = (next(f for f in report.findings if f.site == s) for s in ("lm_head:out", "lm_head:out.grad"))
    assert gradient.steps[0].error > 4 * logits.steps[0].error  # far above the rounding of the gradient's dtype
    assert report.exit_code == 0


def test_inherited_error_loss_gradient_floor_is_lower_without_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "b", "float32")
    write(tmp_path / "t", "bfloat16")
    floors = []
    for _ in range(2):
        floors.append(
            next(f for f in diff(tmp_path / "b", tmp_path / "t").findings if f.site == "lm_head:out.grad").row_floor
        )
        monkeypatch.setattr("tapscope.comparator.noise_floor.loss_gradient.values_of_losses", lambda graph: {})
    assert floors[0] > 2 * floors[1]


def test_inherited_error_scaled_loss_is_found(tmp_path: Path) -> None:
    write(tmp_path / "b", "float32")
    write(tmp_path / "t", "bfloat16", scale=0.5)
    report = diff(tmp_path / "b", tmp_path / "t")
    assert report.first_divergence is not None
    assert report.first_divergence.site == "lm_head:out.grad"
