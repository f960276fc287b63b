"""Runs whose steps tell no rows, though the arguments of the model were recorded: ids, positions, lengths."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from comparator_toy import prompts
from compare_runs import diff
from factories import RunFactory

from tapscope.comparator import Verdict
from tapscope.core.observe import RowSpan
from tapscope.run_format.run import Run
from tapscope.sources import open_run

TEXTS = prompts((6, 4, 9))
WIDTH = 5


def values(name: str, positions: Sequence[int]) -> np.ndarray:
    rows = [np.sin(np.arange(WIDTH) + p + sum(TEXTS[name][: p + 1])) for p in positions]
    return np.asarray(rows, np.float32)


def told(path: Path) -> Run:
    """One prefill of everything, whose rows are told."""
    with RunFactory(path) as run:
        rows, ids = [], []
        for name, text in TEXTS.items():
            rows.append(RowSpan(name, 0, len(text), 0, len(ids)))
            ids += text
        run.step(grid=(len(ids),), rows=rows, token_ids=ids)
        run.put(
            "norm:out", np.concatenate([values(name, range(len(text))) for name, text in TEXTS.items()]), dims="t h"
        )
    return open_run(path)


def served(path: Path, *, names: bool, lengths: bool = True, bad: bool = False) -> Run:
    """Prefill of 3 tokens each, then decode, as a server's dumper records it: requests in another order each step."""
    with RunFactory(path) as run:
        order = list(TEXTS)
        for step in range(8):
            first = 0 if step == 0 else step + 2
            here = [n for n in (order if step % 2 else order[::-1]) if len(TEXTS[n]) > first]
            if not here:
                break
            last = {n: min(len(TEXTS[n]), first + (3 if step == 0 else 1)) for n in here}
            run.step(phase="prefill" if step == 0 else "decode")
            positions = {n: list(range(first, last[n])) for n in here}
            run.put(":in[input_ids]", np.array([TEXTS[n][p] for n in here for p in positions[n]]))
            run.put(":in[positions]", np.array([p for n in here for p in positions[n]]))
            if lengths:
                run.put(":in[seq_lens]", np.array([last[n] for n in here], np.int32))
            if names:
                run.put_value(":in[rids]", [f"rid-{n}" for n in here])
            tensor = np.concatenate([values(n, positions[n]) for n in here])
            if bad and step == 4:
                tensor[here.index("2")] += 0.5
            run.put("norm:out", tensor)
    return open_run(path)


@pytest.mark.parametrize("lengths", [True, False])
def test_token_grid_inference_decode_steps_match_one_prefill(tmp_path: Path, lengths: bool) -> None:
    report = diff(told(tmp_path / "b"), served(tmp_path / "t", names=True, lengths=lengths, bad=True))
    norm = next(f for f in report.findings if f.site == "norm:out")
    assert "rows of t are inferred from the recorded arguments of its model" in report.coverage.warnings
    assert norm.worst is not None
    assert (norm.rows.num_compared, norm.worst.request, norm.worst.position) == (19, "2", 6)
    assert (norm.verdict, report.coverage.partial) == (Verdict.DIFFERS, ())


def test_token_grid_inference_ambiguous_rows_are_rejected(tmp_path: Path) -> None:
    report = diff(told(tmp_path / "b"), served(tmp_path / "t", names=False))
    said = "rows of t may belong to several requests, none of them named: record rids as well"
    assert said in report.coverage.partial[0]
    assert report.exit_code == 1


def test_token_grid_inference_microbatches_have_their_own_rows(tmp_path: Path) -> None:
    """The host told the rows of the first micro-batch only; the token ids of both were recorded."""
    batches: Mapping[str, list[list[str]]] = {"b": [["0", "1"], ["2"]], "t": [["2"], ["1"], ["0"]]}
    for run_name, micros in batches.items():
        with RunFactory(tmp_path / run_name) as run:
            run.step(phase="train", grid=(1, 6), rows=[RowSpan("0", 0, 6, 0, 0)], token_ids=TEXTS["0"])
            for micro, names in enumerate(micros):
                length = max(len(TEXTS[n]) for n in names)
                ids = np.zeros((len(names), length), np.int64)
                mask = np.zeros((len(names), length), np.int64)
                tensor = np.full((len(names), length, WIDTH), 9, np.float32)
                for i, n in enumerate(names):
                    size = len(TEXTS[n])
                    ids[i, :size], mask[i, :size], tensor[i, :size] = TEXTS[n], 1, values(n, range(size))
                run.put(":in[input_ids]", ids, micro=micro)
                run.put(":in[attention_mask]", mask, micro=micro)
                run.put("norm:out", tensor, micro=micro)
    report = diff(tmp_path / "b", tmp_path / "t")
    norm = next(f for f in report.findings if f.site == "norm:out")
    assert (norm.verdict, norm.rows.num_compared) == (Verdict.SAME, 19)


def test_token_grid_inference_two_calls_in_a_step_are_reported(tmp_path: Path) -> None:
    for name in ("b", "t"):
        with RunFactory(tmp_path / name) as run:
            run.step(grid=(1, 3), rows=[RowSpan("0", 0, 3, 0, 0)], token_ids=[1, 2, 3])
            for ids in ([1, 2, 3], [4, 5, 6]):
                run.put(":in[input_ids]", np.array([ids]))
                run.put("norm:out", np.array(ids, np.float32)[None, :, None] * np.ones(4, np.float32))
    report = diff(tmp_path / "b", tmp_path / "t")
    found = {f.site: f.rows.num_compared for f in report.findings}
    assert found == {":in[input_ids]": 6, "norm:out": 3, "norm:out#1": 3}
    assert (
        "b calls its model several times in 1 step, e.g. 0, and records the rows of the first"
        in report.coverage.warnings[0]
    )


def test_token_grid_inference_statistics_only_arguments_are_reported(tmp_path: Path) -> None:
    for name in ("b", "t"):
        with RunFactory(tmp_path / name) as run:
            run.step()
            run.put(":in[input_ids]", np.array([[1, 2, 3]]), keep="stats")
            run.put("norm:out", np.ones((1, 3, 4), np.float32))
    report = diff(tmp_path / "b", tmp_path / "t")
    said = "neither run records which token rows the steps hold: tensors are compared whole, step by step"
    assert said in report.coverage.warnings
    assert report.exit_code == 0
