"""Mixture-of-experts models match transformers on one rank, sharded by features and sharded by experts."""

import base64
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from checkpoints import make_llama
from engine_helpers import ThreadRanks, reference, reference_logits
from engine_observers import Memory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe_checkpoints import FAMILIES, make_moe
from soak_cases import mostly_soak

from tapscope.cli import main
from tapscope.comparator import Verdict, compare
from tapscope.core.errors import CheckpointError, ConfigError, UsageError
from tapscope.engine import LLM
from tapscope.engine.api.native_request import GenerateBody, read_generations
from tapscope.engine.api.native_response import ResponseStyle, answer
from tapscope.engine.api.served_model import ServedModel
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.requests.output import Output, OutputValues
from tapscope.sources import open_run

PROMPTS = [[5, 6, 7], list(range(40, 75)), [300], [9, 8, 7, 6, 5, 4, 3, 2, 11, 12, 13, 14, 15, 16, 17, 18, 19]]
INDEXED = ("deepseek_v32", "glm_moe_dsa")
RANKS = [(1, 1, 24), (2, 1, 12), (2, 2, 64), (2, 2, 6)]
"""tp, ep, new tokens."""


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_moe(tmp_path_factory.mktemp(request.param), request.param, seed=3)


def assert_same(path: Path, ranks: ThreadRanks, prompts: list[list[int]], count: int) -> None:
    """Check the logits at every position, and that every generated token is the greedy choice."""
    for request in ranks.generate(prompts, count):
        assert len(request.generated) == count
        expected = reference_logits(path, request.tokens[:-1])
        assert list(request.generated) == expected[len(request.prompt_ids) - 1 :].argmax(-1).tolist()
        for runner in ranks.runners:
            actual = runner.observer.logits_of(request.id)
            assert actual.shape == expected.shape
            assert (actual - expected).abs().max() <= 1e-4
    ranks.close()


@pytest.mark.parametrize(("tp", "ep", "num_new"), mostly_soak(RANKS, default=RANKS[-1:]))
def test_moe_fp32_logits_and_greedy_tokens_equal_transformers(
    path: Path, tmp_path: Path, tp: int, ep: int, num_new: int
) -> None:
    """The token budget per step is small, so that prompts are chunked and share steps with decoding rows."""
    ranks = ThreadRanks(path, tmp_path / "store", tp, ep=ep, page_size=4, max_num_batched_tokens=16)
    assert_same(path, ranks, PROMPTS, num_new)


ODD: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "one-expert-each": ("mixtral", {"num_experts_per_tok": 1, "sliding_window": 9}, 1, 1),
    "five-experts-on-two": ("mixtral", {"num_local_experts": 5}, 2, 2),
    "more-ranks-than-experts": ("qwen3_moe", {"num_experts": 3, "num_key_value_heads": 4}, 4, 4),
    "two-groups-of-two": ("qwen3_moe", {"num_key_value_heads": 4, "moe_intermediate_size": 30}, 4, 2),
    "odd-features": ("qwen3_moe", {"moe_intermediate_size": 27, "norm_topk_prob": False}, 2, 1),
    "every-second-layer": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, "mlp_only_layers": [], "num_experts_per_tok": 8},
        1,
        1,
    ),
    "v2-groups": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
        2,
        2,
    ),
    "v3-all-dense": ("deepseek_v3", {"first_k_dense_replace": 3}, 2, 1),
    "v3-not-normalised": ("deepseek_v3", {"norm_topk_prob": False, "n_group": 1, "topk_group": 1}, 2, 2),
}


@pytest.mark.parametrize("name", ODD)
def test_moe_unusual_shapes_equal_transformers(tmp_path: Path, name: str) -> None:
    family, config, tp, ep = ODD[name]
    path = make_moe(tmp_path / "model", family, seed=4, **config)
    reference(path).set_experts_implementation("eager")  # the default, grouped_mm, requires even widths
    assert_same(path, ThreadRanks(path, tmp_path / "store", tp, ep=ep, page_size=4), PROMPTS[:2], 5)


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from(["mixtral", "qwen3_moe", "deepseek_v3"]),
    num_experts=st.integers(2, 7),
    top_k=st.integers(1, 7),
    features=st.sampled_from([5, 8, 24]),
    ep=st.sampled_from([1, 2]),
    seed=st.integers(0, 9),
)
def test_moe_any_number_and_size_of_experts(
    tmp_path_factory: pytest.TempPathFactory,
    family: str,
    num_experts: int,
    top_k: int,
    features: int,
    ep: int,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("any")
    config: dict[str, Any] = {"num_hidden_layers": 2, "num_experts_per_tok": min(top_k, num_experts)}
    if family == "mixtral":
        config |= {"num_local_experts": num_experts, "intermediate_size": features}
    elif family == "qwen3_moe":
        config |= {"num_experts": num_experts, "moe_intermediate_size": features, "mlp_only_layers": []}
    else:
        shared = {"n_shared_experts": 2, "n_group": 1, "topk_group": 1}
        config |= shared | {"n_routed_experts": num_experts, "moe_intermediate_size": features}
    path = make_moe(folder / "model", family, seed=seed, **config)
    reference(path).set_experts_implementation("eager")
    assert_same(path, ThreadRanks(path, folder / "store", 2, ep=ep), [[5, 6, 7, 8, 9], [11]], 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_moe_loads_stacked_and_separate_experts(tmp_path: Path, family: str) -> None:
    results = []
    for stacked in (False, True):
        path = make_moe(tmp_path / str(stacked), family, seed=6, stacked=stacked)
        with LLM(path) as llm:
            results.append(llm.generate(PROMPTS[:1], max_new_tokens=2, ignore_eos=True))
            state = {name: tensor.clone() for name, tensor in llm.model.state_dict().items()}
        expected = reference(path).state_dict()
        shared = [name for name in state if name in expected]
        assert any(name.endswith(("experts.gate_up_proj", "experts.up_proj")) for name in shared)
        for name in shared:  # gpt-oss stores its matrices transposed
            is_transposed = state[name].shape != expected[name].shape
            assert torch.equal(state[name], expected[name].mT if is_transposed else expected[name])
    assert results[0] == results[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_moe_bf16_logits_within_rounding_of_transformers(tmp_path: Path, family: str) -> None:
    path = make_moe(tmp_path / "model", family, seed=5, dtype="bfloat16")
    with LLM(path, logits="all", observer=Memory) as llm:
        llm.generate([PROMPTS[1]], max_new_tokens=1)
        actual = llm.observer.logits_of("0")
    expected = reference_logits(path, PROMPTS[1])
    # Rounding may flip the choice of experts and thereby change a whole row; the median row shows rounding only.
    error = (actual.float() - expected.float()).norm(dim=1) / expected.float().norm(dim=1)
    assert error.median() < (2**-5 if family in INDEXED else 2**-6)  # key selection may flip too, in half of the rows


def test_moe_expert_parallel_dump_equals_transformers(tmp_path: Path) -> None:
    path = make_moe(tmp_path / "model", "qwen3_moe", seed=8)
    base, target = str(tmp_path / "base"), str(tmp_path / "target")
    prompts = ["--prompt", "def main():", "--prompt", "import os, sys"]
    assert main(["dump", str(path), "-o", base, "--backend", "hf", *prompts, "--max-new-tokens", "3", "-q"]) == 0
    assert main(["dump", str(path), "-o", target, "--tp", "2", "--ep", "2", "--tokens-from", base, "-q"]) == 0
    with open_run(base) as one, open_run(target) as two:
        report = compare(one, two)
    verdicts = {finding.site: finding.verdict for finding in report.findings}
    agreeing = {Verdict.SAME, Verdict.CLOSE}
    for site in ("experts:in[top_k_index]", "experts:out", "gate:out[0]", "gate:out[1]", "gate:out[2]"):
        assert verdicts[f"model.layers.0.mlp.{site}"] in agreeing
    apart = {site for site, verdict in verdicts.items() if verdict in (Verdict.DIFFERS, Verdict.SHAPE)}
    assert not apart
    assert main(["diff", base, target, "-q"]) == 0


def choices(path: Path, tokens: list[int]) -> torch.Tensor:
    """Return transformers' expert ids in ascending order: [positions, layers, k], -1 in dense layers."""
    model, chosen, hooks = reference(path), {}, []

    def keep(i: int, out: tuple[torch.Tensor, ...]) -> None:
        chosen[i] = out[2] if len(out) > 2 else out[1].topk(model.config.num_experts_per_tok).indices  # Llama 4

    for i, layer in enumerate(model.model.layers):
        block = next(getattr(layer, name) for name in ("mlp", "feed_forward", "mixer") if hasattr(layer, name))
        router = getattr(block, "gate", None) or getattr(block, "router", None) or getattr(layer, "router", None)
        if router is not None:
            hooks.append(router.register_forward_hook(lambda _, args, out, i=i: keep(i, out)))
    reference_logits(path, tokens)
    for hook in hooks:
        hook.remove()
    none = torch.full((len(tokens), model.config.num_experts_per_tok), -1)
    return torch.stack([chosen.get(i, none).sort(-1).values for i in range(3)], dim=1)


def test_routed_experts_equal_transformers(path: Path, tmp_path: Path) -> None:
    ranks = ThreadRanks(path, tmp_path / "store", 2, ep=2)
    assert ranks.runners[0].model.routed_experts() is None
    ranks.generate([PROMPTS[1]], 1)
    expected = choices(path, PROMPTS[1])
    for runner in ranks.runners:
        assert torch.equal(runner.model.routed_experts().transpose(0, 1).sort(-1).values, expected)
    ranks.close()


@pytest.mark.parametrize(
    "path",
    mostly_soak(FAMILIES, default=("mixtral", "deepseek_v3", "gpt_oss", "jamba", "llama4", "gemma4_moe")),
    indirect=True,
)
def test_request_returns_experts_and_hidden_states_of_every_position(path: Path) -> None:
    """With chunked prompts, preemption for lack of pages, and requests that share a prefix."""
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, routed_experts=True, hidden_states=True)
    with LLM(path, page_size=4, num_pages=16, max_num_batched_tokens=16) as llm:
        llm.generate([PROMPTS[1]], max_new_tokens=1)  # puts its prefix into the cache
        generations = llm.generate([PROMPTS[1], PROMPTS[3], PROMPTS[0]], params)
        assert llm.engine.state()["num_preemptions"] > 0
        streamed = list(llm.stream(PROMPTS[0], params=params))
        unasked = llm.generate([PROMPTS[0]], max_new_tokens=2)[0]
    for generation in generations:
        tokens = [*generation.prompt_ids, *generation.token_ids][:-1]
        actual = torch.from_numpy(generation.routed_experts.array().copy())
        assert torch.equal(actual.sort(-1).values.long(), choices(path, tokens))
        with torch.no_grad():
            hidden = reference(path)(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
        assert (torch.from_numpy(generation.hidden_states.array().copy()) - hidden).abs().max() <= 1e-4
    assert [output.routed_experts.shape[0] for output in streamed] == [3] + [1] * 11
    assert b"".join(output.routed_experts.data for output in streamed) == generations[2].routed_experts.data
    sent = [msgspec.msgpack.encode(output.plain()) for output in streamed]
    assert [Output.build(msgspec.msgpack.decode(each, type=OutputValues)) for each in sent] == streamed
    assert unasked.routed_experts is unasked.hidden_states is None


def test_generate_returns_routed_experts_like_sglang(tmp_path: Path) -> None:
    path = make_moe(tmp_path / "model", "qwen3_moe")
    body = GenerateBody.parse({"input_ids": PROMPTS[0], "return_routed_experts": True})
    (item,) = read_generations(body, ServedModel(name="tiny", max_positions=512))
    assert item.job.params.routed_experts
    with LLM(path) as llm:
        whole = functools.reduce(Output.followed_by, llm.stream(PROMPTS[0], params=item.job.params))
    meta = answer(whole, 0.1, item.logprobs, ResponseStyle(), has_text=True)["meta_info"]
    ids = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4").reshape(meta["routed_experts_shape"])
    tokens = [*PROMPTS[0], *whole.token_ids][:-1]
    assert torch.equal(torch.from_numpy(ids.copy()).sort(-1).values.long(), choices(path, tokens))


def test_dense_models_reject_routed_experts(tmp_path: Path) -> None:
    with (
        LLM(make_llama(tmp_path / "model")) as llm,
        pytest.raises(UsageError, match="request '0' requests routed experts, but .* has no experts"),
    ):
        llm.generate([[5]], SamplingParams(routed_experts=True))


def edited(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))
    return path


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "too many": ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5; there are 4 experts to choose from"),
    "groups": ("deepseek_v3", {"n_group": 3}, "n_group is 3; it must divide the 8 experts"),
    "top groups": ("deepseek_v3", {"topk_group": 5}, "topk_group is 5; there are 4 groups"),
    "lonely": ("deepseek_v3", {"n_group": 8, "topk_group": 4}, "n_group is 8; a group must have at least two of the 8"),
    "method": ("deepseek_v2", {"topk_method": "random"}, "topk_method is 'random'; supported: greedy"),
    "scores": ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; DeepSeek-V3 scores by sigmoid"),
    "layers": ("qwen3_moe", {"mlp_only_layers": "all"}, "mlp_only_layers is 'all'; expected a list of layer numbers"),
    "dense": ("deepseek_v2", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1; expected"),
    "more experts": ("mixtral", {"num_local_experts": 5}, "block_sparse_moe.experts.4.w1.weight.*missing"),
    "fewer experts": ("mixtral", {"num_local_experts": 3}, "block_sparse_moe.experts.3.w1.weight.*unexpected"),
    "wrong size": (
        "qwen3_moe",
        {"moe_intermediate_size": 16},
        r"experts.0.down_proj.*has shape \[64, 32\].*\[64, 16\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_moe_config_errors_name_field_and_rule(tmp_path: Path, name: str) -> None:
    family, change, message = REFUSED[name]
    path = edited(make_moe(tmp_path / "model", family), lambda config: config.update(change))
    with pytest.raises(CheckpointError, match=message):
        LLM(path)


def test_load_weights_checks_experts_of_other_ranks(tmp_path: Path) -> None:
    """A rank loads no weights of remote experts, but every rank rejects a checkpoint that lacks an expert."""
    path = edited(make_moe(tmp_path / "model", "mixtral"), lambda config: config.update(num_local_experts=5))
    with pytest.raises(CheckpointError, match=r"experts.4.w1.weight.*missing"):
        ThreadRanks(path, tmp_path / "store", 1)
    ranks = None
    with pytest.raises(CheckpointError, match=r"experts.4.w1.weight.*missing"):
        ranks = ThreadRanks(path, tmp_path / "store2", 2, ep=2)
    assert ranks is None


def test_moe_config_reads_published_names(tmp_path: Path) -> None:
    path = make_moe(tmp_path / "model", "qwen3_moe")
    with LLM(path) as llm:
        expected = llm.generate(PROMPTS, max_new_tokens=2)
    edited(path, lambda config: config.update(num_experts=config.pop("num_local_experts")))
    with LLM(path) as llm:
        assert llm.generate(PROMPTS, max_new_tokens=2) == expected


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"tp": 2, "ep": 4}, ConfigError, "ep=4: must divide tp=2"),
        ({"ep": 0}, ConfigError, "ep=0: must be an integer ≥ 1"),
        ({"tp": 5}, UsageError, "tp=5 is more than the model's 4 heads"),
    ],
)
def test_moe_rejects_invalid_tp_and_ep(
    tmp_path: Path, config: dict[str, int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(make_moe(tmp_path / "model", "mixtral"), **config)
