"""The sampler: scores equal those of transformers' processors and warpers, and draws depend on the request alone."""

import math
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_llama
from engine_helpers import reference_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as hf

from tapscope.core.errors import UsageError
from tapscope.engine import LLM, SamplingParams
from tapscope.engine.requests.request import Request
from tapscope.engine.sampling.filters import keep_top_p
from tapscope.engine.sampling.gumbel import gumbel, hashes
from tapscope.engine.sampling.sampler import Sampler

VOCAB, EOS = 40, (1, 2)
CPU = torch.device("cpu")


def _request(prompt: list[int], generated: list[int], **params: Any) -> Request:
    request = Request(id="r", prompt_ids=tuple(prompt), params=SamplingParams(max_new_tokens=99, **params))
    request.tokens += generated
    return request


def _scores(requests: list[Request], logits: Tensor, sampler: Sampler | None = None) -> tuple[Tensor, Tensor]:
    sampler = sampler or Sampler(VOCAB, EOS, 0, CPU)
    for i, request in enumerate(requests):
        request.id = str(i)
        sampler.add_request(request)
    tokens, scores = sampler.draw(logits, requests)
    return tokens, scores


def _by_transformers(request: Request, logits: Tensor) -> Tensor:
    """Return scores [vocab] from transformers' own classes, in the order in which `generate` applies them."""
    params, prompt = request.params, len(request.prompt_ids)
    chain: list[Any] = []
    if params.logit_bias:
        chain.append(hf.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias.items()]))
    chain.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    chain.append(hf.MinNewTokensLengthLogitsProcessor(prompt, params.min_new_tokens, list(EOS)))
    if params.temperature:
        chain.append(hf.TemperatureLogitsWarper(params.temperature))
        chain += [hf.TopKLogitsWarper(params.top_k)] if params.top_k else []
        chain.append(hf.TopPLogitsWarper(params.top_p))
        chain.append(hf.MinPLogitsWarper(params.min_p))
    ids, scores = torch.tensor([request.tokens]), logits[None].clone()
    for step in chain:
        scores = step(ids, scores)
    return scores[0]


TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)


@st.composite
def _requests(draw: st.DrawFn) -> Request:
    one = st.floats(0.01, 1.0)
    return _request(
        draw(TOKENS),
        draw(TOKENS),
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 1, 7, VOCAB, 1000])),
        top_p=draw(st.one_of(st.just(1.0), one)),
        min_p=draw(st.one_of(st.just(0.0), one)),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 1.3, 3.0])),
        logit_bias=draw(st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5, width=32), max_size=3)),
        min_new_tokens=draw(st.sampled_from([0, 6])),
    )


@settings(max_examples=40)
@given(requests=st.lists(_requests(), min_size=1, max_size=4), seed=st.integers(0, 1 << 20))
def test_sampler_scores_equal_transformers_in_mixed_batches(requests: list[Request], seed: int) -> None:
    logits = torch.randn(len(requests), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    tokens, scores = _scores(requests, logits)
    for row, request in enumerate(requests):
        expected = _by_transformers(request, logits[row])
        if request.params.is_plain:
            assert torch.equal(scores[row], logits[row])
        elif not _is_clear(request, logits[row]):
            continue
        else:
            assert torch.equal(scores[row].isinf(), expected.isinf())
            torch.testing.assert_close(scores[row].softmax(-1), expected.softmax(-1), atol=1e-6, rtol=1e-5)
        if request.params.is_greedy:
            assert tokens[row] == expected.argmax()
        assert not expected[tokens[row]].isinf()


def _is_clear(request: Request, logits: Tensor) -> bool:
    """Return whether no token is at the edge of top-p or min-p, where rounding decides."""
    params = request.params
    wide = _request(list(request.prompt_ids), list(request.generated), **{**_plain(params), "top_p": 1.0, "min_p": 0.0})
    chances = _by_transformers(wide, logits).softmax(-1).sort(descending=True).values
    edges = (chances.cumsum(-1) - params.top_p).abs().min(), (chances / chances[0] - params.min_p).abs().min()
    return all(edge > 1e-5 for edge in edges)


def _plain(params: SamplingParams) -> dict[str, Any]:
    values = params.plain()
    del values["max_new_tokens"]
    return values


@settings(max_examples=40)
@given(
    prompt=TOKENS,
    generated=TOKENS,
    presence=st.floats(-2, 2, width=16),
    frequency=st.floats(-2, 2, width=16),
    repetition=st.sampled_from([1.0, 1.5]),
)
def test_token_counts_follow_the_output(
    prompt: list[int], generated: list[int], presence: float, frequency: float, repetition: float
) -> None:
    params = {"presence_penalty": presence, "frequency_penalty": frequency, "repetition_penalty": repetition}
    request, sampler = _request(prompt, [], **params), Sampler(VOCAB, EOS, 0, CPU)
    sampler.add_request(request)
    logits = torch.linspace(-3, 3, VOCAB)[None]
    for token in generated:
        sampler.draw(logits, [request])
        request.tokens.append(token)
    scores = sampler.draw(logits, [request])[1]
    fresh = _scores([_request(prompt, generated, **params)], logits)[1]
    assert torch.equal(scores, fresh)
    counts = Counter(generated)
    for token in range(VOCAB):
        score = logits[0, token].item()
        if token in prompt or token in counts:
            score = score * repetition if score < 0 else score / repetition
        expected = score - counts[token] * frequency - (token in counts) * presence
        assert scores[0, token].item() == pytest.approx(expected, abs=1e-5)


def test_keep_top_p_with_a_large_nucleus() -> None:
    vocab = 3000
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(0)) * torch.tensor([[0.1], [6.0], [1.0]])
    top_p = torch.tensor([0.9, 0.9, 0.2])
    kept = ~keep_top_p(logits, top_p).isinf()
    for row in range(3):
        expected = hf.TopPLogitsWarper(top_p[row].item())(torch.zeros(1, 1), logits[row][None])
        assert torch.equal(kept[row], ~expected[0].isinf())
    assert kept.sum(-1).tolist()[0] > 2000


def test_token_counts_reuse_cleared_rows() -> None:
    sampler = Sampler(VOCAB, EOS, 0, CPU)
    for round_ in range(3):
        requests = [_request([round_], [5 + round_], frequency_penalty=1.0) for _ in range(9)]
        _, scores = _scores(requests, torch.zeros(9, VOCAB), sampler)
        expected = torch.zeros(VOCAB).index_fill(0, torch.tensor([5 + round_]), -1.0)
        assert torch.equal(scores, expected.expand(9, -1))
        for request in requests:
            sampler.remove_request(request)
            sampler.remove_request(request)


def _murmur3(data: bytes) -> int:
    """Compute MurmurHash3_x86_32 with seed 0, full words and a tail, written from its description."""
    state, mask = 0, 0xFFFFFFFF

    def mixed(word: int) -> int:
        word = word * 0xCC9E2D51 & mask
        return (word << 15 | word >> 17) & mask

    whole = len(data) // 4 * 4
    for (word,) in struct.iter_unpack("<I", data[:whole]):
        state ^= mixed(word) * 0x1B873593 & mask
        state = ((state << 13 | state >> 19) & mask) * 5 + 0xE6546B64 & mask
    if len(data) > whole:
        state ^= mixed(int.from_bytes(data[whole:], "little")) * 0x1B873593 & mask
    state ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> shift) * factor & mask
    return state ^ state >> 16


def test_gumbel_hashes_are_murmur3() -> None:
    assert [_murmur3(text) for text in (b"", b"test", b"Hello, world!")] == [0, 0xBA6BD213, 0xC0363E43]
    seeds, positions = [0, 7, -1, (1 << 62) + 12345], [0, 3, 99_999, 5]
    bits, noise = hashes(seeds, positions, 300, CPU), gumbel(seeds, positions, 300, CPU)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for token in (0, 1, 17, 298, 299):
            expected = _murmur3(struct.pack("<QII", seed % (1 << 64), position, token))
            assert bits[row, token].item() % (1 << 32) == expected
            uniform = (expected + 0.5) / 2**32
            assert noise[row, token].item() == pytest.approx(-math.log(-math.log1p(-uniform)), abs=1e-4, rel=1e-5)
    assert torch.equal(gumbel(seeds[2:], positions[2:], 300, CPU), noise[2:])


@pytest.mark.parametrize("varied", ["seed", "position"])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "top_k": 12}, {"top_p": 0.8}, {"min_p": 0.1, "seed": 3}])
def test_sampler_follows_the_models_distribution(varied: str, params: dict[str, Any]) -> None:
    count = 20_000
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 1.5
    request = _request([3], [], **{"temperature": 1.0} | params)
    scores = _scores([request], logits[None])[1][0]
    series, constant = list(range(count)), [12] * count
    noise = gumbel(*((series, constant) if varied == "seed" else (constant, series)), VOCAB, CPU)
    drawn = (scores + noise).argmax(-1).bincount(minlength=VOCAB)
    chances = scores.double().softmax(-1)
    assert drawn[chances == 0].sum() == 0
    kept = chances > 0
    statistic = ((drawn[kept] - count * chances[kept]) ** 2 / (count * chances[kept])).sum().item()
    freedom = int(kept.sum()) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)  # fixed sample; the bound is 4 standard deviations


def test_gumbel_noise_is_independent_for_adjacent_seeds_and_positions() -> None:
    noise = torch.stack([gumbel([seed] * 4000, range(4000), 2, CPU) for seed in (1, 2)])
    series = noise.permute(0, 2, 1).flatten(0, 1)  # [seed x token, position]
    correlation = torch.corrcoef(torch.cat([series[:, 1:], series[:, :-1]]))
    assert (correlation - torch.eye(8)).abs().max() < 0.06


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1)


PROMPTS = [[5, 6, 7], list(range(40, 75)), [300], [9, 8, 7, 6]]
MIXED = [
    SamplingParams(max_new_tokens=12, temperature=1.5, seed=1, ignore_eos=True),
    SamplingParams(max_new_tokens=12, ignore_eos=True),
    SamplingParams(max_new_tokens=12, temperature=0.8, top_p=0.9, top_k=50, seed=2, frequency_penalty=0.5),
    SamplingParams(max_new_tokens=12, repetition_penalty=1.4, min_new_tokens=4, logit_bias={7: 1.0}),
]


def test_seeded_sampling_is_independent_of_batch_and_chunks(path: Path) -> None:
    with LLM(path) as llm:
        together = [g.token_ids for g in llm.generate(PROMPTS, MIXED)]
        alone = [llm.generate([prompt], params)[0].token_ids for prompt, params in zip(PROMPTS, MIXED, strict=True)]
        reverse = [g.token_ids for g in llm.generate(PROMPTS[::-1], MIXED[::-1])][::-1]
    with LLM(path, max_num_batched_tokens=5, max_num_seqs=3, page_size=4) as llm:
        chunked = [g.token_ids for g in llm.generate(PROMPTS, MIXED)]
    assert together == alone == reverse == chunked
    assert len(set(together)) == 4


@pytest.mark.timeout(120)
def test_seeded_sampling_is_independent_of_ranks(path: Path) -> None:
    with LLM(path) as llm:
        one = [g.token_ids for g in llm.generate(PROMPTS, MIXED)]
    with LLM(path, tp=2) as llm:
        assert [g.token_ids for g in llm.generate(PROMPTS, MIXED)] == one


def test_sampling_without_seed_derives_from_the_engine_seed(path: Path) -> None:
    params = SamplingParams(max_new_tokens=8, temperature=2.0, ignore_eos=True)
    runs = []
    for seed in (0, 0, 9):
        with LLM(path, seed=seed) as llm:
            runs.append([g.token_ids for g in llm.generate([[5, 6]] * 3, params)])
    assert runs[0] == runs[1] != runs[2]
    assert len(set(runs[0] + runs[2])) == 6


def test_n_generations_are_adjacent(path: Path) -> None:
    params = SamplingParams(max_new_tokens=8, temperature=2.0, seed=4, n=3, ignore_eos=True)
    with LLM(path) as llm:
        several = llm.generate([[5, 6], [7]], params, request_ids=["a", "b"])
        first = llm.generate([[5, 6]], params.child(0))[0]
        assert [g.request for g in llm.generate([[5]], params)] == ["1-0", "1-1", "1-2"]
        with pytest.raises(UsageError, match=r"asks for n=3; submit a request for each params.child"):
            llm.submit([5], params)
    assert [g.request for g in several] == ["a-0", "a-1", "a-2", "b-0", "b-1", "b-2"]
    assert len({g.token_ids for g in several[:3]}) == 3
    assert several[0].token_ids == first.token_ids


def test_raw_logprobs_are_of_the_models_logits(path: Path) -> None:
    params = SamplingParams(
        max_new_tokens=5, temperature=1.5, seed=1, logprobs=3, prompt_logprobs=2, full_logprobs=True, ignore_eos=True
    )
    prompt = PROMPTS[1]
    for settings_ in ({}, {"max_num_batched_tokens": 7}, {"logits": "all"}):
        with LLM(path, **settings_) as llm:
            generation = llm.generate([[5, 6], prompt], [SamplingParams(max_new_tokens=2), params])[1]
        expected = reference_logits(path, [*prompt, *generation.token_ids]).log_softmax(-1)
        assert generation.prompt_logprobs[0] is None
        logprobs = [*generation.prompt_logprobs[1:], *generation.logprobs]
        assert [item.token_id for item in logprobs] == [*prompt[1:], *generation.token_ids]
        assert len(generation.logprobs) == 5
        for position, item in enumerate(logprobs):
            row = expected[position]
            assert item.logprob == pytest.approx(row[item.token_id].item(), abs=1e-4)
            best = row.topk(len(item.top))
            assert [token for token, _ in item.top] == best.indices.tolist()
            assert [value for _, value in item.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [len(item.top) for item in logprobs] == [2] * (len(prompt) - 1) + [3] * 5
        assert generation.prompt_logprobs[1].full is None
        assert torch.tensor(generation.logprobs[0].full).allclose(expected[len(prompt) - 1], atol=1e-4)


def test_processed_logprobs_are_of_the_sampling_scores(path: Path) -> None:
    params = SamplingParams(
        max_new_tokens=6, temperature=0.5, top_k=4, seed=1, logprobs=6, logprobs_mode="processed", ignore_eos=True
    )
    with LLM(path) as llm:
        (generation,) = llm.generate([[5, 6]], params)
    logits = reference_logits(path, [5, 6, *generation.token_ids])
    for position, item in enumerate(generation.logprobs, start=1):
        best = (logits[position] / 0.5).topk(4)
        assert [token for token, _ in item.top[:4]] == best.indices.tolist()
        assert [v for _, v in item.top[:4]] == pytest.approx(best.values.log_softmax(-1).tolist(), abs=1e-4)
        assert [v for _, v in item.top[4:]] == [-math.inf] * 2
        assert item.token_id in best.indices.tolist()


def test_logprobs_of_forced_tokens(path: Path) -> None:
    with LLM(path) as llm:
        params = SamplingParams(max_new_tokens=2, logprobs=0)
        (generation,) = llm.generate([[5, 6]], params, forced_token_ids=[[17, 18]])
    rows = reference_logits(path, [5, 6, 17]).log_softmax(-1)
    assert [item.token_id for item in generation.logprobs] == [17, 18]
    assert generation.logprobs[1].logprob == pytest.approx(rows[2, 18].item(), abs=1e-4)
    assert generation.logprobs[1].top == ()


def test_stop_tokens_respect_min_new_tokens(path: Path) -> None:
    wanted = {33: 100.0}
    with LLM(path) as llm:
        (stopped,) = llm.generate([[5]], SamplingParams(stop_token_ids=[33], logit_bias=wanted, ignore_eos=True))
        assert (stopped.token_ids, stopped.finish_reason, stopped.matched) == ((33,), "stop", 33)
        params = SamplingParams(stop_token_ids=[33], logit_bias=wanted, min_new_tokens=3)
        (later,) = llm.generate([[5]], params)
        assert later.token_ids.index(33) == 3
        (ended,) = llm.generate([[5]], SamplingParams(logit_bias={1: 100.0}, min_new_tokens=5))
        assert len(ended.token_ids) == 6
        assert (ended.finish_reason, ended.matched) == ("stop", 1)


def test_stop_strings_end_a_request_and_free_its_pages(path: Path) -> None:
    with LLM(path) as llm:
        ids = llm.tokenizer.encode("def value(x): return x")
        params = SamplingParams(max_new_tokens=len(ids), stop=["lue(x"], logprobs=0)
        (generation,) = llm.generate([[5]], params, forced_token_ids=[ids])
        assert (generation.text, generation.finish_reason, generation.matched) == ("def va", "stop", "lue(x")
        assert len(generation.token_ids) == len(generation.logprobs) < len(ids)
        assert llm.engine.scheduler.kv_cache_manager.num_used == 0
        llm.submit([5], params, forced_token_ids=ids)
        outputs = []
        while llm.has_work:
            outputs += llm.advance()
        assert "".join(output.text for output in outputs) == "def va"
        assert [output.finish_reason for output in outputs[-2:]] == [None, "stop"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {512: 1}}, "invalid token id 512 in logit_bias: expected 0 to 511"),
        ({"stop_token_ids": [600]}, "invalid token id 600 in stop_token_ids"),
        ({"logprobs": 513}, "logprobs=513: the vocabulary has 512 tokens"),
    ],
)
def test_sampler_rejects_unknown_token_ids(path: Path, params: dict, message: str) -> None:
    with LLM(path) as llm:
        with pytest.raises(UsageError, match=message):
            llm.generate([[5]], SamplingParams(**params))
        assert not llm.has_work


def test_preemption_does_not_change_sampling(path: Path) -> None:
    params = [
        SamplingParams(max_new_tokens=30, temperature=1.5, seed=i, ignore_eos=True, frequency_penalty=0.5, logprobs=1)
        for i in range(4)
    ]
    prompts = [[5 + i, 6, 7] for i in range(4)]
    with LLM(path, page_size=4) as llm:
        calm = llm.generate(prompts, params)
    with LLM(path, page_size=4, num_pages=14) as llm:
        tight = llm.generate(prompts, params)
        assert llm.engine.scheduler.stats.num_preemptions > 0
    assert [g.token_ids for g in tight] == [g.token_ids for g in calm]
    for one, other in zip(tight, calm, strict=True):
        assert [item.logprob for item in one.logprobs] == pytest.approx([i.logprob for i in other.logprobs], abs=1e-4)


def test_n_generations_share_the_prompt(path: Path) -> None:
    prompt = list(range(20, 60))
    with LLM(path, page_size=4) as llm:
        generations = llm.generate([prompt], SamplingParams(n=4, temperature=1.0, seed=1, max_new_tokens=3))
    assert [g.cached_tokens for g in generations] == [0, 36, 36, 36]


def test_prompt_logprobs_ignore_the_prefix_cache(path: Path) -> None:
    prompt = list(range(20, 60))
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=0)
    with LLM(path, page_size=4) as llm:
        first, second = (llm.generate([prompt], params)[0] for _ in range(2))
    assert [item.token_id for item in second.prompt_logprobs[1:]] == prompt[1:]
    assert second.prompt_logprobs == first.prompt_logprobs
