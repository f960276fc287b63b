"""Mamba-2: models of nothing else, and Falcon-H1, whose layers have a recurrent state and cached keys."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from engine_helpers import reference_logits
from engine_observers import Memory

from tapscope.core.errors import CheckpointError, UsageError
from tapscope.engine import LLM
from tapscope.engine.hf_config.model_config import ModelConfig

PROMPTS = [[5, 6, 7], [(11 * i + i // 3) % 500 for i in range(50)], [300]]


@pytest.fixture(scope="module", params=["falcon_h1", "mamba2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param) / "model", request.param, seed=3)


def test_preemption_does_not_change_tokens(path: Path) -> None:
    settings: dict[str, Any] = {"num_pages": 22, "num_state_slots": 7, "max_num_batched_tokens": 9}
    with LLM(path, page_size=4, state_checkpoint_interval=8, check_invariants=True, **settings) as llm:
        generations = llm.generate([*PROMPTS, PROMPTS[1][:20]], max_new_tokens=20, ignore_eos=True)
        assert llm.engine.scheduler.stats.num_preemptions > 0
    for generation in generations:
        tokens = [*generation.prompt_ids, *generation.token_ids]
        assert list(generation.token_ids) == reference_logits(path, tokens[:-1]).argmax(-1)[-20:].tolist()


def test_batch_invariant_bits_do_not_depend_on_chunks(path: Path) -> None:
    found = []
    for rows in (7, 64):
        with LLM(path, batch_invariant=True, observer=Memory, logits="all", max_num_batched_tokens=rows) as llm:
            llm.generate(PROMPTS, max_new_tokens=3, ignore_eos=True)
            found.append(llm.observer.logits_of("1"))
    assert torch.equal(*found)


def test_falcon_h1_without_norm_equals_transformers(tmp_path: Path) -> None:
    """The output is gated, and groups are one."""
    path = make_checkpoint(tmp_path / "model", "falcon_h1", mamba_rms_norm=False, mamba_n_groups=1)
    with LLM(path, observer=Memory, logits="all") as llm:
        llm.generate([PROMPTS[1]], max_new_tokens=1)
        assert (llm.observer.logits_of("0") - reference_logits(path, PROMPTS[1])).abs().max() <= 1e-4


def test_falcon_h1_config_errors_name_field_and_rule(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "falcon_h1")
    text = (path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"mamba_n_groups": 2', '"mamba_n_groups": 4'))
    with pytest.raises(CheckpointError, match="mamba_n_groups is 4; it must divide the 6 heads"):
        ModelConfig.read(tmp_path)
    (tmp_path / "config.json").write_text(text.replace('"num_attention_heads": 4', '"num_attention_heads": 8'))
    with pytest.raises(UsageError, match="tp=7 is more than the 6 heads of the Mamba layers"):
        ModelConfig.read(tmp_path).check_split(7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; the convolution of Mamba-2 is followed by silu"),
        ({"num_heads": 7}, "num_heads is 7; times head_dim=18 it must be expand=3 times 48"),
        ({"n_groups": 3}, "n_groups is 3; it must divide the 8 heads"),
        ({"conv_kernel": 1}, "conv_kernel is 1; expected an integer above 1"),
    ],
)
def test_mamba2_config_errors_name_field_and_rule(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = make_checkpoint(tmp_path / "model", "mamba2")
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.read(path)
