"""POST /pause_generation and /continue_generation, alone and combined with the other routes for trainers."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkpoints import make_llama
from engine_helpers import reference_tokens
from engine_http import HOLDS, Served, served
from jobs import wait_until

from tapscope.core.errors import UsageError
from tapscope.engine import LLM, SamplingParams
from tapscope.engine.trainer import Trainer

PROMPT = [3, 5, 7, 9] * 6
NUM_NEW = 40


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "old", seed=1)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "new", seed=2)


class Client:
    """Client of a server whose model can be held at a step."""

    def __init__(self, url: str, http: httpx.Client, pool: ThreadPoolExecutor) -> None:
        self.hold, self._http, self._pool = HOLDS[url], http, pool

    def start(self, prompt: list[int] = PROMPT, **body: Any) -> "Future[httpx.Response]":
        """Start a generation in a thread."""
        params = {"max_new_tokens": NUM_NEW, "ignore_eos": True} | body.pop("sampling_params", {})
        body |= {"input_ids": prompt, "sampling_params": params}
        return self._pool.submit(self._http.post, "/generate", json=body)

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self._http.post(route, json=body)

    def info(self) -> Any:
        return self._http.get("/get_server_info").raise_for_status().json()

    def get(self, route: str) -> httpx.Response:
        return self._http.get(route)

    def pause_at(self, step: int, **body: Any) -> "tuple[Future[httpx.Response], Any]":
        """Start a request and pause while its ``step`` is being computed; return the request and the response."""
        self.hold.after(step)
        request = self.start()
        self.hold.until_it_stands()
        paused = self._pool.submit(self.post, "/pause_generation", **body)
        time.sleep(0.3)  # gives the message time to arrive
        self.hold.release()
        return request, paused.result().raise_for_status().json()


@contextmanager
def client_of(path: Path, **settings: Any) -> Iterator[Client]:
    with (
        served(path, page_size=4, check_invariants=True, **settings) as url,
        httpx.Client(base_url=url, timeout=90) as http,
        ThreadPoolExecutor(8) as pool,
    ):
        yield Client(url, http, pool)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
@pytest.mark.parametrize("settings", [{}, {"tp": 2}], ids=["one rank", "two ranks"])
def test_requests_wait_while_generation_is_paused(path: Path, mode: str, settings: dict[str, Any]) -> None:
    with client_of(path, **settings) as client:
        request, answer = client.pause_at(5, mode=mode)
        assert answer == {"status": "ok", "message": "Generation paused successfully.", "num_live": 1}
        before = client.info()
        assert before["is_paused"]
        is_running = mode == "in_place"
        assert (before["num_running"], before["num_waiting"]) == (is_running, not is_running)
        assert (before["kv_pages_used"] > 0) == is_running
        later = client.start([11, 12])
        wait_until(lambda: client.info()["num_waiting"] == 2 - is_running, "the new request waits")
        assert client.get("/health").status_code == 200
        refused = client.get("/health_generate")
        assert refused.status_code == 503
        assert "generation is paused" in refused.json()["error"]["message"]
        assert client.info()["num_steps"] == before["num_steps"]
        assert not request.done()
        answer = client.post("/continue_generation").json()
        assert answer == {"status": "ok", "message": "Generation continued successfully.", "num_live": 2}
        assert request.result().json()["output_ids"] == reference_tokens(path, PROMPT, NUM_NEW)
        assert later.result().json()["output_ids"] == reference_tokens(path, [11, 12], NUM_NEW)
        after = client.info()
        assert (after["is_paused"], after["num_preemptions"]) == (False, not is_running)
        assert client.get("/health_generate").status_code == 200


def test_a_pause_aborts_by_default(path: Path) -> None:
    with client_of(path) as client:
        request, answer = client.pause_at(5)
        assert answer["num_live"] == 0
        whole = request.result().json()
        assert whole["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(whole["output_ids"]) < NUM_NEW
        assert whole["output_ids"] == reference_tokens(path, PROMPT, len(whole["output_ids"]))
        later = client.start()
        wait_until(lambda: client.info()["num_waiting"] == 1, "the new request waits")
        assert client.post("/pause_generation", mode="abort").json()["num_live"] == 0  # includes the waiting one
        assert later.result().json()["output_ids"] == []
        last = client.start()
        wait_until(lambda: client.info()["num_waiting"] == 1, "the new request waits")
        client.post("/continue_generation").raise_for_status()
        assert last.result().json()["output_ids"] == reference_tokens(path, PROMPT, NUM_NEW)


def test_a_pause_aborts_requests_whose_grammars_are_compiled(path: Path) -> None:
    patterns = {f"^a{i}[a-z]*$": {"type": "string", "pattern": f"x{i}y*"} for i in range(140)}  # compiles in < 1 s
    schema = json.dumps({"type": "object", "patternProperties": patterns})
    with client_of(path) as client:
        request = client.start(sampling_params={"json_schema": schema})
        while not client.info()["num_grammars_compiling"]:
            time.sleep(0.001)
        client.post("/pause_generation").raise_for_status()
        whole = request.result().json()
        assert (whole["meta_info"]["finish_reason"]["type"], whole["output_ids"]) == ("abort", [])


def test_a_waiting_request_can_be_aborted_during_a_pause(path: Path) -> None:
    with client_of(path) as client:
        request, _ = client.pause_at(3, mode="retract")
        later = client.start(rid="mine")
        wait_until(lambda: client.info()["num_waiting"] == 2, "the new request waits")
        client.post("/abort_request", rid="mine").raise_for_status()
        assert later.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert client.info()["num_waiting"] == 1
        client.post("/continue_generation").raise_for_status()
        assert request.result().json()["output_ids"] == reference_tokens(path, PROMPT, NUM_NEW)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
@pytest.mark.parametrize("settings", [{}, {"tp": 2}], ids=["one rank", "two ranks"])
def test_weights_updated_during_a_pause_compute_the_rest(
    path: Path, new: Path, mode: str, settings: dict[str, Any]
) -> None:
    with client_of(path, **settings) as client:
        request, _ = client.pause_at(5, mode=mode)
        answer = client.post("/update_weights_from_disk", model_path=str(new), weight_version="2").json()
        assert (answer["success"], answer["num_live"]) == (True, 1)
        assert not request.done()
        client.post("/continue_generation").raise_for_status()
        tokens = request.result().json()["output_ids"]
        old = reference_tokens(path, PROMPT, NUM_NEW)
        num_old = next(i for i, pair in enumerate(zip(tokens, old, strict=True)) if pair[0] != pair[1])
        assert num_old >= 3
        assert tokens[num_old:] == reference_tokens(new, [*PROMPT, *tokens[:num_old]], NUM_NEW - num_old)


def test_memory_is_released_under_retracted_requests(path: Path) -> None:
    with client_of(path) as client:
        request, _ = client.pause_at(5, mode="in_place")
        refused = client.post("/release_memory_occupation")
        assert refused.status_code == 400
        assert "1 requests are live" in refused.json()["error"]["message"]
        client.post("/pause_generation", mode="retract").raise_for_status()
        client.post("/release_memory_occupation").raise_for_status()
        later = client.start([11, 12])  # waits during the pause; without a pause it would be rejected
        wait_until(lambda: client.info()["num_waiting"] == 2, "the new request waits")
        refused = client.post("/continue_generation")
        assert refused.status_code == 503
        assert refused.json()["error"]["message"].startswith("the memory of weights and kv_cache is released")
        client.post("/resume_memory_occupation").raise_for_status()
        client.post("/continue_generation").raise_for_status()
        assert request.result().json()["output_ids"] == reference_tokens(path, PROMPT, NUM_NEW)
        assert later.result().json()["output_ids"] == reference_tokens(path, [11, 12], NUM_NEW)


def test_flush_during_a_pause_drops_the_pages_of_retracted_requests(path: Path) -> None:
    with client_of(path) as client:
        request, _ = client.pause_at(5, mode="retract")
        assert client.info()["kv_pages_cached"] >= 6
        client.post("/flush_cache").raise_for_status()
        assert client.info()["kv_pages_cached"] == 0
        client.post("/continue_generation").raise_for_status()
        assert request.result().json()["output_ids"] == reference_tokens(path, PROMPT, NUM_NEW)
        assert client.info()["recomputed_tokens"] >= 24


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("/pause_generation", {"mode": "keep"}, "mode='keep': must be one of abort, retract, in_place"),
        ("/pause_generation", {"mode": 1}, "mode=1: must be one of abort, retract, in_place"),
        ("/pause_generation", {"clear_cache": True}, "clear_cache is not supported; supported: mode"),
        ("/continue_generation", {"mode": "abort"}, "mode is not supported; supported: no field"),
    ],
)
def test_pause_routes_refuse_invalid_bodies(url: str, route: str, body: dict[str, Any], message: str) -> None:
    answer = httpx.post(url + route, json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert not httpx.get(url + "/get_server_info").json()["is_paused"]


def test_continue_without_a_pause_and_twice_is_accepted(url: str) -> None:
    for _ in range(2):
        assert httpx.post(url + "/continue_generation", json={"torch_empty_cache": True}).json()["num_live"] == 0
    for _ in range(2):
        assert httpx.post(url + "/pause_generation", content=b"").json()["num_live"] == 0
    assert httpx.post(url + "/continue_generation").status_code == 200


def test_trainer_pauses_and_continues(url: str) -> None:
    trainer = Trainer(url)
    assert trainer.pause_generation("retract") == 0
    assert httpx.get(url + "/get_server_info").json()["is_paused"]
    with pytest.raises(UsageError, match="mode='keep': must be one of abort, retract, in_place"):
        trainer.pause_generation("keep")
    assert trainer.continue_generation() == 0
    trainer.close()


def test_a_pause_ends_with_the_server(path: Path) -> None:
    with LLM(path) as llm:
        made = Served(llm, [])
        made.client.post("/pause_generation").raise_for_status()
        made.close()
        (found,) = llm.generate([PROMPT], SamplingParams(max_new_tokens=4, ignore_eos=True))
        assert list(found.token_ids) == reference_tokens(path, PROMPT, 4)
