"""Tokens at which served runs fork: a near tie, another seed, or a sampler that took the wrong token."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoints import make_llama
from torch import Tensor

from tapscope.comparator import CompareOptions, Report, compare
from tapscope.dumper import make_observer
from tapscope.dumper.config import DumperConfig
from tapscope.engine import LLM
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.sampling.sampler import Sampler

PROMPTS = ([9, 4, 7, 30, 31], [9, 4, 8, 60, 61], [12, 44, 70])
RULES = ("model.norm:out=full", "lm_head:out=full", "sampler:out=full")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", seed=3, num_hidden_layers=2)


def serve(llama: Path, out: Path, seed: int | None = None, *, rules: tuple[str, ...] = RULES) -> Path:
    observer = partial(make_observer, out=str(out), config=DumperConfig(keep="off", rules=rules))
    greedy = SamplingParams(max_new_tokens=5, ignore_eos=True)
    drawn = [greedy if seed is None else replace(greedy, temperature=1.0, seed=seed + i) for i in range(len(PROMPTS))]
    with LLM(llama, observer=observer) as llm:
        llm.generate(PROMPTS, drawn)
    return out


def other_rows(draw: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Wrap a sampler such that its second row takes the first row's token."""

    def drawn(self: Sampler, logits: Tensor, *others: object) -> tuple[Tensor, Tensor]:
        tokens, scores = draw(self, logits, *others)
        tokens = tokens.clone()
        tokens[1:2] = tokens[:1]
        return tokens, scores

    return drawn


def judged(baseline: Path, target: Path, *skip: str) -> Report:
    return compare(baseline, target, CompareOptions(skip=skip))


@pytest.mark.parametrize("skip", [(), ("sampler:out",)])
def test_sampled_tokens_of_another_row_blame_the_sampler(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skip: tuple[str, ...]
) -> None:
    baseline = serve(llama, tmp_path / "b")
    monkeypatch.setattr(Sampler, "draw", other_rows(Sampler.draw))
    report = judged(baseline, serve(llama, tmp_path / "t"), *skip)
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.module == "sampler"
    assert report.first_divergence.step == 0
    assert "the target took token" in report.first_divergence.finding.notes[0]
    assert "sampler" in str(report)


@pytest.mark.parametrize("skip", [(), ("sampler:out",)])
def test_sampled_tokens_of_different_seeds_name_the_seeds(llama: Path, tmp_path: Path, skip: tuple[str, ...]) -> None:
    report = judged(serve(llama, tmp_path / "b", 100), serve(llama, tmp_path / "t", 200), *skip)
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.module == "sampler"
    assert "with other seeds, 10" in report.first_divergence.finding.notes[0]
    assert "with other seeds" in str(report)


def test_sampled_tokens_of_one_seed_agree(llama: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert judged(serve(llama, tmp_path / "b", 100), serve(llama, tmp_path / "t", 100)).exit_code == 0
