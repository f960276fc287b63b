"""A request cannot exceed the server's limits, and long requests are processed in other threads."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
import zmq
from chat_templates import write_chat
from checkpoints import make_llama
from engine_http import served

from tapscope.core.errors import RequestError, UsageError
from tapscope.core.wire import Message
from tapscope.engine.api import completions, native_response
from tapscope.engine.api.limits import Limits
from tapscope.engine.api.served_model import ServedModel
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.runners import replica_client
from tapscope.engine.runners.engine_client import EngineClient
from tapscope.engine.runners.replica_client import Replica
from tapscope.engine.server import ServerSettings
from tapscope.engine.server.http_listener import listen, make_server
from tapscope.engine.structured_output import grammar
from tapscope.engine.structured_output.grammar_trial import GrammarCompilerProcess

COMPILE_S = 1
COMPILED: list[str] = []
"""Grammars that the server of `client` has compiled or tried to compile."""


class Compiler(GrammarCompilerProcess):
    """Compiler process with a shorter time limit, which logs the grammars to ``COMPILED``."""

    def __init__(self) -> None:
        super().__init__(COMPILE_S)

    def form_of(self, kind: str, text: str, *marks: dict[str, int]) -> str:
        COMPILED.append(text)
        return super().form_of(kind, text, *marks)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    path = make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1, vocab_size=600)
    write_chat(path, "qwen")
    settings = {"model_name": "tiny", "max_generations": 8, "max_answer_values": 1000}
    with (
        patch.object(grammar, "GrammarCompilerProcess", Compiler),
        served(path, settings=settings) as address,
        httpx.Client(base_url=address, timeout=90) as client,
    ):
        yield client


def message(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text[:300]
    error = answer.json()["error"]
    return str(error["message"])


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": ["ab"] * 9, "sampling_params": {"max_new_tokens": 1}}),
        ("/generate", {"input_ids": [[5]] * 3, "sampling_params": {"max_new_tokens": 1, "n": 3}}),
        ("/generate", {"input_ids": [[5], [6]], "sampling_params": [{"n": 8}, {"n": 1}]}),
        ("/v1/completions", {"prompt": ["ab"] * 3, "n": 3, "max_tokens": 1}),
        ("/v1/completions", {"prompt": ["ab"] * 2000, "n": 128, "max_tokens": 1}),
        ("/v1/embeddings", {"input": ["ab"] * 9}),
        ("/v1/chat/completions", {"messages": MESSAGES, "n": 9, "max_tokens": 1}),
    ],
)
def test_limits_refuse_too_many_generations_up_front(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    text = message(client.post(path, json=body))
    assert "at most 8 in one request (max_generations)" in text
    assert client.get("/get_server_info").json()["num_waiting"] == 0


def test_limits_allow_exactly_max_generations(client: httpx.Client) -> None:
    body = {"input_ids": [[5], [6]], "sampling_params": {"max_new_tokens": 1, "n": 4, "temperature": 1.0}}
    assert len(client.post("/generate", json=body).raise_for_status().json()) == 8


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": [5], "return_logprob": True, "top_logprobs_num": 300, "sampling_params": {}}),
        ("/generate", {"input_ids": [5] * 20, "return_hidden_states": True, "sampling_params": {"max_new_tokens": 9}}),
        (
            "/generate",
            {"input_ids": [5] * 60, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20},
        ),
        (
            "/generate",  # each event repeats all earlier values
            {
                "input_ids": [5],
                "return_logprob": True,
                "top_logprobs_num": 9,
                "stream": True,
                "sampling_params": {"max_new_tokens": 40},
            },
        ),
        ("/v1/completions", {"prompt": "ab", "logprobs": 20, "max_tokens": 60}),
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, "max_tokens": 60}),
    ],
)
def test_limits_refuse_too_large_answers_up_front(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    assert "at most 1000 in one answer (max_answer_values)" in message(client.post(path, json=body))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a" * 200_000}),
        ("/v1/completions", {"prompt": "a" * 200_000}),
        ("/v1/embeddings", {"input": ["a" * 200_000]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 200_000}]}),
        ("/v1/messages", {"model": "tiny", "messages": [{"role": "user", "content": "a" * 200_000}], "max_tokens": 4}),
    ],
)
def test_check_text_refuses_by_length_before_tokenization(
    client: httpx.Client, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object, **__: object) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr("tapscope.engine.text.tokenizer.Tokenizer.encode", encode)
    assert "characters; shorten the prompt" in message(client.post(path, json=body))


def test_check_text_refuses_no_text_that_fits(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model", seed=1)
    model = ServedModel.read(path, name="tiny", max_positions=16)
    tokenizer = model.require_tokenizer()
    longest = max((tokenizer.decode([token]) for token in tokenizer.plain_ids), key=len)
    model.check_text(longest * 16, "text")  # exactly sixteen tokens
    assert len(tokenizer.encode(longest * 16, add_special_tokens=False)) <= 16
    with pytest.raises(RequestError, match="shorten the prompt"):
        model.check_text("a" * (16 * tokenizer.longest_token + 1), "text")


def test_max_model_len_limits_what_the_server_takes(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model", seed=1)
    with (
        served(path, settings={"model_name": "tiny"}, max_model_len=12) as address,
        httpx.Client(base_url=address) as c,
    ):
        assert c.get("/v1/models").json()["data"][0]["max_model_len"] == 12
        refused = c.post("/v1/completions", json={"prompt": [5] * 8, "max_tokens": 5})
        assert "8 tokens and requests 5 new ones, but tiny supports 12 in total" in message(refused)
        assert "the limit is 12 (max_model_len)" in message(c.post("/generate", json={"input_ids": [5] * 12}))
        answer = c.post("/v1/completions", json={"prompt": [5] * 8, "max_tokens": 4, "ignore_eos": True}).json()
        assert answer["usage"]["completion_tokens"] == 4


def test_tokenizer_encode_releases_the_gil(tmp_path: Path) -> None:
    """Another thread makes progress meanwhile; the library's ``Tokenizer.encode`` would hold the GIL throughout."""
    tokenizer = ServedModel.read(make_llama(tmp_path / "model", seed=1), name="t", max_positions=9).require_tokenizer()
    text = "def main(): return 1\n" * 60_000
    with ThreadPoolExecutor(1) as pool:
        encoded = pool.submit(tokenizer.encode, text)
        turns = 0
        while not encoded.done():
            turns += 1
            time.sleep(0)
    assert turns > 50
    assert tokenizer.encode(text[:21]) == tokenizer.encode(text[: 21 * 300])[: len(tokenizer.encode(text[:21]))]


def test_served_model_num_values_counts_the_answer() -> None:
    model = ServedModel(name="m", max_positions=99, hidden_size=64, vocab_size=500, limits=Limits())
    assert model.num_values(SamplingParams(), 10, 5) == 0
    assert model.num_values(SamplingParams(logprobs=2), 10, 5) == 5 * 3
    assert model.num_values(SamplingParams(logprobs=2, prompt_logprobs=1, n=2), 10, 5) == 2 * (5 * 3 + 10 * 2)
    assert model.num_values(SamplingParams(logprobs=0, token_ids_logprob=(1, 2)), 10, 5) == 5 * 3
    assert model.num_values(SamplingParams(full_logprobs=True), 10, 5) == 5 * 501
    assert model.num_values(SamplingParams(hidden_states=True), 10, 5) == 15 * 64


NEUTRAL = {
    "length_penalty": 1.0,
    "use_beam_search": False,
    "early_stopping": False,
    "store": True,
    "return_token_ids": False,
    "bad_words": [],
    "truncate_prompt_tokens": -1,
    "spaces_between_special_tokens": True,
    "return_routed_experts": False,
    "vllm_xargs": {},
}


def test_request_model_accepts_neutral_values(client: httpx.Client) -> None:
    chat = {"messages": MESSAGES, "max_tokens": 2, "echo": False, "best_of": 1, **NEUTRAL}
    completion = {"prompt": "ab", "max_tokens": 2, "echo": False, "best_of": 1, "suffix": "", **NEUTRAL}
    sampling = {"max_new_tokens": 2, "length_penalty": 1.0, "use_beam_search": False, "best_of": 1}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", completion),
        ("/generate", {"text": "ab", "sampling_params": sampling}),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("field", [{"length_penalty": 1.5}, {"use_beam_search": True}, {"suffix": "x"}])
def test_request_model_refuses_unsupported_values(client: httpx.Client, field: dict[str, Any]) -> None:
    body = {"prompt": "ab", "max_tokens": 2, **field}
    assert f"{next(iter(field))} is not supported" in message(client.post("/v1/completions", json=body))


OVERLAPPING = {
    "type": "object",
    "patternProperties": {f"^a{i}[a-z]*$": {"type": "string", "pattern": f"x{i}y*"} for i in range(1000)},
}
"""A 60 kB schema that llguidance does not compile within ten minutes: each name may match all other patterns."""
SLOW = {"type": "object", "patternProperties": dict(list(OVERLAPPING["patternProperties"].items())[:150])}
"""A schema that takes a fraction of a second to compile."""


def constrained(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"input_ids": [5, 6], "sampling_params": {"json_schema": json.dumps(schema), "max_new_tokens": 4, **more}}


def test_grammars_refuse_slow_compilation_without_delaying_others(client: httpx.Client) -> None:
    free = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}}
    with ThreadPoolExecutor() as pool:
        hostile = [pool.submit(client.post, "/generate", json=constrained(OVERLAPPING)) for _ in range(3)]
        while not client.get("/get_server_info").json()["num_grammars_compiling"]:
            time.sleep(0.01)
        served = 0
        while not any(each.done() for each in hostile):
            client.post("/generate", json=free).raise_for_status()
            served += 1
        assert served > 3
        for each in hostile:
            assert f"it takes more than {COMPILE_S} s to compile; use a smaller grammar" in message(each.result())
    tried = len(COMPILED)
    assert f"{COMPILE_S} s to compile" in message(client.post("/generate", json=constrained(OVERLAPPING)))
    assert len(COMPILED) == tried, "the reason is kept"


def test_grammars_compile_once_for_concurrent_requests(client: httpx.Client) -> None:
    body = constrained(SLOW) | {"input_ids": [[5, 6], [7], [8, 9]]}
    answers = client.post("/generate", json=body, timeout=60).raise_for_status().json()
    assert [answer["text"].lstrip()[:1] for answer in answers] == ["{"] * 3


def test_grammars_drop_requests_of_disconnected_clients(client: httpx.Client) -> None:
    with pytest.raises(httpx.ReadTimeout):
        client.post("/generate", json=constrained({**OVERLAPPING, "title": "another"}), timeout=0.5)
    while client.get("/get_server_info").json()["num_grammars_compiling"]:
        time.sleep(0.01)
    assert client.get("/get_server_info").json()["num_running"] == 0


def test_abort_ends_a_request_waiting_for_its_grammar(client: httpx.Client) -> None:
    schema = {"type": "object", "patternProperties": dict(list(OVERLAPPING["patternProperties"].items())[:140])}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, "/generate", json=constrained(schema, max_new_tokens=200) | {"rid": "one"})
        while not client.get("/get_server_info").json()["num_grammars_compiling"]:
            time.sleep(0.001)
        client.post("/abort_request", json={"rid": "one"})
        assert answer.result().json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_grammar_process_refuses_excessive_memory_and_recovers() -> None:
    trial = GrammarCompilerProcess(max_memory=100 << 20)
    text = json.dumps({"enum": ["x" * 100 + str(i) for i in range(60_000)]})
    with pytest.raises(UsageError, match="it takes more than 100 MiB of memory to compile; use a smaller grammar"):
        trial.form_of("json_schema", text, {}, {})
    assert trial.form_of("regex", "[ab]+", {}, {})
    trial.close()


def test_grammar_process_restarts_after_being_killed() -> None:
    trial = GrammarCompilerProcess()
    assert trial.form_of("regex", "[ab]+", {}, {})
    trial._process.kill()
    assert trial.form_of("regex", "[ab]+", {}, {})
    trial.close()


@pytest.fixture
def bounded_server(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """Serve a minimal app with the server's listener, for at most 8 connections.

    A request must arrive within half a second, or the time that the test's parameter sets.
    """

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        size, more = 0, True
        while more:
            part = await receive()
            size, more = size + len(part.get("body", b"")), part.get("more_body", False)
        await asyncio.sleep(1.5 if scope["path"] == "/slow" else 0)
        headers = [(b"content-length", b"%d" % len(str(size)))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": str(size).encode()})

    with listen("127.0.0.1", 0) as listener:
        server = make_server(app, ServerSettings(max_connections=8, request_timeout_s=getattr(request, "param", 0.5)))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()[:2]
        server.should_exit = True
        thread.join()


BEGUN = (
    b"",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
)


@pytest.mark.parametrize("begun", BEGUN)
def test_http_listener_times_out_slow_requests(bounded_server: tuple[str, int], begun: bytes) -> None:
    with socket.create_connection(bounded_server, timeout=30) as client:
        client.sendall(begun)
        assert client.recv(100).startswith(b"HTTP/1.1 408 ")


def test_http_listener_deadline_ignores_single_bytes(bounded_server: tuple[str, int]) -> None:
    with socket.create_connection(bounded_server, timeout=0.1) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(100):
            client.sendall(b"x")
            try:
                assert client.recv(100).startswith(b"HTTP/1.1 408 ")
                return
            except TimeoutError:
                continue
        pytest.fail("it was let go on")


def test_http_listener_allows_long_bodies_and_answers(bounded_server: tuple[str, int]) -> None:
    with socket.create_connection(bounded_server, timeout=30) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 240000\r\n\r\n")
        for _ in range(8):  # send 200 kB/s for longer than the deadline
            client.sendall(b"x" * 30_000)
            time.sleep(0.15)
        assert b"240000" in client.recv(1000)
        client.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("bounded_server", [60.0], indirect=True)
def test_http_listener_closes_the_oldest_idle_connection_at_the_limit(bounded_server: tuple[str, int]) -> None:
    with contextlib.ExitStack() as stack:
        slow = stack.enter_context(socket.create_connection(bounded_server, timeout=30))
        slow.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        idle = [stack.enter_context(socket.create_connection(bounded_server, timeout=30)) for _ in range(12)]
        asking = stack.enter_context(socket.create_connection(bounded_server, timeout=30))
        asking.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert asking.recv(1000).startswith(b"HTTP/1.1 200 ")
        assert idle[0].recv(100).startswith(b"HTTP/1.1 408 ")
        assert slow.recv(1000).startswith(b"HTTP/1.1 200 ")  # a connection whose response is pending stays open


@pytest.mark.parametrize("bounded_server", [60.0], indirect=True)
def test_http_listener_refuses_connections_when_all_are_busy(bounded_server: tuple[str, int]) -> None:
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(bounded_server, timeout=30)) for _ in range(8)]
        for client in slow:
            client.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(0.4)
        late = stack.enter_context(socket.create_connection(bounded_server, timeout=30))
        assert late.recv(100).startswith(b"HTTP/1.1 503 ")
        assert all(client.recv(1000).startswith(b"HTTP/1.1 200 ") for client in slow)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/generate",
            {
                "input_ids": [5] * 40,
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": 400,
                "sampling_params": {"max_new_tokens": 1},
            },
        ),
        ("/v1/completions", {"prompt": [5] * 200, "max_tokens": 1, "logprobs": 20, "echo": True}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_engine_client_builds_large_answers_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], stream: bool
) -> None:
    threads: set[str] = set()

    def noting(build: Any) -> Any:
        def noted(*arguments: Any, **more: Any) -> Any:
            threads.add(threading.current_thread().name)
            return build(*arguments, **more)

        return noted

    monkeypatch.setattr(native_response, "_logprobs", noting(native_response._logprobs))
    monkeypatch.setattr(completions, "completion_logprobs", noting(completions.completion_logprobs))
    model = make_llama(tmp_path / "model", seed=1, vocab_size=600)
    write_chat(model, "qwen")
    with served(model) as address:
        httpx.post(address + path, json=body | {"stream": stream}, timeout=90).raise_for_status()
    assert threads
    assert all(name.startswith("tapscope-answers") for name in threads)


def test_engine_client_reads_requests_while_answers_are_built() -> None:
    async def run() -> str:
        client = EngineClient(zmq.Context.instance(), ["inproc://nobody"], None)
        may_end = threading.Event()
        builds = [asyncio.ensure_future(client.build(1 << 20, may_end.wait, 60)) for _ in range(8)]
        await asyncio.sleep(0)
        read = await asyncio.wait_for(client.in_background(str.upper, "read"), 30)
        assert not any(build.done() for build in builds)
        may_end.set()
        assert all(await asyncio.gather(*builds))
        client.close()
        return read

    assert asyncio.run(run()) == "READ"


def test_engine_service_splits_large_outputs_and_interleaves_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, turns = make_llama(tmp_path / "model", seed=1, vocab_size=600), []
    read, handle = Replica._read, Replica._handle

    def reading(self: Replica) -> None:
        turns.append(0)
        read(self)

    def handling(self: Replica, message: Message) -> None:
        turns[-1] += message.kind == "outputs"
        handle(self, message)

    monkeypatch.setattr(Replica, "_read", reading)
    monkeypatch.setattr(Replica, "_handle", handling)
    monkeypatch.setattr(replica_client, "_TURN_S", 0)
    prompts = [[5 + i] * 40 for i in range(4)]  # 40 x 400 hidden state values each
    body = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 400}
    with served(model) as address:
        httpx.post(
            address + "/v1/completions", json={"prompt": prompts, "max_tokens": 1}, timeout=90
        ).raise_for_status()
        assert sum(turns) < 4, "small outputs of a step are one message"
        turns.clear()
        body |= {"input_ids": prompts, "sampling_params": {"max_new_tokens": 1}}
        answers = httpx.post(address + "/generate", json=body, timeout=90).raise_for_status().json()
    assert [len(answer["meta_info"]["input_token_logprobs"]) for answer in answers] == [40] * 4
    assert sum(turns) == 4
    assert max(turns) == 1
