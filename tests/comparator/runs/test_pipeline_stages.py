"""Layers and experts that a framework numbers anew on every rank meet under the numbers that the model gives them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory

from tapscope.comparator import Report
from tapscope.comparator.options.overrides import parse_dims

VALUES = [np.random.default_rng(i).standard_normal((3, 4)).astype(np.float32) for i in range(8)]


def plain(path: Path, numbers: range = range(4), name: str = "model.layers.{}:out", **manifest: Any) -> Path:
    with RunFactory(path, **manifest) as run:
        run.step()
        for i in numbers:
            run.put(name.format(i), VALUES[i])
    return path


def spread(
    path: Path, held: list[list[int]], axis: str = "pp", name: str = "decoder.layers.{}:out[0]", **more: Any
) -> Path:
    """Rank r holds the modules ``held[r]`` and numbers them from 0."""
    with RunFactory(path, mesh={axis: len(held)}, **more) as run:
        run.step()
        for rank, numbers in enumerate(held):
            for local, number in enumerate(numbers):
                run.put(name.format(local), {rank: VALUES[number]})
    return path


def verdicts(report: Report) -> dict[str, str]:
    return {f.site: str(f.verdict) for f in report.findings}


SAME = {f"model.layers.{i}:out": "same" for i in range(4)}


@pytest.mark.parametrize("held", [[[0, 1], [2, 3]], [[0], [1, 2, 3]], [[0, 1, 2], [3]]])
def test_pipeline_stages_layer_numbers_are_global(tmp_path: Path, held: list[list[int]]) -> None:
    two = spread(tmp_path / "t", held, model_config={"num_hidden_layers": 4})
    report = diff(plain(tmp_path / "b"), two)
    assert verdicts(report) == SAME
    assert [f.target.site for f in report.findings if f.target] == [f"decoder.layers.{i}:out[0]" for i in range(4)]
    assert "t: layer numbers were made global across the ranks of pp" in report.coverage.warnings
    assert [f.site for f in diff(two, two, layers=frozenset({3})).findings] == ["decoder.layers.3:out[0]"]


def test_pipeline_stages_without_a_config_count_recorded_layers(tmp_path: Path) -> None:
    report = diff(plain(tmp_path / "b"), spread(tmp_path / "t", [[0, 1], [2, 3]]))
    assert verdicts(report) == SAME
    assert any("taken from what was recorded (2, 2)" in sentence for sentence in report.coverage.warnings)


def test_pipeline_stages_layer_count_comes_from_the_model(tmp_path: Path) -> None:
    two = spread(tmp_path / "t", [[0], [2]], model_config={"num_hidden_layers": 4})
    found = verdicts(diff(plain(tmp_path / "b"), two))
    assert found == {f"model.layers.{i}:out": "only-baseline" if i % 2 else "same" for i in range(4)}


def test_pipeline_stages_inconsistent_counts_are_reported(tmp_path: Path) -> None:
    with RunFactory(tmp_path / "t", mesh={"pp": 2}, model_config={"num_hidden_layers": 5}) as run:
        run.step()
        run.put("embed_tokens:out", {0: VALUES[0]})
        for rank in (0, 1):
            run.put("decoder.layers.0:out[0]", {rank: VALUES[2 * rank]})
    with RunFactory(tmp_path / "b") as run:
        run.step()
        for site in ("embed_tokens:out", "layers.0:out"):
            run.put(site, VALUES[0])
    report = diff(tmp_path / "b", tmp_path / "t")
    assert any("5 cannot be divided into what was recorded (1, 1)" in sentence for sentence in report.coverage.warnings)
    assert verdicts(report) == {"embed_tokens:out": "same", "layers.0:out": "shape"}


def test_pipeline_stages_global_numbers_are_kept(tmp_path: Path) -> None:
    with RunFactory(tmp_path / "t", mesh={"pp": 2}) as run:
        run.step()
        for i in range(4):
            run.put(f"model.layers.{i}:out", {i // 2: VALUES[i]})
    report = diff(plain(tmp_path / "b"), tmp_path / "t")
    assert verdicts(report) == SAME
    assert not any("numbered" in sentence for sentence in report.coverage.warnings)


@pytest.mark.parametrize("how", ["recorded", "given"])
def test_pipeline_stages_modules_on_all_stages_keep_their_number(tmp_path: Path, how: str) -> None:
    dims = "t h # pp:replicated"
    for name, apart in (("t", VALUES[5]), ("wrong", VALUES[6])):
        with RunFactory(tmp_path / name, mesh={"pp": 2}, model_config={"num_hidden_layers": 4}) as run:
            run.step()
            for i in range(4):
                run.put(f"decoder.layers.{i % 2}:out[0]", {i // 2: VALUES[i]})
            run.put("decoder.layers.1:tap[scale]", {0: VALUES[5], 1: apart}, dims=dims if how == "recorded" else None)
    with RunFactory(tmp_path / "b") as run:
        run.step()
        for i in range(4):
            run.put(f"model.layers.{i}:out", VALUES[i])
        run.put("decoder.layers.1:tap[scale]", VALUES[5])
    given = () if how == "recorded" else (parse_dims(f"target:decoder.layers.*:tap*={dims}"),)
    site = "decoder.layers.1:tap[scale]"
    assert verdicts(diff(tmp_path / "b", tmp_path / "t", dims=given)) == SAME | {site: "same"}
    assert verdicts(diff(tmp_path / "b", tmp_path / "wrong", dims=given)) == SAME | {site: "differs"}


def test_pipeline_stages_expert_numbers_are_global_over_ep(tmp_path: Path) -> None:
    name = "decoder.layers.1.mlp.experts.local_experts.{}.linear_fc2:out[0]"
    two = spread(tmp_path / "t", [[0, 1], [2, 3]], "ep", name, model_config={"num_experts": 4})
    one = plain(tmp_path / "b", name="model.layers.1.mlp.experts.{}.down_proj:out")
    assert set(verdicts(diff(one, two)).values()) == {"same"}
    swapped = spread(tmp_path / "s", [[0, 2], [1, 3]], "ep", name, model_config={"num_experts": 4})
    assert sorted(verdicts(diff(one, swapped)).values()) == ["differs", "differs", "same", "same"]


def test_pipeline_stages_intermediate_output_is_not_the_model_output(tmp_path: Path) -> None:
    with RunFactory(tmp_path / "t", mesh={"pp": 2}) as run:
        run.step()
        run.put(":in[input_ids]", {0: np.arange(3), 1: np.arange(3)})
        run.put("decoder:in[hidden_states]", {0: VALUES[4], 1: VALUES[0]})
        for rank in (0, 1):
            run.put("decoder.layers.0:out[0]", {rank: VALUES[rank]})
        run.put("decoder:out", {0: VALUES[0], 1: VALUES[2]})
        run.put(":out", {0: VALUES[0], 1: VALUES[3]})
    with RunFactory(tmp_path / "b") as run:
        run.step()
        run.put(":in[input_ids]", np.arange(3))
        for i in (0, 1):
            run.put(f"model.layers.{i}:out", VALUES[i])
        run.put("model:out[last_hidden_state]", VALUES[2])
        run.put(":out[logits]", VALUES[3])
    found = verdicts(diff(tmp_path / "b", tmp_path / "t"))
    assert {site for site, verdict in found.items() if verdict == "same"} == {
        *(":in[input_ids]", "model.layers.0:out", "model.layers.1:out", "model:out[last_hidden_state]", ":out[logits]")
    }
    assert {site for site, verdict in found.items() if verdict == "only-target"} == {
        *(":out[stage0]", "decoder:out[stage0]", "decoder:in[hidden_states]", "decoder:in[hidden_states.stage1]")
    }
