"""Speculative decoding: outputs equal the plain engine's, whatever is proposed and however it is scheduled."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint
from engine_helpers import ThreadRanks
from engine_observers import Memory
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_checkpoints import make_moe
from safetensors.torch import load_file, save_file
from soak_cases import mostly_soak
from speculation import OracleProposer, speculate

from tapscope.core.errors import CheckpointError, ConfigError
from tapscope.engine import LLM, Generation, SamplingParams
from tapscope.engine.api.native_request import LogprobOptions
from tapscope.engine.api.native_response import ResponseStyle, answer
from tapscope.engine.requests.drafts import Drafts
from tapscope.engine.requests.output import Output
from tapscope.engine.server.metrics import ServerMetrics, info_of

SHARED = [(7 * i + i // 3) % 500 for i in range(24)]
PROMPTS = [[5, 6, 7] * 4, SHARED, [300], [*SHARED[:13], 9, 8], [*SHARED, 11, 12], [9, 8, 7, 6, 5]]
NUM_NEW = 20
HYBRIDS = ["mamba2", "bamba", "zamba2", "falcon_h1", "lfm2", "jamba", "nemotron_h", "qwen3_next", "kimi_linear"]
PARAMS = {
    "greedy": SamplingParams(max_new_tokens=NUM_NEW),
    "sampled": SamplingParams(max_new_tokens=NUM_NEW, temperature=0.9, top_p=0.9, seed=3, ignore_eos=True, logprobs=2),
    "penalties": SamplingParams(
        max_new_tokens=NUM_NEW,
        temperature=0.7,
        seed=5,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        presence_penalty=0.4,
        min_new_tokens=6,
        bad_words_ids=((7,), (5, 6)),
    ),
    "biased": SamplingParams(
        max_new_tokens=NUM_NEW, logit_bias={40: 9.0, 41: 8.0, 1: 5.0}, frequency_penalty=1.0, min_new_tokens=4
    ),
    "grammar": SamplingParams(max_new_tokens=NUM_NEW, regex="(ab|cd)*[0-9]{3}x", temperature=0.5, seed=1),
    "short": SamplingParams(max_new_tokens=2, ignore_eos=True, full_logprobs=True),
    "stop": SamplingParams(max_new_tokens=NUM_NEW, stop=["a", "e"], temperature=1.0, seed=9, ignore_eos=True),
}
"""Hidden states of any row would also differ if a rejected draft were kept."""

Result = tuple[Any, ...]


def _result(generation: Generation) -> Result:
    given = generation
    return given.token_ids, given.text, given.finish_reason, given.matched, given.reason, given.logprobs


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama") / "model", "llama", seed=1, num_hidden_layers=2)


@pytest.fixture(scope="module")
def plain(path: Path) -> dict[tuple[str, int], Result]:
    """The plain engine's result by name in PARAMS and index in PROMPTS."""
    with LLM(path, batch_invariant=True) as llm:
        return {
            (name, which): _result(generation)
            for name, params in PARAMS.items()
            for which, generation in enumerate(llm.generate(PROMPTS, params))
        }


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    """An engine with few pages and rows: prompts are chunked and requests preempted."""
    options = {"page_size": 4, "num_pages": 24, "max_num_batched_tokens": 13}
    with LLM(path, batch_invariant=True, check_invariants=True, speculative_algorithm="NGRAM", **options) as made:
        yield made


@settings(max_examples=12)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, len(PROMPTS) - 1), st.sampled_from(list(PARAMS))),
        min_size=1,
        max_size=8,
    ),
    accuracy=st.sampled_from([0.0, 0.6, 0.95]),
    num_drafts=st.integers(1, 6),
)
def test_speculation_of_any_schedule_gives_the_same_outputs(
    llm: LLM,
    plain: dict[tuple[str, int], Result],
    arrivals: list[tuple[int, int, str]],
    accuracy: float,
    num_drafts: int,
) -> None:
    done: dict[str, Generation] = {}
    asked: dict[str, tuple[str, int]] = {}
    outputs = {tuple(PROMPTS[which]): plain[name, which][0] for _, which, name in arrivals}
    speculate(llm, OracleProposer(outputs, accuracy, 512), num_drafts)
    for wait, which, name in arrivals:
        asked[llm.submit(PROMPTS[which], PARAMS[name])] = (name, which)
        for _ in range(wait):
            done |= {generation.request: generation for generation in llm.step()}
    while llm.has_work:
        done |= {generation.request: generation for generation in llm.step()}
    for request, key in asked.items():
        assert _result(done[request]) == plain[key]
    assert llm.engine.scheduler.kv_cache_manager.num_used == 0


def test_speculation_saves_steps(path: Path, plain: dict[tuple[str, int], Result]) -> None:
    with LLM(path, batch_invariant=True, check_invariants=True, speculative_algorithm="NGRAM") as llm:
        outputs = {tuple(prompt): plain["sampled", which][0] for which, prompt in enumerate(PROMPTS)}
        speculate(llm, OracleProposer(outputs, 1.0, 512), 4)
        found = llm.generate(PROMPTS, PARAMS["sampled"])
        assert [_result(each) for each in found] == [plain["sampled", which] for which in range(len(PROMPTS))]
        assert llm.engine.scheduler.num_steps == 6  # two for prompts that share pages, then 5 tokens in each
        state = llm.engine.state()["speculation"]
        sample = b'spec_accepted_by_position_total{dp_rank="0",model_name="tiny",position="3"}'
        assert sample in ServerMetrics("tiny").exposition([{"speculation": state}])
        summed = info_of([llm.engine.state()] * 2)["speculation"]
        assert summed["num_accepted_tokens"] == 2 * state["num_accepted_tokens"]
        assert summed["acceptance_length"] == state["acceptance_length"]
        assert state["num_draft_tokens"] == state["num_accepted_tokens"] == 15 * len(PROMPTS)
        assert state["acceptance_length"] > 4


@pytest.mark.parametrize(
    "family",
    mostly_soak(
        ["gemma3", "deepseek_v3", *HYBRIDS],
        default=["gemma3", "qwen3_next", "deepseek_v3"],
    ),
)
def test_speculation_with_windows_and_recurrent_states(tmp_path: Path, family: str) -> None:
    """With windowed pages, and with recurrent states that are rolled back to the last accepted row."""
    make = make_checkpoint if family in FAMILIES else make_moe
    path = make(tmp_path / "model", family, seed=3)
    options: dict[str, Any] = {"page_size": 4, "max_num_batched_tokens": 17, "batch_invariant": True}
    if family not in ("gemma3", "deepseek_v3"):
        options |= {"state_checkpoint_interval": 8}
    prompts, params = [PROMPTS[1], PROMPTS[4]], PARAMS["sampled"]
    with LLM(path, **options) as llm:
        expected = [_result(each) for each in llm.generate(prompts, params)]
    with LLM(path, check_invariants=True, num_pages=17, speculative_algorithm="NGRAM", **options) as llm:
        outputs = {tuple(prompt): each[0] for prompt, each in zip(prompts, expected, strict=True)}
        speculator = speculate(llm, OracleProposer(outputs, 0.8, 512), 3)
        for _ in range(2):  # the second round finds the prompts in the cache
            assert [_result(each) for each in llm.generate(prompts, params)] == expected
        stats = speculator.stats
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        assert llm.engine.scheduler.stats.cached_tokens > 0
        assert llm.engine.scheduler.kv_cache_manager.num_used == 0


def test_drafts_take_slots_of_checkpoints_that_are_not_used(tmp_path: Path) -> None:
    """The 9th prompt gets as many drafts as the first, although checkpoints of earlier prompts fill all slots."""
    path = make_checkpoint(tmp_path / "model", "lfm2", seed=3)
    options: dict[str, Any] = {
        "page_size": 4,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "state_checkpoint_interval": 4,
    }
    params, counts = SamplingParams(max_new_tokens=12, ignore_eos=True, logit_bias={40: 100.0}), []
    with LLM(path, speculative_algorithm="NGRAM", check_invariants=True, **options) as llm:
        for first in range(9):
            before = llm.engine.speculator.stats.num_draft_tokens
            llm.generate([[100 + first, 40, 41] * 5], params)
            counts.append(llm.engine.speculator.stats.num_draft_tokens - before)
    assert counts[-1] == counts[0] > 0


def test_speculation_does_not_return_values_of_rejected_rows(path: Path) -> None:
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, hidden_states=True)
    with LLM(path, batch_invariant=True) as llm:
        (expected,) = llm.generate(PROMPTS[1:2], params)
    with LLM(path, batch_invariant=True, speculative_algorithm="NGRAM") as llm:
        speculate(llm, OracleProposer({tuple(PROMPTS[1]): expected.token_ids}, 0.7, 512), 3)
        (found,) = llm.generate(PROMPTS[1:2], params)
    assert found.token_ids == expected.token_ids
    assert found.hidden_states is not None
    assert expected.hidden_states is not None
    assert (found.hidden_states.array() == expected.hidden_states.array()).all()


def test_speculation_is_counted_for_each_request(path: Path) -> None:
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, logit_bias={0: -100.0, 1: -100.0, 40: 100.0})
    with LLM(path, speculative_algorithm="NGRAM", speculative_num_steps=3) as llm:
        outputs = list(llm.stream([[5, 6, 7]], params))
        state = llm.engine.state()["speculation"]
    counts = outputs[-1].draft_counts
    assert counts == (state["num_verifications"], state["num_draft_tokens"], state["num_accepted_tokens"])
    assert Output.build(outputs[-1].plain()).draft_counts == counts
    meta = answer(outputs[-1], 1.0, LogprobOptions(), ResponseStyle(), has_text=True)["meta_info"]
    assert (meta["spec_verify_ct"], meta["spec_draft_token_num"], meta["spec_accept_token_num"]) == counts
    assert meta["spec_accept_length"] == state["acceptance_length"] > 1
    assert [len(output.token_ids) for output in outputs][:4] == [1, 1, 1, 4]  # two tokens repeat from the third on


def test_speculation_switches_itself_off(path: Path) -> None:
    with LLM(path, speculative_algorithm="NGRAM", observer=Memory) as llm:
        speculator = speculate(llm, OracleProposer({}, 0.0, 512), 4)
        params = SamplingParams(max_new_tokens=60, ignore_eos=True, logit_bias={0: -100.0, 1: -100.0})
        llm.generate([[5, 6, 7]], params)
        assert speculator.stats.num_accepted_tokens == 0
        assert speculator.stats.drafted_by_position == [6, 2, 1, 1]
        phases = [info.phase for info in llm.observer.steps]
        assert (phases.count("verify"), phases.count("decode")) == (6, 53)
        verify = next(info for info in llm.observer.steps if info.phase == "verify")
        assert (list(verify.drafts.values()), verify.num_rows, len(verify.row_sets["logits"])) == ([4], 5, 5)
        metrics = [each for each in llm.observer.metrics if "num_draft_tokens" in each]
        assert [each["num_accepted_tokens"] for each in metrics] == [0.0] * 6


def test_speculation_verifies_on_all_ranks(path: Path, tmp_path: Path) -> None:
    ranks = ThreadRanks(path, tmp_path / "store", 2, page_size=4)
    drafts = {"0": Drafts(()), "1": Drafts(())}
    plan = ranks.scheduler.plan

    def with_drafts(**options: Any) -> Any:
        for request in ranks.scheduler.running:
            drafts[request.id] = Drafts((*request.generated[-1:], 3) if request.can_speculate else ())
        return plan(drafts=drafts, **options)

    expected = [list(request.generated) for request in ranks.generate(PROMPTS[:2], 12)]
    ranks.scheduler.plan = with_drafts  # type: ignore[method-assign]
    assert [list(request.generated) for request in ranks.generate(PROMPTS[:2], 12)] == expected
    ranks.close()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"speculative_algorithm": "MEDUSA"},
            "speculative_algorithm='MEDUSA': must be one of NGRAM, STANDALONE, NEXTN, EAGLE, EAGLE3",
        ),
        ({"speculative_num_steps": 3}, "speculative_num_steps=3: needs speculative_algorithm, such as 'NGRAM'"),
        ({"speculative_algorithm": "STANDALONE"}, "'STANDALONE': needs speculative_draft_model_path"),
        (
            {"speculative_algorithm": "NGRAM", "speculative_draft_model_path": "x"},
            "speculative_draft_model_path='x': 'NGRAM' has no draft model; use 'STANDALONE', 'EAGLE' or 'EAGLE3'",
        ),
        (
            {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3, "speculative_num_draft_tokens": 3},
            r"speculative_num_draft_tokens=3: must be speculative_num_steps \+ 1 = 4",
        ),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 1}, "must be an integer ≥ 2"),
        (
            {"speculative_algorithm": "NGRAM", "speculative_eagle_topk": 2},
            "speculative_eagle_topk=2: 'NGRAM' proposes chains; trees need 'NEXTN', 'EAGLE' or 'EAGLE3'",
        ),
        (
            {
                "speculative_algorithm": "NEXTN",
                "speculative_eagle_topk": 2,
                "speculative_num_steps": 2,
                "speculative_num_draft_tokens": 8,
            },
            "speculative_num_draft_tokens=8: .* give a tree of 6 tokens; use at most 7",
        ),
        (
            {"speculative_ngram_min_match_window_size": 5, "speculative_ngram_max_match_window_size": 4},
            "speculative_ngram_min_match_window_size=5: must be at most speculative_ngram_max_match_window_size=4",
        ),
        (
            {"speculative_ngram_min_match_window_size": 3},
            "speculative_ngram_min_match_window_size=3: needs speculative_algorithm='NGRAM'",
        ),
        (
            {"speculative_ngram_max_match_window_size": 9, "speculative_algorithm": "NEXTN"},
            "speculative_ngram_max_match_window_size=9: needs speculative_algorithm='NGRAM'",
        ),
        (
            {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": ""},
            "speculative_draft_model_path='': must be a non-empty string",
        ),
    ],
)
def test_speculation_settings_that_do_not_fit_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("anything", **values)


def _with_noise(path: Path) -> Path:
    """Write a draft checkpoint: the target's weights with noise, which agrees often but not always."""
    folder = path.parent / "draft"
    shutil.copytree(path, folder)
    torch.manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    noisy = {name: weight + 0.004 * torch.randn_like(weight) for name, weight in weights.items()}
    save_file(noisy, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def draft(path: Path) -> Path:
    return _with_noise(path)


def test_draft_checkpoint_proposes_what_the_target_draws(
    path: Path, draft: Path, plain: dict[tuple[str, int], Result]
) -> None:
    """With batches, chunks, preemption and prefix hits; the draft's own cache leaks no pages."""
    options: dict[str, Any] = {"page_size": 4, "num_pages": 24, "max_num_batched_tokens": 13, "batch_invariant": True}
    options |= {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": draft}
    with LLM(path, check_invariants=True, **options) as llm:
        proposer = llm.engine.speculator.proposer
        names = [name for name in ("sampled", "penalties", "grammar") for _ in PROMPTS]
        for _ in range(2):
            found = llm.generate(PROMPTS * 3, [PARAMS[name] for name in names])
            assert [_result(each) for each in found] == [plain[name, i % 6] for i, name in enumerate(names)]
            proposer.check()
            assert not proposer._requests
        assert proposer._cache.num_used == 0
        stats = llm.engine.speculator.stats
        assert stats.num_accepted_tokens > 0.5 * stats.num_draft_tokens
        assert stats.num_accepted_tokens < stats.num_draft_tokens
        assert llm.engine.scheduler.stats.num_preemptions > 0


@pytest.mark.parametrize(
    ("family", "num_slots"),
    mostly_soak([(each, 22) for each in HYBRIDS] + [("zamba2", 7)], default=[("lfm2", 22)]),
)
def test_draft_with_recurrent_state_goes_back_to_the_last_accepted_token(
    tmp_path: Path, family: str, num_slots: int
) -> None:
    """With batches, chunks, preemption and prefix hits; with few slots, requests take turns.

    Every draft of a greedy request equals the tokens that the draft model alone generates.
    """
    path = (make_checkpoint if family in FAMILIES else make_moe)(tmp_path / "model", family, seed=3)
    options: dict[str, Any] = {"page_size": 4, "max_num_batched_tokens": 17, "state_checkpoint_interval": 8}
    options |= {"batch_invariant": True, "max_num_seqs": 4}
    params = [PARAMS[name] for name in ("sampled", "penalties", "greedy") for _ in PROMPTS]
    with LLM(path, **options) as llm:
        expected = [_result(each) for each in llm.generate(PROMPTS * 3, params)]
        states = llm.engine.runner.kv_cache.states
        one = (states.windows.nbytes + states.matrices.nbytes) // (states.num_slots + 2)
    options |= {"kv_cache_memory_bytes": 2 * num_slots * one + 1}
    draft, drafted = _with_noise(path), {}
    speculative = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": draft}
    with LLM(path, check_invariants=True, num_pages=24, **options, **speculative) as llm:
        proposer, stats = llm.engine.speculator.proposer, llm.engine.speculator.stats
        propose = proposer.propose

        def note(requests: Any) -> Any:
            found = propose(requests)
            greedy = [request for request, _ in requests if request.params is PARAMS["greedy"]]
            drafted.update((tuple(each.tokens), found[each.id].tokens) for each in greedy if each.id in found)
            return found

        proposer.propose = note
        assert proposer._states.slots.num_pages == min(num_slots, 16)
        for _ in range(2):
            assert [_result(each) for each in llm.generate(PROMPTS * 3, params)] == expected
            proposer.check()
        assert proposer._cache.num_used == 0
        assert num_slots < 8 or llm.engine.scheduler.stats.num_preemptions > 0
    assert 0.5 * stats.num_draft_tokens < stats.num_accepted_tokens < stats.num_draft_tokens
    assert max(map(len, drafted.values())) > 1
    with LLM(draft, **options) as llm:
        alone = llm.generate([list(tokens) for tokens in drafted], SamplingParams(max_new_tokens=3, ignore_eos=True))
    for one, tokens in zip(alone, drafted.values(), strict=True):
        assert one.token_ids[: len(tokens)] == tokens


def test_draft_checkpoint_runs_on_all_ranks(path: Path, draft: Path, plain: dict[tuple[str, int], Result]) -> None:
    options: dict[str, Any] = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": draft}
    with LLM(path, tp=2, batch_invariant=True, speculative_num_steps=2, **options) as llm:
        found = llm.generate(PROMPTS, PARAMS["sampled"])
        stats = llm.engine.speculator.stats
        assert len(stats.drafted_by_position) == 2
        assert stats.num_accepted_tokens > 0.5 * stats.num_draft_tokens
    assert [each.token_ids for each in found] == [plain["sampled", which][0] for which in range(len(PROMPTS))]


def test_draft_checkpoint_with_another_vocabulary_is_refused(path: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", vocab_size=600)
    options: dict[str, Any] = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": other}
    (other / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="its vocabulary has 600 tokens, but the target's has 512; use a draft with"):
        LLM(path, **options)
    content = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    first, second = list(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError, match="its vocabulary has"):
        LLM(path, **options)
    with pytest.raises(CheckpointError, match="nowhere"):
        LLM(path, speculative_algorithm="STANDALONE", speculative_draft_model_path=tmp_path / "nowhere")
