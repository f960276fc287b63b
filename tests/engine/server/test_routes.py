"""Step outputs, streaming, and the native routes built on them."""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest
from checkpoints import make_llama
from engine_helpers import reference_tokens

from tapscope.core.errors import UsageError
from tapscope.engine import LLM, Generation
from tapscope.engine.requests.output import Output, OutputValues
from tapscope.engine.requests.token_logprob import TokenLogprob


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1)


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path) as made:
        yield made


def test_llm_stream_accumulates_to_the_generation(llm: LLM, path: Path) -> None:
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


def test_llm_stream_can_be_closed_early(llm: LLM) -> None:
    for prompt in ("def main():", [5, 6]):
        for output in llm.stream(prompt, max_new_tokens=50, ignore_eos=True):
            assert output.token_ids
            break
        assert not llm.has_work
        assert llm.engine.state()["kv_pages_used"] == 0


def test_llm_stream_computes_nothing_for_invalid_requests(llm: LLM) -> None:
    steps = llm.engine.state()["num_steps"]
    with pytest.raises(UsageError, match="the limit is 256"):
        next(llm.stream([[5], [6] * 300]))
    assert (llm.has_work, llm.engine.state()["num_steps"]) == (False, steps)


def _decoded(output: Output) -> Output:
    return Output.build(msgspec.msgpack.decode(msgspec.msgpack.encode(output.plain()), type=OutputValues))


def test_output_survives_its_plain_form() -> None:
    logprob = TokenLogprob(token_id=3, logprob=-0.5, top=((3, -0.5), (4, -1.0)), full=(-1.0, -2.0))
    output = Output(
        request="r",
        token_ids=(3,),
        text="é",
        logprobs=(logprob,),
        prompt_logprobs=(None, logprob),
        prompt_tokens=1,
        queue_time_s=0.25,
    )
    assert _decoded(output) == output
    ended = Output(request="r", token_ids=(9,), finish_reason="stop", matched=9)
    assert _decoded(ended) == ended
    assert output.followed_by(ended).token_ids == (3, 9)
    assert output.followed_by(ended).queue_time_s == 0.25


def test_llm_async_calls_share_steps_and_match_generate(llm: LLM) -> None:
    prompts = [[5, 6, 7], [300], "def main():"]
    expected = llm.generate(prompts, max_new_tokens=24, ignore_eos=True)
    steps = llm.engine.state()["num_steps"]

    async def run() -> list[Generation]:
        calls = [llm.agenerate([prompt], max_new_tokens=24, ignore_eos=True) for prompt in prompts]
        return [generation for [generation] in await asyncio.gather(*calls)]

    for _ in range(2):  # each run has its own event loop
        found = asyncio.run(run())
        assert [g.token_ids for g in found] == [g.token_ids for g in expected]
        assert [g.text for g in found] == [g.text for g in expected]
    assert llm.generate([[9]], max_new_tokens=1)[0].token_ids  # the caller's thread can use the engine again
    assert llm.engine.state()["num_steps"] - steps <= 2 * 30 + 1


def test_llm_async_cancellation_aborts_the_request(llm: LLM) -> None:
    async def run() -> list[int]:
        seen = []
        async with aclosing(llm.astream([5, 6], max_new_tokens=200, ignore_eos=True)) as outputs:
            async for output in outputs:
                seen += output.token_ids
                if len(seen) >= 3:
                    break
        call = asyncio.ensure_future(llm.agenerate([[5], [6]], max_new_tokens=250, ignore_eos=True))
        await anext(llm.astream([7], max_new_tokens=1))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return seen

    seen = asyncio.run(run())
    assert seen == list(llm.generate([[5, 6]], max_new_tokens=len(seen), ignore_eos=True)[0].token_ids)
    assert not llm.has_work


def test_llm_async_calls_raise_like_generate_and_refuse_to_mix(llm: LLM) -> None:
    with pytest.raises(UsageError, match="the limit is 256"):
        asyncio.run(llm.agenerate([[5], [6] * 300]))

    async def mix() -> None:
        async with aclosing(llm.astream([5], max_new_tokens=200, ignore_eos=True)) as outputs:
            await anext(outputs)
            with pytest.raises(UsageError, match="generate cannot run while async calls are live"):
                llm.generate([[5]])

    asyncio.run(mix())
    llm.submit([5], max_new_tokens=2)
    with pytest.raises(UsageError, match="async calls cannot start while submitted requests are live"):
        asyncio.run(llm.agenerate([[5]]))
    while llm.has_work:
        llm.step()


def test_llm_chat_uses_the_checkpoints_template(tmp_path: Path, path: Path) -> None:
    shutil.copytree(path, tmp_path / "chatty")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ mark }}"
    (tmp_path / "chatty" / "chat_template.jinja").write_text(template)
    with LLM(tmp_path / "chatty") as llm:
        messages = [{"role": "user", "content": "def"}]
        ids = llm.tokenizer.encode("user: def\n>", add_special_tokens=False)
        assert llm.chat_prompt(messages, mark=">") == ids
        [answer] = llm.chat([messages], max_new_tokens=4, ignore_eos=True, template={"mark": ">"})
        assert answer.token_ids == llm.generate([ids], max_new_tokens=4, ignore_eos=True)[0].token_ids
        with pytest.raises(UsageError, match="pass a list of conversations"):
            llm.chat(messages)


def test_llm_chat_without_a_template_is_a_usage_error(llm: LLM) -> None:
    with pytest.raises(UsageError, match="no chat template"):
        llm.chat([[{"role": "user", "content": "x"}]])
