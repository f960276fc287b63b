"""Runs recorded with adapters: sites have PEFT's names, and a diff names a row that used its neighbor's adapter."""

from functools import partial
from pathlib import Path

import pytest
from checkpoints import make_llama
from compare_runs import diff
from lora_adapters import ATTENTION, EVERY, make_adapter, swap_adapters

from tapscope.cli import main
from tapscope.dumper import make_observer
from tapscope.dumper.config import DumperConfig
from tapscope.engine import LLM
from tapscope.sources import open_run

PROMPTS = [[5, 6, 7, 8, 9], [300, 301, 302], [5, 6, 7, 8]]
NAMES = ["base", "first", "second"]
ADAPTERS = ["", "a", "b"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1, num_hidden_layers=2)
    make_adapter(path.parent / "a", path, EVERY, seed=1)
    make_adapter(path.parent / "b", path, ATTENTION, seed=2)
    return path


def _run(path: Path, out: Path, *, together: bool = True) -> Path:
    observer = partial(make_observer, out=str(out), config=DumperConfig(keep="full"))
    adapters = {name: path.parent / name for name in ("a", "b")}
    options = {"max_new_tokens": 4, "ignore_eos": True}
    with LLM(path, observer=observer, lora_paths=adapters, logits="all", prefix_cache=False) as llm:
        if together:
            llm.generate(PROMPTS, request_ids=NAMES, adapter=ADAPTERS, **options)
        else:
            for prompt, name, adapter in zip(PROMPTS, NAMES, ADAPTERS, strict=True):
                llm.generate([prompt], request_ids=[name], adapter=adapter, **options)
    return out


@pytest.fixture(scope="module")
def mixed(path: Path) -> Path:
    return _run(path, path.parent / "mixed")


def test_dump_of_peft_agrees_with_the_engine(path: Path, tmp_path: Path) -> None:
    common = ["--lora", str(path.parent / "a"), "-o"]
    assert main(["dump", str(path), *common, str(tmp_path / "hf"), "--backend", "hf", "--prompt", "def main():"]) == 0
    assert main(["dump", str(path), *common, str(tmp_path / "ours"), "--tokens-from", str(tmp_path / "hf")]) == 0
    report = diff(tmp_path / "hf", tmp_path / "ours")
    assert report.exit_code == 0, str(report)
    matched = {finding.site for finding in report.findings if finding.baseline and finding.target}
    for layer in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        for name in ("base_layer", "lora_A.default", "lora_B.default"):
            assert f"model.layers.1.{layer}.{name}:out" in matched
    with open_run(tmp_path / "hf") as one, open_run(tmp_path / "ours") as two:
        assert one.steps[0][0].info.adapters == two.steps[0][0].info.adapters == {"0": "a"}


def test_layers_that_no_adapter_adapts_are_not_reported_as_silent(path: Path, tmp_path: Path) -> None:
    observer = partial(make_observer, out=str(tmp_path / "run"), config=DumperConfig(keep="full"))
    with LLM(path, observer=observer, lora_paths={"b": path.parent / "b"}) as llm:  # attention layers only
        llm.generate(PROMPTS[:1], adapter="b", max_new_tokens=1)
    with open_run(tmp_path / "run") as run:
        assert run.ledger().never_fired == []
        assert "model.layers.0.self_attn.q_proj.lora_A.default:out" in run.sites
        assert "model.layers.0.mlp.up_proj.lora_A.default:out" not in {record.key.site for record in run.records}


def test_diff_of_a_mixed_batch_agrees_with_requests_alone(path: Path, mixed: Path, tmp_path: Path) -> None:
    report = diff(_run(path, tmp_path / "alone", together=False), mixed)
    assert report.exit_code == 0, str(report)
    with open_run(mixed) as run:
        info = run.steps[1][0].info
        assert info.adapters == {"first": "a", "second": "b"}
        assert info.row_sets["adapters"] == (1, 2)


def test_diff_names_a_row_that_had_its_neighbours_adapter(
    path: Path, mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap_adapters(monkeypatch, step=2)
    report = diff(mixed, _run(path, tmp_path / "run"))
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.site == "model.layers.0.self_attn.q_proj.lora_A.default:out", str(report)
    assert report.first_divergence.step == 2
