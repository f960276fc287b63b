"""NaN in the logits is reported: a warning, a counter, and tokens as before."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_llama
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
    """As on a GPU, where the host would wait for them."""
    call, flags_read = SampledStep.__call__, []

    def without_flags(self: SampledStep, logits: Any) -> Any:
        tokens = call(self, logits)
        self._is_nan = None
        flags_read.append(tokens.tolist())
        return tokens

    monkeypatch.setattr(SampledStep, "__call__", without_flags)
    llm.generate(PROMPTS, SamplingParams(max_new_tokens=3, allowed_token_ids=(0, 1), ignore_eos=True))
    assert 0 in [token for tokens in flags_read for token in tokens]  # a token 0 of finite logits is none
    assert llm.engine.state()["corrupted_requests"] == 0
    llm.model.model.norm.weight.data.fill_(float("nan"))
    llm.generate(PROMPTS, max_new_tokens=3, ignore_eos=True)
    assert llm.engine.state()["corrupted_requests"] == 2


def test_an_answer_that_is_on_its_way_is_reported_by_a_later_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU while the next step runs."""
    check_nan = SampledStep.check_nan

    class Event:
        """Complete when the engine asks for the third time."""

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
    llm.model.model.norm.weight.data.fill_(float("nan"))
    llm.submit(PROMPTS[0], SamplingParams(max_new_tokens=5, ignore_eos=True))
    counts = []
    while llm.has_work:
        llm.step()
        counts.append(llm.engine.state()["corrupted_requests"])
    assert counts == [0, 0, 1, 1, 1]
    assert len(_warnings(caplog)) == 1


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
