"""Replay of recorded expert ids in place of the routers' choices, weighted by the current router logits."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import pytest
import torch
from draft_heads import make_mtp
from engine_helpers import reference_logits
from engine_http import served
from moe_checkpoints import make_moe
from safetensors.torch import load_file, save_file
from speculation import OracleProposer, speculate

from tapscope.cli import main
from tapscope.cli.recorded_experts import read_experts
from tapscope.core.errors import UsageError
from tapscope.dumper import make_observer
from tapscope.dumper.config import DumperConfig
from tapscope.engine import LLM, SamplingParams
from tapscope.engine.requests.per_token_outputs import RoutedExperts
from tapscope.sources import open_run

PROMPT = [5, *range(20, 34)]
FAMILIES = (
    "mixtral",
    "gpt_oss",
    "llama4",
    "minimax_m2",
    "deepseek_v2",
    "deepseek_v3",
    "qwen2_moe",
    "qwen3_next",
    "gemma4_moe",
)
GREEDY = {"max_new_tokens": 6, "ignore_eos": True, "logprobs": 0}


def _with_other_routers(path: Path, folder: Path) -> Path:
    """Copy the checkpoint with other router weights, so that other experts are chosen."""
    folder.mkdir()
    for file in path.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    held = load_file(path / "model.safetensors")
    gates = [name for name in held if name.endswith(("gate.weight", "router.weight", "router.proj.weight"))]
    assert gates
    for name in gates:
        held[name] = held[name].flip(0).contiguous()
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("moe")
    path = make_moe(folder / "model", "qwen3_moe", seed=1)
    return path, _with_other_routers(path, folder / "other")


def _run(llm: LLM, tokens: tuple[int, ...] = (), experts: RoutedExperts | None = None) -> Any:
    params = SamplingParams(**GREEDY, routed_experts=True)
    name = llm.submit(PROMPT, params, forced_token_ids=tokens, experts=experts)
    while llm.has_work:
        for generation in llm.step():
            if generation.request == name:
                return generation
    raise AssertionError("the request has not ended")


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.soak)])
@pytest.mark.parametrize("family", ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.soak) for name in FAMILIES)])
def test_recorded_experts_are_taken_with_weights_from_the_logits(tmp_path: Path, family: str, tp: int) -> None:
    path = make_moe(tmp_path / "model", family, seed=1)
    with LLM(path) as llm:
        recorded = _run(llm)
        again = _run(llm, recorded.token_ids, recorded.routed_experts)
        assert [t.logprob for t in again.logprobs] == [t.logprob for t in recorded.logprobs], "the same experts"
    with LLM(_with_other_routers(path, tmp_path / "other"), tp=tp) as llm:
        own = _run(llm, recorded.token_ids)
        assert not np.array_equal(own.routed_experts.array(), recorded.routed_experts.array())
        replayed = _run(llm, recorded.token_ids, recorded.routed_experts)
        assert np.array_equal(replayed.routed_experts.array(), recorded.routed_experts.array())
        assert [t.logprob for t in replayed.logprobs] != [t.logprob for t in own.logprobs]
        assert [t.logprob for t in _run(llm, recorded.token_ids).logprobs] == [t.logprob for t in own.logprobs]


def test_logits_with_recorded_experts_equal_transformers_with_them(paths: tuple[Path, Path]) -> None:
    path, other = paths
    with LLM(path) as llm:
        recorded = _run(llm)
    ids = torch.from_numpy(recorded.routed_experts.array().astype(np.int64))
    layers = iter([0, 2])  # layer 1 is dense

    def recorded_topk(scores: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = ids[:, next(layers)]
        return scores.gather(1, chosen), chosen

    with patch("torch.topk", recorded_topk):
        logits = reference_logits(other, [*PROMPT, *recorded.token_ids[:-1]])
    expected = logits.log_softmax(-1)[len(PROMPT) - 1 :].gather(1, torch.tensor(recorded.token_ids)[:, None])[:, 0]
    with LLM(other, max_num_batched_tokens=7) as llm:
        replayed = _run(llm, recorded.token_ids, recorded.routed_experts)
    actual = torch.tensor([each.logprob for each in replayed.logprobs])
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_recorded_experts_do_not_share_prefixes_with_other_requests(paths: tuple[Path, Path]) -> None:
    with LLM(paths[0], page_size=4) as llm:
        recorded = _run(llm).routed_experts
        plain = SamplingParams(max_new_tokens=1)
        llm.generate([PROMPT], plain)
        names = [llm.submit(PROMPT, plain, experts=experts) for experts in (recorded, recorded, None)]
        cached = {}
        while llm.has_work:
            cached |= {generation.request: generation.cached_tokens for generation in llm.step()}
        assert [cached[name] > 0 for name in names] == [False, True, True]


def test_speculation_takes_the_recorded_experts_of_draft_tokens(paths: tuple[Path, Path]) -> None:
    with LLM(paths[0], batch_invariant=True) as llm:
        recorded = _run(llm).routed_experts
    with LLM(paths[1], batch_invariant=True) as llm:
        plain = _run(llm, experts=recorded)
    with LLM(paths[1], batch_invariant=True, speculative_algorithm="NGRAM") as llm:
        outputs = {tuple(PROMPT): plain.token_ids}
        stats = speculate(llm, OracleProposer(outputs, 0.8, 512), 3).stats
        found = _run(llm, experts=recorded)
        assert stats.num_accepted_tokens > 0
    assert (found.token_ids, found.logprobs) == (plain.token_ids, plain.logprobs)
    assert np.array_equal(found.routed_experts.array(), plain.routed_experts.array())


@pytest.fixture(scope="module")
def client(paths: tuple[Path, Path]) -> Iterator[httpx.Client]:
    with served(paths[1]) as url, httpx.Client(base_url=url, timeout=90) as made:
        yield made


def test_generate_route_takes_recorded_experts(client: httpx.Client, paths: tuple[Path, Path]) -> None:
    with LLM(paths[0]) as llm:
        recorded = _run(llm).routed_experts
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}, "return_routed_experts": True}
    answer = client.post("/generate", json=body | {"routed_experts": recorded.text}).json()
    found = RoutedExperts.from_base64(
        answer["meta_info"]["routed_experts_shape"], answer["meta_info"]["routed_experts"]
    )
    assert np.array_equal(found.array(), recorded.array()[: len(PROMPT)])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("%", "are not base64"),
        ("AAAA", "have 3 bytes; they must be int32 [positions, 3 layers, 2 experts]"),
        (RoutedExperts.from_rows(np.full((1, 3, 2), 8)).text, "invalid expert 8 in its routed experts"),
        (["AAAA", "AAAA"], "'routed_experts' has 2 entries for 1 prompts"),
    ],
)
def test_invalid_recorded_experts_are_refused(client: httpx.Client, ids: Any, message: str) -> None:
    answer = client.post("/generate", json={"input_ids": PROMPT, "routed_experts": ids})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_dump_replays_the_experts_of_a_run(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, target = tmp_path / "base", tmp_path / "target"
    assert main(["dump", str(paths[0]), "-o", str(base), "--prompt", "def main():", "--max-new-tokens", "3"]) == 0
    replay = ["dump", str(paths[1]), "-o", str(target), "--tokens-from", str(base), "--experts-from", str(base)]
    assert main(replay) == 0
    chosen = []
    for run in (base, target):
        with open_run(run) as opened:
            records = [each for each in opened.records if each.key.site.endswith("experts:in[top_k_index]")]
            assert records
            chosen.append({json.dumps(each.key, default=str): opened.array(each).tolist() for each in records})
    assert chosen[0] == chosen[1]
    capsys.readouterr()
    assert main([*replay[:3], str(tmp_path / "hf"), "--prompt", "x", "--experts-from", str(base)]) == 0
    assert main([*replay[:3], str(tmp_path / "x"), "--prompt", "x", "--prompt", "y", "--experts-from", str(base)]) == 2
    assert "has no request 1; it has 0" in capsys.readouterr().err


def test_experts_of_a_speculative_run_are_those_of_the_target(tmp_path: Path) -> None:
    """Excludes the experts of the MTP layer and those of rejected tree branches."""
    path = make_mtp(tmp_path / "model", "glm4_moe")
    kept = DumperConfig(keep="full")
    settings: dict[str, Any] = {
        "prefix_cache": False,
        "observer": partial(make_observer, out=str(tmp_path / "run"), config=kept),
    }
    settings |= {"speculative_algorithm": "NEXTN", "speculative_eagle_topk": 3, "speculative_num_steps": 2}
    with LLM(path, speculative_num_draft_tokens=6, **settings) as llm:
        recorded, layers = _run(llm), llm.engine.model_config.num_layers
    with open_run(tmp_path / "run") as run:
        assert {record.key.model for record in run.records} == {"", "draft"}
        ((name, tokens),) = run.tokens().items()
    assert list(tokens.values()) == [*PROMPT, *recorded.token_ids][:-1]
    read = read_experts(tmp_path / "run", layers, 2)[name].array()
    expected = recorded.routed_experts.array()
    assert read.shape == expected.shape
    assert (read == expected).all()


def test_dense_model_refuses_recorded_experts(tmp_path: Path) -> None:
    from checkpoints import make_llama

    with LLM(make_llama(tmp_path / "model", seed=1)) as llm, pytest.raises(UsageError, match="has no experts"):
        llm.submit(PROMPT, experts=RoutedExperts.from_rows(np.zeros((1, 3, 2))))
