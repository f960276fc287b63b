"""The HTTP server, run with real uvicorn on a loopback port."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_llama
from engine_helpers import reference_tokens
from engine_http import Hold, Served, raw_post
from engine_observers import Memory
from fastapi import APIRouter
from jobs import wait_until

from tapscope.core.errors import ListenError, RankLostError
from tapscope.core.wire import Message
from tapscope.engine import LLM
from tapscope.engine.runners.replica_client import Replica
from tapscope.engine.server import make_app, serve

GREEDY = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1)


@pytest.fixture
def served(path: Path) -> Iterator[Served]:
    router = APIRouter()
    router.add_api_route("/extra", lambda: {"mounted": True})
    with LLM(path, observer=Memory) as llm:
        made = Served(llm, [router])
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the kinds of all messages that the HTTP side sends to the engine."""
    kinds: list[str] = []
    send = Replica.send

    def note(self: Replica, message: Message) -> None:
        send(self, message)
        kinds.append(message.kind)

    monkeypatch.setattr(Replica, "send", note)
    return kinds


def test_generate_returns_sglangs_answer(served: Served, path: Path) -> None:
    body = served.generate(input_ids=[5, 6, 7], sampling_params=GREEDY, rid="mine").raise_for_status().json()
    expected = reference_tokens(path, [5, 6, 7], 6)
    assert body["output_ids"] == expected
    assert body["text"] == served.llm.tokenizer.decode(expected)
    meta = body["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "mine",
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "cached_tokens": 0,
        "finish_reason": {"type": "length", "length": 6},
        "weight_version": "default",
        "dp_rank": 0,
    }


def test_generate_returns_batches_in_order(served: Served) -> None:
    prompts = ["import json", "def", "class A:"]
    body = served.generate(text=prompts, sampling_params=GREEDY).raise_for_status().json()
    assert [answer["meta_info"]["id"] for answer in body] == ["0", "1", "2"]
    counts = [len(served.llm.tokenizer.encode(text)) for text in prompts]
    assert [answer["meta_info"]["prompt_tokens"] for answer in body] == counts


def test_server_batches_requests_of_several_clients(served: Served, path: Path, sent: list[str]) -> None:
    hold = Hold(served.llm)
    hold.after(1)
    prompts = [[5, 6, 7], [300], list(range(40, 60)), [9, 8]]
    with ThreadPoolExecutor(4) as pool:
        params = GREEDY | {"max_new_tokens": 30}
        asked = pool.map(lambda ids: served.generate(input_ids=ids, sampling_params=params).json(), prompts)
        wait_until(lambda: sent.count("submit") == 4, "all have asked")
        hold.release()
        answers = list(asked)
    for answer, prompt in zip(answers, prompts, strict=True):
        assert answer["output_ids"] == reference_tokens(path, prompt, 30)
    assert max(len(info.rows) for info in served.llm.observer.steps) > 1
    assert len(served.llm.observer.steps) < 4 * 30


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "exactly one of 'text' and 'input_ids'"),
        ({"text": "a", "input_ids": [1]}, "exactly one of"),
        ({"text": 3}, "text=3: must be a string or a non-empty list of strings"),
        ({"text": []}, "text=[]: must be a string or a non-empty list of strings"),
        ({"input_ids": [[5], []]}, "input_ids[1]=[]: must be an integer or a non-empty list of integers"),
        ({"input_ids": [5, "6"]}, "input_ids[1]='6': must be an integer or a non-empty list of integers"),
        ({"input_ids": [512]}, "expected 0 to 511"),
        ({"input_ids": [5], "sampling_params": {"temperature": -0.7}}, "temperature=-0.7: must be a finite number ≥ 0"),
        ({"input_ids": [5], "sampling_params": {"heat": 0.5}}, "unknown sampling parameter 'heat'"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens=-1"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": 999}}, "the limit is 256"),
        ({"input_ids": [5], "sampling_params": {"ignore_eos": 1}}, "ignore_eos=1"),
        ({"input_ids": [5], "sampling_params": []}, "'sampling_params' has 0 entries for 1 prompts"),
        ({"input_ids": [5], "sampling_params": 3}, "sampling_params=3: must be a JSON object"),
        ({"input_ids": [5], "rid": 3}, "rid=3: must be a string"),
        ({"input_ids": [[5], [6]], "rid": ["a", "a"]}, "names a request twice"),
        ({"input_ids": [5], "stream": 1}, "stream=1: must be true or false"),
        ({"input_ids": [5], "text": "\ud800"}, "the body is not valid JSON"),
        ([], "the body must be a JSON object"),
    ],
)
def test_generate_refuses_malformed_bodies_with_one_sentence(
    path: Path, body: Any, message: str, shared: Served
) -> None:
    response = shared.client.post("/generate", content=json.dumps(body))
    assert response.status_code == 400
    text = response.json()["error"]["message"]
    assert message in text
    assert "\n" not in text


@pytest.fixture(scope="module")
def shared(path: Path) -> Iterator[Served]:
    with LLM(path) as llm:
        made = Served(llm, [])
        yield made
        made.close()


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"", b"[" * 100_000])
def test_generate_refuses_invalid_json(shared: Served, content: bytes) -> None:
    response = shared.client.post("/generate", content=content)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(("the body is not valid JSON", "the body is nested"))
    assert "body" in response.json()["error"]["message"]


def test_generate_accepts_unknown_false_and_null_fields(shared: Served) -> None:
    body = {"input_ids": [5], "sampling_params": GREEDY, "return_logprob": False, "lora_path": None}
    assert shared.client.post("/generate", json=body).status_code == 200


def test_app_serves_health_info_and_mounted_routes(served: Served, path: Path) -> None:
    assert served.client.get("/health").json() == {"status": "ok"}
    assert served.client.get("/extra").json() == {"mounted": True}
    served.generate(input_ids=[5], sampling_params=GREEDY)
    info = served.info()
    assert served.client.get("/server_info").json() == info
    assert served.client.get("/model_info").json() == served.client.get("/get_model_info").json()
    assert (info["model"], info["tp"], info["dtype"]) == (str(path), 1, "float32")
    assert (info["num_running"], info["num_waiting"], info["num_steps"], info["kv_pages_used"]) == (0, 0, 6, 0)


def test_server_aborts_requests_of_disconnected_clients(served: Served, sent: list[str]) -> None:
    hold, url = Hold(served.llm), served.client.base_url
    hold.after(3)
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(raw_post({"input_ids": [5], "sampling_params": GREEDY | {"max_new_tokens": 250}}))
        hold.until_it_stands()
    wait_until(lambda: "drop" in sent, "it is noticed")
    hold.release()
    info = served.info()
    assert (info["num_running"], info["kv_pages_used"]) == (0, 0)
    assert 4 <= info["num_steps"] < 250


def test_generate_refuses_a_live_request_id(served: Served, sent: list[str]) -> None:
    hold = Hold(served.llm)
    hold.after(1)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(served.generate, input_ids=[5], sampling_params=GREEDY, rid="r")
        hold.until_it_stands()
        second = pool.submit(served.generate, input_ids=[6], sampling_params=GREEDY, rid="r")
        wait_until(lambda: second.done() or sent.count("submit") == 2, "it is asked for again")
        hold.release()
        assert second.result().status_code == 400
        assert "'r' is in use by a live request" in second.result().json()["error"]["message"]
        assert first.result().status_code == 200


def test_server_reports_a_lost_rank_as_503(path: Path) -> None:
    with LLM(path, tp=2) as llm:
        served = Served(llm, [])
        try:
            answer = served.generate(input_ids=[5, 6], sampling_params=GREEDY).json()
            assert answer["output_ids"] == reference_tokens(path, [5, 6], 6)
            os.kill(llm.engine.rank_pids[1], signal.SIGKILL)
            for _ in range(2):
                response = served.generate(input_ids=[5], sampling_params=GREEDY)
                assert response.status_code == 503
                assert "rank 1 of 2 was killed by signal 9" in response.json()["error"]["message"]
            health = served.client.get("/health")
            assert health.status_code == 503
            assert "rank 1 of 2" in health.json()["error"]["message"]
        finally:
            served.close()


def test_server_logs_no_traceback_of_a_peer_of_a_lost_rank(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lose() -> None:
        raise RankLostError("rank 1 of 2 was killed by signal 9")

    with LLM(path) as llm:
        served = Served(llm, [])
        try:
            monkeypatch.setattr(llm.engine, "step", lose)
            assert served.generate(input_ids=[5], sampling_params=GREEDY).status_code == 503
        finally:
            served.close()
    assert not [record for record in caplog.records if record.exc_info]


def test_server_recovers_after_a_failed_step(served: Served) -> None:
    def explode(*_: object) -> None:
        raise ValueError("from a user's hook")

    handle = served.llm.model.register_forward_hook(explode)
    response = served.generate(input_ids=[5], sampling_params=GREEDY)
    assert response.status_code == 500
    assert "from a user's hook" in response.json()["error"]["message"]
    handle.remove()
    assert served.generate(input_ids=[5], sampling_params=GREEDY).status_code == 200
    assert served.client.get("/health").status_code == 200


def test_server_out_of_memory_in_a_step_names_the_settings(served: Served) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    handle = served.llm.model.register_forward_hook(fail)
    response = served.generate(input_ids=[5], sampling_params=GREEDY)
    handle.remove()
    assert response.status_code == 500
    message = response.json()["error"]["message"]
    assert message.startswith("a step failed: cpu has too little free memory for 1 row of 1 request; lower max_num_")
    assert served.generate(input_ids=[5], sampling_params=GREEDY).status_code == 200


def test_listen_names_a_port_in_use(path: Path) -> None:
    with LLM(path) as llm, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*in use.*choose another"):
            serve(make_app(llm), "127.0.0.1", port)


def test_http_server_imports_no_torch() -> None:
    code = "import sys, json, tapscope.cli.serve_http; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "textual"} & set(json.loads(done.stdout))


def test_engine_import_loads_neither_torch_nor_fastapi(path: Path) -> None:
    """An engine without a server imports torch, but not sympy, whose import takes a third of a second."""
    code = "import sys, json, tapscope.engine; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "fastapi", "uvicorn", "zmq"} & set(json.loads(done.stdout))
    code = "import sys, json, tapscope.engine as e; e.LLM(sys.argv[1]).close(); print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert not {"fastapi", "uvicorn", "transformers", "sympy", "tapscope.dumper"} & set(json.loads(done.stdout))
