"""Integers that modules are given are no choices: positions that differ set no rows aside, and hide no bug."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from factories import RunFactory
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from tapscope import Dumper
from tapscope.comparator import Report, Verdict, compare
from tapscope.core.errors import NothingInCommonError
from tapscope.core.observe import RowSpan

LENGTHS = (11, 6, 17, 10)
ROWS = 12
BUG = "model.layers.2.mlp.down_proj"


def qwen3() -> nn.Module:
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 128, "head_dim": 16}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
            elif "norm" in name:
                parameter.normal_(1, 0.2)
    return model


def batch(columns: int, *, left: bool) -> tuple[Tensor, Tensor]:
    """(input_ids, attention_mask) [requests, columns]."""
    generator = torch.Generator().manual_seed(7)
    ids, mask = torch.zeros(len(LENGTHS), columns, dtype=torch.long), torch.zeros(len(LENGTHS), columns)
    for row, length in enumerate(LENGTHS):
        at = slice(columns - length, columns) if left else slice(0, length)
        ids[row, at] = torch.randint(1, 128, (length,), generator=generator)
        mask[row, at] = 1
    return ids, mask.long()


def capture(model: nn.Module, path: Path, columns: int, *, left: bool) -> Path:
    ids, mask = batch(columns, left=left)
    with torch.no_grad(), Dumper(model, path, keep="full", force=True):
        model(input_ids=ids, attention_mask=mask)
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    model = qwen3()
    return model, capture(model, tmp_path_factory.mktemp("base") / "run", max(LENGTHS), left=False)


def scaled(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_submodule(BUG).weight *= -6.0
    return other


def dense(path: Path, *, offset: int = 0, noise: float = 0.0, harm: float = 1.0) -> Path:
    """A layer that is given positions, behind a residual whose values rise from column to column: in every row that of
    the next position is larger."""
    rng = np.random.default_rng(1)
    hidden = np.sort(rng.standard_normal((ROWS, 32)), axis=1).astype(np.float32) * np.float32(1.0 + noise)
    made = (hidden @ rng.standard_normal((32, 32)) / 32**0.5).astype(np.float32)
    made[4:] *= np.float32(harm)
    positions = np.arange(ROWS) + offset * (np.arange(ROWS) >= 4)
    with RunFactory(path) as run:
        run.step(grid=(ROWS,), rows=[RowSpan("a", 0, ROWS, 0, 0)], token_ids=range(ROWS))
        run.put("layers.0:out", hidden, dims="t h")
        run.put("layers.1:in[position_ids]", positions, dims="t")
        run.put("layers.1:in[hidden_states]", hidden, dims="t h")
        run.site("layers.1.down_proj:out", params={"weight": (32, 32)})
        run.put("layers.1.down_proj:in[input]", hidden, dims="t h")
        run.put("layers.1.down_proj:out", made, dims="t h")
        run.put("layers.1:out", hidden + made, dims="t h")
    return path


def test_position_ids_that_differ_keep_their_rows(tmp_path: Path) -> None:
    baseline = dense(tmp_path / "b")
    report = compare(baseline, dense(tmp_path / "t", offset=1, noise=1e-7, harm=1.5))
    found = {f.site: f for f in report.findings}
    assert found["layers.1:in[position_ids]"].verdict is Verdict.DIFFERS
    assert not found["layers.1:in[position_ids]"].notes
    assert found["layers.1.down_proj:out"].rows.num_compared == ROWS
    assert "layers.1.down_proj" in {d.module for d in report.divergences}


def left_out(report: Report) -> list[str]:
    return [note for finding in report.findings for note in finding.notes if "left out" in note]


def test_position_ids_are_not_expert_choices(base: tuple[nn.Module, Path], tmp_path: Path) -> None:
    model, baseline = base
    report = compare(baseline, capture(model, tmp_path / "t", 24, left=True))
    positions = [f for f in report.findings if "position_ids" in f.site]
    assert positions
    assert {f.verdict for f in positions} == {Verdict.DIFFERS}
    assert not left_out(report)
    assert report.exit_code == 1
    assert str(report).startswith("what      inputs differ, results agree: ")
    compared = {f.rows.num_compared for f in report.findings if "mlp" in f.site}
    assert compared == {report.coverage.num_rows_aligned}


def test_position_ids_that_differ_do_not_hide_a_bug(base: tuple[nn.Module, Path], tmp_path: Path) -> None:
    model, baseline = base
    report = compare(baseline, capture(scaled(model), tmp_path / "t", 24, left=True))
    assert BUG in {d.module for d in report.divergences}
    assert not left_out(report)
    assert not [f.site for f in report.findings if "position_ids" in f.site and f.notes]
    assert "results agree" not in str(report)


def test_position_ids_inverted_mask_is_named(tmp_path: Path) -> None:
    mask = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]])
    for name, given in (("b", mask), ("t", 1 - mask)):
        with RunFactory(tmp_path / name) as run:
            run.step()
            run.put(":in[input_ids]", np.arange(12).reshape(2, 6) + 3)
            run.put(":in[attention_mask]", given)
            run.put("layers.0:out", np.ones((2, 6, 8), np.float32))
    with pytest.raises(NothingInCommonError, match=r":in\[attention_mask\] marks different tokens in each run"):
        compare(tmp_path / "b", tmp_path / "t")
