"""NaN logits: a warning, a counter, unchanged tokens, and removal of the request's pages from the prefix cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, make_llama
from engine_helpers import reference_tokens
from engine_http import Served

from tapscope.engine import LLM, SamplingParams
from tapscope.engine.engine import Engine
from tapscope.engine.sampling.sampled_step import NanCheck, SampledStep

PROMPTS = [[5, 6, 7], [300]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1)


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path) as made:
        yield made


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"logprobs": 1},
        {"temperature": 1.0, "top_p": 0.9},
        {"allowed_token_ids": (7, 9)},
        {"min_new_tokens": 2, "repetition_penalty": 1.1},
    ],
)
def test_nan_in_the_norm_is_counted_and_warned_of_once(
    llm: LLM, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(max_new_tokens=4, ignore_eos=True, **settings)
    llm.generate(PROMPTS, params)
    assert (llm.engine.state()["corrupted_requests"], _warnings(caplog)) == (0, [])
    llm.model.model.norm.weight.data.fill_(float("nan"))
    found = llm.generate(PROMPTS, params)
    assert [(len(each.token_ids), each.finish_reason) for each in found] == [(4, "length")] * 2
    assert llm.engine.state()["corrupted_requests"] == 2
    (warning,) = _warnings(caplog)
    assert warning.startswith("request '2': its logits contain NaN")
    assert "requests with NaN so far: 2" in warning


def test_nan_in_a_row_of_lm_head_is_found(llm: LLM) -> None:
    llm.model.lm_head.weight.data[9].fill_(float("nan"))
    found = llm.generate([PROMPTS[0]], max_new_tokens=2)
    assert found[0].token_ids == (9, 9)
    assert llm.engine.state()["corrupted_requests"] == 1


def test_decode_steps_that_do_not_copy_flags_read_them_for_token_0(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where copying the flags would block the host."""
    call, flags_read = SampledStep.__call__, []

    def without_flags(self: SampledStep, logits: Any) -> Any:
        tokens = call(self, logits)
        self._is_nan = None
        flags_read.append(tokens.tolist())
        return tokens

    monkeypatch.setattr(SampledStep, "__call__", without_flags)
    llm.generate(PROMPTS, SamplingParams(max_new_tokens=3, allowed_token_ids=(0, 1), ignore_eos=True))
    assert 0 in [token for tokens in flags_read for token in tokens]  # finite logits: not counted as NaN
    assert llm.engine.state()["corrupted_requests"] == 0
    llm.model.model.norm.weight.data.fill_(float("nan"))
    llm.generate(PROMPTS, max_new_tokens=3, ignore_eos=True)
    assert llm.engine.state()["corrupted_requests"] == 2


@pytest.fixture
def late_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of NaN checks arrive some steps later, as on a GPU that is running the next step."""
    check_nan = SampledStep.check_nan

    class Event:
        """Completes at the third query."""

        def __init__(self) -> None:
            self.num_asked = 0

        def query(self) -> bool:
            self.num_asked += 1
            return self.num_asked > 2

    def late(self: SampledStep, tokens: Any) -> NanCheck | None:
        check = check_nan(self, tokens)
        return None if check is None else replace(check, copied=Event())

    monkeypatch.setattr(SampledStep, "check_nan", late)
    report = Engine._report_nan
    monkeypatch.setattr(Engine, "_report_nan", lambda self, *, wait: report(self, wait=False))


def test_an_answer_that_is_on_its_way_is_reported_by_a_later_step(
    llm: LLM, late_answers: None, caplog: pytest.LogCaptureFixture
) -> None:
    llm.model.model.norm.weight.data.fill_(float("nan"))
    llm.submit(PROMPTS[0], SamplingParams(max_new_tokens=5, ignore_eos=True))
    counts = []
    while llm.has_work:
        llm.step()
        counts.append(llm.engine.state()["corrupted_requests"])
    assert counts == [0, 0, 1, 1, 1]
    assert len(_warnings(caplog)) == 1


LONG = [(7 * i) % 250 + 3 for i in range(30)]
"""Spans more than seven pages of four tokens."""


@contextmanager
def _nan_in_layer_0(llm: LLM) -> Iterator[None]:
    """Make computed keys, values and states NaN inside the context."""
    weight = next(each for name, each in llm.model.named_parameters() if ".layers.0." in name)
    values = weight.data.clone()
    weight.data.fill_(float("nan"))
    yield
    weight.data.copy_(values)


def _tokens_and_cached(llm: LLM, prompt: list[int]) -> tuple[list[int], int]:
    (found,) = llm.generate([prompt], max_new_tokens=8, ignore_eos=True)
    return list(found.token_ids), found.cached_tokens


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "gemma3", "bamba"], ids=["pages", "windows", "two groups", "states"]
)
@pytest.mark.parametrize("is_async", [False, True], ids=["alone", "steps ahead"])
def test_pages_of_a_request_with_nan_are_not_reused(tmp_path: Path, family: str, is_async: bool) -> None:
    path = make_checkpoint(tmp_path / "model", family, seed=1)
    expected = reference_tokens(path, LONG, 8)
    with LLM(path, page_size=4, num_pages=40, max_num_batched_tokens=10, check_invariants=True) as llm:
        llm.engine.async_scheduling = is_async
        with _nan_in_layer_0(llm):
            _tokens_and_cached(llm, LONG)
        assert llm.engine.state()["corrupted_requests"] == 1
        assert _tokens_and_cached(llm, LONG) == (expected, 0)
        assert _tokens_and_cached(llm, LONG) == (expected, 28)  # healthy pages are reused
        assert llm.engine.state()["corrupted_requests"] == 1


@pytest.mark.usefixtures("late_answers")
def test_pages_are_dropped_once_a_late_answer_arrives(path: Path) -> None:
    expected = reference_tokens(path, LONG, 8)
    with LLM(path, page_size=4, check_invariants=True) as llm:
        llm.engine.async_scheduling = True
        with _nan_in_layer_0(llm):
            llm.submit(LONG, SamplingParams(max_new_tokens=1))  # ends long before the result arrives
            llm.step()
        assert llm.engine.state()["kv_pages_cached"] == 7
        (other,) = llm.generate([PROMPTS[0]], max_new_tokens=5, ignore_eos=True)
        assert list(other.token_ids) == reference_tokens(path, PROMPTS[0], 5)
        assert llm.engine.state()["corrupted_requests"] == 1
        assert _tokens_and_cached(llm, LONG) == (expected, 0)


def test_pages_that_a_request_with_nan_took_from_the_cache_are_dropped(path: Path) -> None:
    """The cached pages may have caused the NaN: the request that computed them ended before it had logits."""
    expected = reference_tokens(path, LONG, 8)
    with LLM(path, page_size=4, max_num_batched_tokens=12, check_invariants=True) as llm:
        with _nan_in_layer_0(llm):
            llm.submit(LONG, SamplingParams(max_new_tokens=1), request_id="aborted")
            llm.step()
            llm.abort("aborted")
        assert llm.engine.state()["corrupted_requests"] == 0
        _, num_cached = _tokens_and_cached(llm, LONG)
        assert (num_cached, llm.engine.state()["corrupted_requests"]) == (12, 1)
        assert _tokens_and_cached(llm, LONG) == (expected, 0)


def test_nan_while_decoding_drops_the_pages_and_keeps_those_of_other_prompts(path: Path) -> None:
    other = [250, *LONG[1:]]
    with LLM(path, page_size=4, check_invariants=True) as llm:
        healthy, _ = _tokens_and_cached(llm, other)
        llm.submit(LONG, SamplingParams(max_new_tokens=20, ignore_eos=True))
        llm.submit([*LONG[:12], 9, 9], SamplingParams(max_new_tokens=20, ignore_eos=True))  # shares three pages
        for _ in range(6):
            llm.step()
        with _nan_in_layer_0(llm):
            llm.step()
        finished = []
        while llm.has_work:
            finished += llm.step()
        assert [len(each.token_ids) for each in finished] == [20, 20]  # running requests keep their pages
        assert llm.engine.state()["corrupted_requests"] == 2
        tokens, num_cached = _tokens_and_cached(llm, LONG)
        assert (tokens, num_cached) == (reference_tokens(path, LONG, 8), 0)
        assert _tokens_and_cached(llm, other) == (healthy, 28)


def test_a_preempted_request_with_nan_adds_no_page_to_the_cache(path: Path) -> None:
    with LLM(path, page_size=4, num_pages=40, check_invariants=True) as llm:
        with _nan_in_layer_0(llm):
            llm.submit(LONG, SamplingParams(max_new_tokens=20, ignore_eos=True))
            llm.step()
        llm.engine.scheduler.recompute()
        while llm.has_work:
            llm.step()
        assert llm.engine.state()["kv_pages_cached"] == 0
        assert _tokens_and_cached(llm, LONG) == (reference_tokens(path, LONG, 8), 0)


def test_a_server_answers_a_prompt_again_after_nan(path: Path) -> None:
    body = {"input_ids": LONG, "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    with LLM(path, page_size=4) as llm:
        served = Served(llm, [])
        try:
            with _nan_in_layer_0(llm):
                served.generate(**body).raise_for_status()
            for num_cached in (0, 28):
                answer = served.generate(**body).raise_for_status().json()
                assert answer["output_ids"] == reference_tokens(path, LONG, 8)
                assert answer["meta_info"]["cached_tokens"] == num_cached
        finally:
            served.close()


def test_metrics_count_requests_with_nan(path: Path) -> None:
    with LLM(path) as llm:
        llm.model.model.norm.weight.data.fill_(float("nan"))
        served = Served(llm, [])
        try:
            served.generate(input_ids=[5], sampling_params={"max_new_tokens": 2, "ignore_eos": True}).raise_for_status()
            sample = f'tapscope_engine_corrupted_requests_total{{dp_rank="0",model_name="{path}"}} 1.0'
            assert sample in served.client.get("/metrics").text
        finally:
            served.close()
