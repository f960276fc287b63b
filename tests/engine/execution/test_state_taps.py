"""Recurrent states as sites: one row per request, assembled over ranks; a diff names a wrong state."""

from pathlib import Path

import pytest
from checkpoints import FAMILIES, make_checkpoint
from moe_checkpoints import make_moe
from torch import Tensor

from tapscope.__main__ import main
from tapscope.comparator import compare
from tapscope.engine.kv_cache.state_cache import StepStates
from tapscope.sources import open_run

PROMPTS = ["--prompt", "def main(): return fold(x)", "--prompt", "import os"]


def dump(path: Path, out: Path, *options: str) -> str:
    assert main(["dump", str(path), "-o", str(out), "-q", *options]) == 0
    return str(out)


def make(folder: Path, family: str) -> Path:
    return (make_checkpoint if family in FAMILIES else make_moe)(folder / "model", family, seed=3)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("family", "layer", "states"),
    [
        ("qwen3_next", "layers.0.linear_attn", {"conv_state": (2, 88, 3), "recurrent_state": (2, 4, 12, 10)}),
        ("kimi_linear", "layers.0.self_attn", {"conv_state": (2, 144, 3), "recurrent_state": (2, 4, 12, 12)}),
        ("falcon_h1", "layers.0.mamba", {"conv_state": (2, 112, 3)}),
        ("zamba2", "layers.0.mamba_decoder.mamba", {"recurrent_state": (2, 8, 10, 16)}),
        ("jamba", "layers.0.mamba", {"recurrent_state": (2, 128, 6, 1)}),
        ("lfm2", "layers.0.conv", {"conv_state": (2, 64, 2)}),
    ],
)
def test_states_of_two_ranks_are_those_of_one(
    tmp_path: Path, family: str, layer: str, states: dict[str, tuple[int, ...]]
) -> None:
    path = make(tmp_path, family)
    base = dump(path, tmp_path / "base", *PROMPTS, "--max-new-tokens", "3")
    target = dump(path, tmp_path / "target", "--tp", "2", "--tokens-from", base)
    with open_run(base) as one, open_run(target) as two:
        found = {record.key.site: tuple(record.shape) for record in one.records if record.key.step == 0}
        assert {f"model.{layer}:tap[{name}]": shape for name, shape in states.items()}.items() <= found.items()
        report = compare(one, two)
    verdicts = {finding.site: finding.verdict.value for finding in report.findings}
    assert all(verdicts[f"model.{layer}:tap[{name}]"] in ("same", "close") for name in states)
    assert main(["diff", base, target, "-q"]) == 0


def test_diff_names_the_layer_that_reads_the_state_of_another_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make(tmp_path, "falcon_h1")
    base = dump(path, tmp_path / "base", *PROMPTS, "--max-new-tokens", "3")
    read = StepStates.read

    def swapped(states: StepStates, layer: int, requests: slice) -> tuple[Tensor, Tensor]:
        window, matrix = read(states, layer, requests)
        return (window, matrix.flip(0)) if layer == 1 else (window, matrix)

    monkeypatch.setattr(StepStates, "read", swapped)
    target = dump(path, tmp_path / "target", "--tokens-from", base)
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["diff", base, target]) == 1
    report = capsys.readouterr().out
    assert "model.layers.1.mamba:tap[recurrent_state]" in report
    with open_run(base) as one, open_run(target) as two:
        differing = {finding.site for finding in compare(one, two).findings if finding.verdict.value == "differs"}
    assert "model.layers.1.mamba:tap[recurrent_state]" in differing
    assert not any(site.startswith("model.layers.0.") for site in differing)


def test_rotary_calls_of_each_layer_type_are_named_by_it(tmp_path: Path) -> None:
    """transformers iterates over a set of strings, so its order of calls differs between processes."""
    out = dump(make(tmp_path, "gemma3n"), tmp_path / "run", *PROMPTS[:2], "--max-new-tokens", "1")
    with open_run(out) as run:
        calls = [record.value for record in run.records if record.key.site == "model.rotary_emb:in[layer_type]"]
    assert [call["value"] for call in calls] == ["full_attention", "sliding_attention"]


@pytest.mark.soak
@pytest.mark.parametrize(
    "family",
    [
        "mamba2",
        "bamba",
        "jamba",
        "nemotron_h",
        "gemma3n",
        "gemma4",
        "gemma4_moe",
        "deepseek_v32",
        "kimi_linear",
        "zamba2",
    ],
)
def test_dump_agrees_with_the_dump_of_transformers(tmp_path: Path, family: str) -> None:
    """With one prompt: in transformers' padded batches, the biases of a Mamba projection leak from padding."""
    path = make(tmp_path, family)
    base = dump(path, tmp_path / "base", "--backend", "hf", *PROMPTS[:2], "--max-new-tokens", "3")
    target = dump(path, tmp_path / "target", "--tokens-from", base)
    assert main(["diff", base, target, "-q"]) == 0
