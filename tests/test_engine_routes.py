"""Outputs of a step, streaming, and the native routes that are made of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_llama
from engine_helpers import reference_tokens

from tapscope.engine import LLM
from tapscope.engine.logprob import TokenLogprob
from tapscope.engine.output import Output
from tapscope.errors import UsageError


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1)


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path) as made:
        yield made


def test_a_stream_adds_up_to_the_generation(llm: LLM, path: Path) -> None:
    prompts = [[5, 6, 7], [300]]
    whole = llm.generate(prompts, max_new_tokens=12, ignore_eos=True)
    seen = list(llm.stream(prompts, request_ids=["a", "b"], max_new_tokens=12, ignore_eos=True))
    assert len(seen) == 24
    assert {output.prompt_tokens for output in seen if output.request == "a"} == {3}
    for name, prompt, generation in zip("ab", prompts, whole, strict=True):
        own = [output for output in seen if output.request == name]
        assert [token for output in own for token in output.token_ids] == reference_tokens(path, prompt, 12)
        assert "".join(output.text for output in own) == generation.text
        assert [output.finish_reason for output in own] == [None] * 11 + ["length"]


def test_one_prompt_may_be_streamed_by_itself_and_left_early(llm: LLM) -> None:
    for prompt in ("def main():", [5, 6]):
        for output in llm.stream(prompt, max_new_tokens=50, ignore_eos=True):
            assert output.token_ids
            break
        assert not llm.has_work
        assert llm.engine.state()["kv_pages_used"] == 0


def test_a_stream_that_cannot_run_computes_nothing(llm: LLM) -> None:
    steps = llm.engine.state()["num_steps"]
    with pytest.raises(UsageError, match="the model has 256"):
        next(llm.stream([[5], [6] * 300]))
    assert (llm.has_work, llm.engine.state()["num_steps"]) == (False, steps)


def test_an_output_comes_back_from_its_plain_form() -> None:
    logprob = TokenLogprob(token_id=3, logprob=-0.5, top=((3, -0.5), (4, -1.0)), full=(-1.0, -2.0))
    output = Output(
        request="r", token_ids=(3,), text="é", logprobs=(logprob,), prompt_logprobs=(None, logprob), prompt_tokens=1
    )
    assert Output.build(output.plain()) == output
    ended = Output(request="r", token_ids=(9,), finish_reason="stop", matched=9)
    assert Output.build(ended.plain()) == ended
    assert output.followed_by(ended).token_ids == (3, 9)
