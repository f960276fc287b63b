"""Third-party clients against a running server: the requests of each client, and the response as the client parses it.

    python benchmarks/clients.py URL MODEL_DIR [CLIENT ...]

Run it in an environment with the clients; tapscope is not needed: `pip install openai anthropic langchain-openai
langchain-anthropic litellm mcp instructor 'lm_eval[api]' transformers`, and for SGLang's bench_serving `pip install
msgspec pybase64 pillow psutil torch` and `pip install --no-deps sglang`. MODEL_DIR is the served checkpoint, for its
tokenizer. The exit code is 1 if a client raises.
"""

import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

URL, MODEL_DIR = sys.argv[1].rstrip("/"), sys.argv[2]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,  # otherwise a model may add fields up to the token limit
        },
    },
}
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]


_WITHOUT_ENGINE = """
import importlib.util, runpy, sys, types
package = types.ModuleType("sglang")
package.__path__ = importlib.util.find_spec("sglang").submodule_search_locations
sys.modules["sglang"] = package
engine = types.ModuleType("sglang.srt.disaggregation.utils")
engine.FAKE_BOOTSTRAP_HOST = "2.2.2.2"
sys.modules[engine.__name__] = engine
runpy.run_module("sglang.bench_serving", run_name="__main__")
"""
"""Run SGLang's load test without its engine, which is imported for one constant and needs a GPU build of torch."""


def model() -> str:
    """Return the name of the served model."""
    import httpx

    return str(httpx.get(f"{URL}/v1/models").json()["data"][0]["id"])


def openai_client() -> dict[str, Any]:
    """Call chat, streaming, tools, completions, responses and models."""
    import openai

    client, name = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), model()
    chat = client.chat.completions.create(model=name, messages=ASK, tools=[WEATHER], max_tokens=64)
    stream = client.chat.completions.create(model=name, messages=[{"role": "user", "content": "hi"}], stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    completion = client.completions.create(model=name, prompt="one two", max_tokens=4, logprobs=2)
    response = client.responses.create(model=name, input="hi", max_output_tokens=16)
    return {
        "tool calls": [call.function.name for call in chat.choices[0].message.tool_calls or ()],
        "stream": text,
        "completion": completion.choices[0].finish_reason,
        "response": response.output_text,
    }


def anthropic_client() -> dict[str, Any]:
    """Call messages, streaming and tools."""
    import anthropic

    client, name = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0), model()
    tool = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
    message = client.messages.create(model=name, max_tokens=64, messages=ASK, tools=[tool])
    with client.messages.stream(model=name, max_tokens=16, messages=[{"role": "user", "content": "hi"}]) as stream:
        text = "".join(stream.text_stream)
    tools = [block.name for block in message.content if block.type == "tool_use"]
    return {"tool use": tools, "stop": message.stop_reason, "stream": text}


def langchain() -> dict[str, Any]:
    """Call ChatOpenAI and ChatAnthropic: invoke, stream, bound tools, structured output."""
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    name = model()
    chat = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=name, max_retries=0, max_tokens=64)
    schema = WEATHER["function"]["parameters"] | {"title": "City", "description": "A city"}
    structured = chat.with_structured_output(schema, method="json_schema")
    claude = ChatAnthropic(base_url=URL, api_key="none", model=name, max_retries=0, max_tokens=64)
    return {
        "invoke": chat.invoke("hi").content,
        "stream": "".join(str(chunk.content) for chunk in chat.stream("hi")),
        "tool calls": [call["name"] for call in chat.bind_tools([WEATHER]).invoke(ASK).tool_calls],
        "structured keys": sorted(dict(structured.invoke("hi"))),
        "anthropic": claude.invoke("hi").content,
    }


def litellm() -> dict[str, Any]:
    """Call completion and streaming through litellm's OpenAI and Anthropic adapters, and text completion."""
    import litellm as lite

    name, hi = model(), [{"role": "user", "content": "hi"}]
    common: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": "none", "max_tokens": 32}
    whole = lite.completion(model=f"openai/{name}", messages=ASK, tools=[WEATHER], **common)
    stream = lite.completion(model=f"openai/{name}", messages=hi, stream=True, **common)
    text = lite.text_completion(model=f"text-completion-openai/{name}", prompt="one two", **common)
    claude = lite.completion(model=f"anthropic/{name}", messages=hi, **common | {"api_base": URL})
    return {
        "tool calls": [call.function.name for call in whole.choices[0].message.tool_calls or ()],
        "stream": "".join(chunk.choices[0].delta.content or "" for chunk in stream),
        "text": text.choices[0].finish_reason,
        "anthropic": claude.choices[0].message.content,
    }


def instructor() -> dict[str, Any]:
    """Request a Pydantic model through a JSON schema, and through tools."""
    import instructor as library
    import openai
    from pydantic import BaseModel

    class Weather(BaseModel, extra="forbid"):
        city: Literal["Paris", "Oslo"]

    found = {}
    inner = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    for mode in (library.Mode.JSON_SCHEMA, library.Mode.TOOLS):
        client = library.from_openai(inner, mode=mode)
        made = client.chat.completions.create(
            model=model(), messages=ASK, response_model=Weather, max_tokens=200, max_retries=0
        )
        found[mode.value] = made.model_dump()
    return found


def lm_eval() -> dict[str, Any]:
    """Compute log-likelihoods and generate through the harness's local-completions model."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    served = LocalCompletionsAPI(
        base_url=f"{URL}/v1/completions", model=model(), tokenizer=MODEL_DIR, tokenizer_backend="huggingface",
        num_concurrent=2, max_retries=1, tokenized_requests=True,
    )  # fmt: skip
    pairs = [("one two", " three"), ("Hello", " there")]
    wanted = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    until = {"until": ["\n"], "max_gen_toks": 8, "temperature": 0.0}
    generated = served.generate_until([Instance("generate_until", {}, ("one two", until), 0)])
    return {"log-likelihoods": served.loglikelihood(wanted), "text": generated[0][:40]}


def bench_serving() -> dict[str, Any]:
    """Run SGLang's load test: random prompts through its native and OpenAI backends."""
    found = {}
    host, port = URL.removeprefix("http://").split(":")
    for backend in ("sglang", "sglang-oai", "sglang-oai-chat"):
        words = ["--backend", backend, "--host", host, "--port", port, "--dataset-name", "random-ids"]
        words += ["--num-prompts", "8", "--random-input-len", "16", "--random-output-len", "8"]
        words += ["--model", model(), "--tokenizer", MODEL_DIR, "--random-range-ratio", "1", "--disable-tqdm"]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "result.jsonl"
            done = subprocess.run(
                [sys.executable, "-c", _WITHOUT_ENGINE, *words, "--output-file", str(file)],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode or not file.exists():
                raise RuntimeError(f"{backend}: {done.stderr[-1500:]}{done.stdout[-500:]}")
            result = json.loads(file.read_text().splitlines()[-1])
        found[backend] = {name: result[name] for name in ("completed", "total_output_tokens")}
    return found


CLIENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "openai": openai_client,
    "anthropic": anthropic_client,
    "LangChain": langchain,
    "LiteLLM": litellm,
    "instructor": instructor,
    "lm_eval": lm_eval,
    "bench_serving": bench_serving,
}


def main() -> int:
    """Run the clients and print a transcript."""
    num_failed = 0
    for name in sys.argv[3:] or CLIENTS:
        try:
            print(f"{name}: {json.dumps(CLIENTS[name](), ensure_ascii=False, default=str)}", flush=True)
        except Exception:  # noqa: BLE001  (every client is tried)
            num_failed += 1
            print(f"{name}: FAILED\n{traceback.format_exc()[-1800:]}", flush=True)
    return min(num_failed, 1)


if __name__ == "__main__":
    raise SystemExit(main())
