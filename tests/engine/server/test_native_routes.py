"""The native routes over HTTP: streams, logprobs, aborts, weights, metrics, the request log and access control."""

import json
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from checkpoints import make_llama
from engine_helpers import reference, reference_logits, reference_tokens
from engine_http import Served
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save

from tapscope.core.errors import UsageError
from tapscope.engine import LLM
from tapscope.engine.api.native_request import LogprobOptions
from tapscope.engine.api.native_response import ResponseStyle, answer
from tapscope.engine.requests.output import Output
from tapscope.engine.requests.per_token_outputs import HiddenStates
from tapscope.engine.requests.token_logprob import TokenLogprob
from tapscope.engine.server import ServerSettings

GREEDY = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
KEY = "s3cret"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "requests.jsonl"


@pytest.fixture(scope="module")
def served(path: Path, log: Path) -> Iterator[Served]:
    settings = ServerSettings(api_key=KEY, max_body_bytes=1 << 20, request_log=str(log), max_waiting=8)
    with LLM(path, max_num_seqs=2) as llm:
        made = Served(llm, [], settings)
        made.client.headers["Authorization"] = f"Bearer {KEY}"
        yield made
        made.close()


def _metrics(served: Served) -> dict[str, float]:
    text = served.client.get("/metrics").raise_for_status().text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            label = sample.labels.get("reason") or sample.labels.get("stage", "")
            found[sample.name.removeprefix("tapscope_engine_") + label] = sample.value
    return found


def test_generate_stream_accumulates_to_the_whole_answer(served: Served, path: Path) -> None:
    whole = served.generate(input_ids=[5, 6, 7], sampling_params=GREEDY).json()
    events = list(served.stream(input_ids=[5, 6, 7], sampling_params=GREEDY, rid="s"))
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    for earlier, later in pairwise(events):
        assert later["text"].startswith(earlier["text"])
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
    last = events[-1]
    assert (last["output_ids"], last["text"]) == (reference_tokens(path, [5, 6, 7], 8), whole["text"])
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
    assert last["meta_info"]["id"] == "s"


def test_generate_stream_indexes_batches_and_n(served: Served, path: Path) -> None:
    prompts = [[5, 6], [300, 4, 9]]
    last = {e["index"]: e for e in served.stream(input_ids=prompts, sampling_params=GREEDY)}
    assert [last[i]["output_ids"] for i in (0, 1)] == [reference_tokens(path, prompt, 8) for prompt in prompts]
    params = GREEDY | {"n": 2, "temperature": 1.0, "sampling_seed": 7}
    answers = served.generate(input_ids=[5], sampling_params=params, rid="many").json()
    assert [answer["meta_info"]["id"] for answer in answers] == ["many-0", "many-1"]
    assert answers[0]["output_ids"] != answers[1]["output_ids"]


def test_generate_returns_the_models_logprobs(served: Served, path: Path) -> None:
    body = {"input_ids": [5, 6, 7], "sampling_params": GREEDY, "return_logprob": True, "top_logprobs_num": 2}
    meta = served.generate(**body, logprob_start_len=1, return_text_in_logprobs=True).json()["meta_info"]
    tokens = [5, 6, 7, *reference_tokens(path, [5, 6, 7], 8)]
    expected = reference_logits(path, tokens).log_softmax(-1)
    found = meta["input_token_logprobs"] + meta["output_token_logprobs"]
    assert [token for _, token, _ in found] == tokens[1:]
    assert [text for *_, text in found] == [served.llm.tokenizer.decode([token]) for token in tokens[1:]]
    for position, (value, token, _) in enumerate(found):
        assert value == pytest.approx(float(expected[position, token]), abs=1e-4)
    for position, best in enumerate(meta["output_top_logprobs"], start=2):
        assert [token for _, token, _ in best] == expected[position].topk(2).indices.tolist()
    assert len(meta["input_top_logprobs"]) == 2


def test_generate_with_zero_new_tokens_returns_prompt_values(served: Served, path: Path) -> None:
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    answer = served.generate(**body, logprob_start_len=0).json()
    assert (answer["output_ids"], answer["text"]) == ([], "")
    meta = answer["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert meta["output_token_logprobs"] == []
    expected = reference_logits(path, [5, 6, 7]).log_softmax(-1)
    assert meta["input_token_logprobs"][0] == [None, 5, None]
    for position, (value, token, _) in enumerate(meta["input_token_logprobs"][1:]):
        assert (token, value) == (position + 6, pytest.approx(float(expected[position, token]), abs=1e-4))
    assert [event["meta_info"]["completion_tokens"] for event in list(served.stream(**body))[:1]] == [0]


def test_generate_passes_every_sampling_parameter(served: Served, path: Path) -> None:
    params = {"max_new_tokens": 2, "ignore_eos": True, "logprobs": 1, "prompt_logprobs": 0, "full_logprobs": True}
    meta = served.generate(input_ids=[5, 6, 7], sampling_params=params).json()["meta_info"]
    row = reference_logits(path, [5, 6, 7]).log_softmax(-1)[-1]
    assert meta["output_full_logprobs"][0] == pytest.approx(row.tolist(), abs=1e-4)
    assert meta["output_top_logprobs"][0][0][1] == row.argmax()
    assert meta["input_token_logprobs"][0] == [None, 5, None]  # the first token is not predicted
    assert [item[1] for item in meta["input_token_logprobs"]] == [5, 6, 7]
    params = {"max_new_tokens": 60, "temperature": 2.0, "sampling_seed": 1, "regex": "[0-9]{4}-x[a-c]{3}"}
    whole = served.generate(input_ids=[5], sampling_params=params).json()
    assert re.fullmatch(params["regex"], whole["text"])
    params |= {"stop": ["-x"]}
    cut = served.generate(input_ids=[5], sampling_params=params).json()
    assert cut["text"] == whole["text"][:4]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": "-x"}
    events = list(served.stream(input_ids=[5], sampling_params=params))
    assert (events[-1]["text"], events[-1]["output_ids"]) == (cut["text"], cut["output_ids"])
    refused = served.generate(input_ids=[5], sampling_params={"json_schema": '{"type": "nope"}'})
    assert refused.status_code == 400
    assert "Invalid type: nope" in refused.json()["error"]["message"]


def test_abort_request_returns_partial_output(served: Served) -> None:
    params = GREEDY | {"max_new_tokens": 200}
    with (
        ThreadPoolExecutor(2) as pool,
        served.client.stream(
            "POST", "/generate", json={"input_ids": [5], "sampling_params": params, "stream": True, "rid": "x"}
        ) as response,
    ):
        lines = (line for line in response.iter_lines() if line)
        next(lines)  # the request runs
        other = pool.submit(served.generate, input_ids=[6], sampling_params=params, rid="y")
        assert served.client.post("/abort_request", json={"rid": "x"}).json() == {"success": True}
        events = [json.loads(line.removeprefix("data: ")) for line in lines if not line.endswith("[DONE]")]
        assert other.result().json()["meta_info"]["finish_reason"]["type"] == "length"  # only request x is aborted
    last = events[-1]["meta_info"]
    assert last["finish_reason"]["type"] == "abort"
    assert 0 < last["completion_tokens"] < 200
    for body in ({}, {"rid": "x", "abort_all": True}, {"rid": 3}):
        assert served.client.post("/abort_request", json=body).status_code == 400
    assert served.client.post("/abort_request", json={"abort_all": True}).status_code == 200


def test_api_key_middleware_guards_every_route_but_health(served: Served) -> None:
    with httpx.Client(base_url=served.client.base_url) as stranger:
        assert stranger.get("/health").status_code == stranger.get("/ping").status_code == 200
        for name in ("/get_server_info", "/metrics", "/v1/models", "/openapi.json", "/nope"):
            refused = stranger.get(name)
            assert refused.status_code == 401
            assert "x-api-key" in refused.json()["error"]["message"]
            assert refused.headers["www-authenticate"].startswith("Bearer")
        for headers in ({"x-api-key": KEY}, {"Authorization": f"bearer {KEY}"}):
            assert stranger.get("/get_server_info", headers=headers).status_code == 200
        for headers in ({"x-api-key": "s3cres"}, {"Authorization": f"Basic {KEY}"}, {"Authorization": "Bearer é"}):
            wrong = {name: value.encode() for name, value in headers.items()}
            assert stranger.get("/get_server_info", headers=wrong).status_code == 401


def test_cross_origin_middleware_refuses_other_origins(served: Served) -> None:
    for origin, status in (("http://page.example", 403), ("null", 403), (str(served.client.base_url), 200)):
        answer = served.client.post("/flush_cache", headers={"Origin": origin})
        assert answer.status_code == status
    assert "cross-origin request from 'x' refused" in served.client.post("/flush_cache", headers={"Origin": "x"}).text


@pytest.mark.parametrize("announced", [True, False])
def test_body_limit_middleware_returns_413(served: Served, announced: bool) -> None:
    piece = b"x" * (1 << 20)
    content: Any = piece * 100 if announced else (piece for _ in range(100))
    response = served.client.post("/generate", content=content)
    assert response.status_code == 413
    assert "longer than 1048576 bytes" in response.json()["error"]["message"]
    assert served.generate(input_ids=[5], sampling_params=GREEDY).status_code == 200


def test_body_limit_middleware_refuses_two_lengths(served: Served) -> None:
    address = served.client.base_url
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 4\r\n"
    smuggled = "GET /get_model_info HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection((address.host, address.port), timeout=30) as client:
        client.sendall((head + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled).encode())
        answer = b"".join(iter(lambda: client.recv(4096), b"")).decode()
    assert answer.startswith("HTTP/1.1 400 ")
    assert "both Content-Length and Transfer-Encoding" in answer
    assert answer.count("HTTP/1.1") == 1


def test_engine_client_refuses_more_than_max_waiting(served: Served) -> None:
    params = GREEDY | {"max_new_tokens": 30}
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda _: served.generate(input_ids=[5], sampling_params=params), range(24)))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert {answer.status_code for answer in refused} <= {503}
    assert all(answer.headers["retry-after"] == "1" for answer in refused)
    assert len(answers) - len(refused) >= 8  # up to eight may wait, in addition to running requests
    together = served.generate(input_ids=[[5]] * 24, sampling_params=params)
    assert together.status_code == 503
    assert "requests are already waiting" in together.json()["error"]["message"]
    assert served.info()["num_running"] + served.info()["num_waiting"] == 0  # the rest of the batch was aborted


def test_app_returns_500_in_the_dialect_of_the_path(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("tapscope.engine.server.native_routes.read_generations", explode)
    answer = served.generate(input_ids=[5])
    assert answer.status_code == 500
    assert "ZeroDivisionError" in answer.json()["error"]["message"]


def test_metrics_have_queue_times_and_prompt_lengths(served: Served, path: Path) -> None:
    before = _metrics(served)
    served.generate(input_ids=[5, 6, 7], sampling_params=GREEDY | {"n": 2}).raise_for_status()
    served.client.post("/v1/embeddings", json={"input": [5] * 20}).raise_for_status()
    assert served.generate(input_ids=[5], sampling_params=GREEDY | {"max_new_tokens": 999}).status_code == 400
    after = _metrics(served)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["request_queue_time_seconds_count"] == grown["request_prompt_tokens_count"] == 3
    assert 0 < grown["request_queue_time_seconds_sum"] < grown["e2e_request_latency_seconds_sum"]
    assert grown["request_prompt_tokens_sum"] == 3 + 3 + 20
    families = text_string_to_metric_families(served.client.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels["model_name"] for sample in samples} == {str(path)}
    buckets = {
        float(sample.labels["le"]): sample.value
        for sample in samples
        if sample.name == "tapscope_engine_request_prompt_tokens_bucket"
    }
    assert list(buckets)[:5] == [1, 2, 5, 10, 20]
    assert buckets[5] - buckets[2] >= 2


def test_metrics_count_requests_and_tokens(served: Served) -> None:
    before = _metrics(served)
    ids = list(range(100, 140))
    for _ in range(2):
        served.generate(input_ids=ids, sampling_params=GREEDY).raise_for_status()
    after = _metrics(served)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["cached_tokens_total"] > 0  # the second request reuses the prefix of the first
    assert grown["prefill_tokens_total"] + grown["cached_tokens_total"] == 2 * 40
    assert grown["requests_totallength"] == 2
    assert grown["time_to_first_token_seconds_count"] == grown["e2e_request_latency_seconds_count"] == 2
    assert 0 < grown["inter_token_latency_seconds_count"] <= 2 * 7  # several tokens may arrive together
    assert after["num_running"] == after["num_waiting"] == 0
    assert after["kv_pages_total"] > 0
    assert {name for name in after if name.startswith("startup_seconds")} == {
        "startup_secondscache",
        "startup_secondsmodel",
        "startup_secondsweights",
    }


@pytest.mark.parametrize(
    ("accept", "parse"),
    [
        ("text/plain", text_string_to_metric_families),
        ("application/openmetrics-text; version=1.0.0", openmetrics.text_string_to_metric_families),
        (
            "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.1",
            openmetrics.text_string_to_metric_families,
        ),
    ],
)
def test_metrics_honor_the_accept_header(served: Served, accept: str, parse: Callable[[str], Iterator[Any]]) -> None:
    answer = served.client.get("/metrics", headers={"Accept": accept})
    assert answer.headers["content-type"].startswith(accept.partition(";")[0])
    names = {family.name for family in parse(answer.text)}
    assert {"tapscope_engine_num_steps", "tapscope_engine_e2e_request_latency_seconds"} <= names


def test_generate_cache_salt_separates_cached_prefixes(served: Served) -> None:
    ids = list(range(300, 340))

    def generate(**salt: str) -> int:
        answer = served.generate(input_ids=ids, sampling_params=GREEDY, **salt).raise_for_status()
        return int(answer.json()["meta_info"]["cached_tokens"])

    def complete(**salt: str) -> int:
        body = {"prompt": ids, "max_tokens": 1, **salt}
        usage = served.client.post("/v1/completions", json=body).raise_for_status().json()["usage"]
        return int((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0))

    assert (generate(cache_salt="a"), generate(cache_salt="b"), generate(extra_key="a")) == (0, 0, 32)
    assert (complete(), complete(cache_salt="b"), complete(cache_salt="c")) == (0, 32, 0)
    refused = served.client.post("/v1/completions", json={"prompt": ids, "cache_salt": ""})
    assert (refused.status_code, "must be a non-empty string" in refused.text) == (400, True)


def test_generate_stream_counts_values_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    count = TokenLogprob.num_values.fget  # type: ignore[attr-defined]

    def noted(item: TokenLogprob) -> int:
        counted.append(item.token_id)
        return int(count(item))

    monkeypatch.setattr(TokenLogprob, "num_values", property(noted))
    params = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    served.generate(input_ids=[5, 6], sampling_params=params, return_logprob=True, stream=True).raise_for_status()
    assert 40 <= len(counted) <= 2 * 40, "once in the engine, once in the front"


@pytest.mark.parametrize(
    ("route", "body", "error", "end"),
    [
        ("/generate", {"text": "def", "sampling_params": GREEDY}, {"message": "no", "code": 400}, ["data: [DONE]"]),
        ("/v1/completions", {"prompt": "def"}, {"message": "no", "type": "invalid_request_error"}, []),
        ("/v1/responses", {"input": "def"}, {"message": "no", "type": "invalid_request_error"}, []),
    ],
)
def test_error_after_the_first_event_is_an_event(
    path: Path, tmp_path: Path, route: str, body: dict[str, Any], error: dict[str, Any], end: list[str]
) -> None:
    folder = shutil.copytree(path, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    steps: list[int] = []

    def fail_in_third_step(*_: Any) -> None:
        steps.append(len(steps))
        if len(steps) == 3:
            raise UsageError("no")

    with LLM(folder) as llm:
        made = Served(llm, [])
        llm.model.register_forward_pre_hook(fail_in_third_step)
        reply = made.client.post(route, json=body | {"stream": True})
        made.close()
    assert reply.status_code == 200
    events = [line for line in reply.text.splitlines() if line.startswith("data: ")]
    assert len(events) > 1
    assert events[len(events) - len(end) :] == end
    found = json.loads(events[-1 - len(end)].removeprefix("data: "))["error"]
    assert error.items() <= found.items()


def test_flush_cache_empties_the_prefix_cache(served: Served) -> None:
    ids = list(range(200, 240))
    first, hit = (served.generate(input_ids=ids, sampling_params=GREEDY).json() for _ in range(2))
    assert hit["meta_info"]["cached_tokens"] > first["meta_info"]["cached_tokens"] == 0
    assert served.client.post("/flush_cache").json()["success"]
    again = served.generate(input_ids=ids, sampling_params=GREEDY).json()
    assert again["meta_info"]["cached_tokens"] == 0
    assert again["output_ids"] == first["output_ids"] == hit["output_ids"]


def test_request_log_writes_a_line_per_request(served: Served, log: Path) -> None:
    served.generate(input_ids=[5, 6], sampling_params=GREEDY, rid="logged").raise_for_status()
    assert (
        served.generate(input_ids=[5], sampling_params=GREEDY | {"max_new_tokens": 999}, rid="bad").status_code == 400
    )
    lines = {line["id"]: line for line in map(json.loads, log.read_text().splitlines())}
    line = lines["logged"]
    assert (line["prompt_tokens"], line["completion_tokens"], line["finish_reason"]) == (2, 8, "length")
    assert 0 < line["ttft_s"] <= line["e2e_s"]
    assert lines["bad"]["finish_reason"] == "error"
    assert "the limit is 256" in lines["bad"]["error"]
    assert log.stat().st_mode & 0o777 == 0o600


def test_update_weights_from_disk_and_from_tensor(served: Served, path: Path, tmp_path: Path) -> None:
    other = make_llama(tmp_path / "other", seed=2)
    ids = list(range(40, 80))
    body = {"input_ids": ids, "sampling_params": GREEDY}
    old, new = reference_tokens(path, ids, 8), reference_tokens(other, ids, 8)
    assert old != new
    assert served.generate(**body).json()["output_ids"] == old
    update = {"model_path": str(other), "weight_version": "step-2"}
    answer = served.client.post("/update_weights_from_disk", json=update)
    assert answer.json() == {"success": True, "weight_version": "step-2", "num_live": 0}
    found = served.generate(**body).json()
    assert (found["output_ids"], found["meta_info"]["weight_version"]) == (new, "step-2")
    assert found["meta_info"]["cached_tokens"] == 0

    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    for part in (names[::2], names[1::2]):  # q without k: each half updates every fused parameter
        content = save({name: tensors[name] for name in part})
        route = "/update_weights_from_tensor?weight_version=step-1"
        assert served.client.post(route, content=content).json()["weight_version"] == "step-1"
    assert served.generate(**body).json()["output_ids"] == old


def test_update_weights_takes_a_checkpoint_in_another_dtype(served: Served, path: Path, tmp_path: Path) -> None:
    trained = make_llama(tmp_path / "trained", seed=8, dtype="bfloat16", eos_token_id=7)
    answer = served.client.post("/update_weights_from_disk", json={"model_path": str(trained)})
    assert answer.json()["success"], answer.text
    body = {"input_ids": [5, 6], "sampling_params": GREEDY | {"ignore_eos": True}}
    with LLM(trained, dtype="float32") as llm:
        (expected,) = llm.generate([[5, 6]], max_new_tokens=8, ignore_eos=True)
    assert served.generate(**body).json()["output_ids"] == list(expected.token_ids)
    assert served.client.post("/update_weights_from_disk", json={"model_path": str(path)}).json()["success"]


def test_update_weights_keeps_the_old_weights_on_errors(served: Served, path: Path, tmp_path: Path) -> None:
    expected = reference_tokens(path, [5, 6], 8)
    broken = tmp_path / "broken"
    shutil.copytree(path, broken)
    whole = (path / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(whole[:-1000])
    wider = make_llama(tmp_path / "wider", seed=3, num_hidden_layers=1)
    differs = f"a different model than {path}: num_hidden_layers is 1 instead of 3"
    for folder, message in ((broken, "truncated"), (wider, differs), (tmp_path / "none", "none")):
        answer = served.client.post("/update_weights_from_disk", json={"model_path": str(folder)})
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
    strange = save({"model.nothing.weight": torch.zeros(3)})
    misshaped = save({"model.norm.weight": torch.zeros(3)})
    for content, message in (
        (b"", "empty"),
        (b"no safetensors at all", "the body is truncated: its 21 bytes are fewer than its header needs"),
        (bytes([2, *bytes(7)]) + b"[]", "the body is not a safetensors file"),
        (whole[:3000], "the body is truncated"),
        (save({}), "the body has no tensors"),
        (strange, "the body: model.nothing.weight is unexpected"),
        (misshaped, "model.norm.weight in the body has shape [3]; config.json requires [64]"),
    ):
        answer = served.client.post("/update_weights_from_tensor", content=content)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
    assert served.generate(input_ids=[5, 6], sampling_params=GREEDY).json()["output_ids"] == expected


def test_generate_accepts_stop_regex_and_ebnf(served: Served) -> None:
    params = {"max_new_tokens": 60, "temperature": 2.0, "sampling_seed": 1}
    params |= {"ebnf": 'root ::= digit{4} "-x" [a-c]{3}\ndigit ::= [0-9]'}
    whole = served.generate(input_ids=[5], sampling_params=params).json()
    assert re.fullmatch("[0-9]{4}-x[a-c]{3}", whole["text"])
    params |= {"stop_regex": [r"\W[xy]", "never"], "stream_interval": 2}
    cut = served.generate(input_ids=[5], sampling_params=params).json()
    assert cut["text"] == whole["text"][:4]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": r"\W[xy]"}
    events = list(served.stream(input_ids=[5], sampling_params=params | {"no_stop_trim": True}))
    assert events[-1]["text"] == whole["text"][:6]
    free = GREEDY | {"stream_interval": 3}
    counts = [e["meta_info"]["completion_tokens"] for e in served.stream(input_ids=[5], sampling_params=free)]
    assert counts[-1] == 8
    assert all(later - earlier >= 3 for earlier, later in pairwise(counts[:-1]))
    schema = {"max_new_tokens": 90, "json_schema": "$$ANY$$", "logit_bias": {"96": 50}}  # ends early with "}"
    assert json.loads(served.generate(input_ids=[5], sampling_params=schema).json()["text"]) == {}


def test_generate_returns_hidden_states_of_prompt_and_tokens(served: Served, path: Path) -> None:
    body = {"input_ids": [5, 6, 7], "return_hidden_states": True, "sampling_params": GREEDY | {"max_new_tokens": 4}}
    whole = served.generate(**body).json()
    *_, last = served.stream(**body)
    prompt, *later = whole["meta_info"]["hidden_states"]
    assert last["meta_info"]["hidden_states"] == [prompt, *later]
    assert [len(prompt), len(later)] == [3, 3]
    tokens = torch.tensor([[5, 6, 7, *whole["output_ids"][:-1]]])
    with torch.no_grad():
        expected = reference(path)(tokens, output_hidden_states=True).hidden_states[-1][0]
    assert (torch.tensor([*prompt, *later]) - expected).abs().max() <= 1e-4
    alone = served.generate(**body | {"sampling_params": {"max_new_tokens": 0}}).json()
    assert np.allclose(alone["meta_info"]["hidden_states"], [prompt], atol=1e-5)
    assert "hidden_states" not in served.generate(input_ids=[5, 6, 7], sampling_params=GREEDY).json()["meta_info"]


def test_native_response_writes_non_finite_hidden_states_as_null() -> None:
    states = HiddenStates.from_rows(np.array([[1.0, np.nan], [np.inf, 2.0]]))
    output = Output(request="r", prompt_tokens=1, hidden_states=states)
    meta = answer(output, 0.1, LogprobOptions(), ResponseStyle(), has_text=False)["meta_info"]
    assert meta["hidden_states"] == [[[1.0, None]], [None, 2.0]]


def test_generate_returns_logprobs_of_given_tokens_per_prompt(served: Served, path: Path) -> None:
    body = {"input_ids": [[5, 6, 7], [8, 9]], "sampling_params": GREEDY | {"max_new_tokens": 2}, "rid": "both"}
    body |= {"return_logprob": [True, False], "token_ids_logprob": [[9, 500], []], "logprob_start_len": [0, -1]}
    first, second = served.generate(**body, log_metrics=True, session_id="mine", routed_dp_rank=0).json()
    assert [each["meta_info"]["id"] for each in (first, second)] == ["both-0", "both-1"]
    assert "output_token_logprobs" not in second["meta_info"]
    tokens = [5, 6, 7, *first["output_ids"]]
    expected = reference_logits(path, tokens).log_softmax(-1)
    head, *inputs = first["meta_info"]["input_token_ids_logprobs"]
    assert head is None
    found = inputs + first["meta_info"]["output_token_ids_logprobs"]
    assert len(found) == 4
    for position, entries in enumerate(found):
        assert [(token, text) for _, token, text in entries] == [(9, None), (500, None)]
        assert [value for value, *_ in entries] == pytest.approx(expected[position, [9, 500]].tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"sampling_params": {"stop_regex": "(a"}}, "stop_regex='(a': invalid regular expression"),
        ({"sampling_params": {"ebnf": "root ::= x"}}, "unknown rule x"),
        ({"sampling_params": {"ebnf": 'root ::= "a"', "regex": "a"}}, "regex and ebnf are given"),
        ({"sampling_params": {"stream_interval": 0}}, "stream_interval=0"),
        ({"sampling_params": {"structural_tag": "{}"}}, "structural_tag.format is missing"),
        ({"return_hidden_states": 1}, "true or false"),
        ({"token_ids_logprob": [1]}, "set 'return_logprob'"),
        (
            {"token_ids_logprob": [512], "return_logprob": True},
            "invalid token id 512 in token_ids_logprob: expected 0 to 511",
        ),
        ({"token_ids_logprob": [[1], [2]], "return_logprob": True}, "'token_ids_logprob' has 2 entries for 1 prompts"),
        ({"input_ids": [5, -1]}, "invalid token id -1 in the prompt: expected 0 to 511"),
        ({"input_ids": [1 << 40]}, f"invalid token id {1 << 40} in the prompt: expected 0 to 511"),
        ({"return_logprob": [True, True]}, "'return_logprob' has 2 entries for 1 prompts"),
        ({"top_logprobs_num": [-1], "return_logprob": True}, "top_logprobs_num[0]=-1: must be an integer ≥ 0"),
        ({"routed_dp_rank": 0, "data_parallel_rank": 1}, "name different replicas"),
        ({"routed_dp_rank": 7}, "one replica, 0"),
        ({"log_metrics": False}, "log_metrics=False: must be true, as /metrics counts every request"),
    ],
)
def test_generate_refuses_invalid_fields(served: Served, body: dict[str, Any], message: str) -> None:
    response = served.generate(**{"input_ids": [5]} | body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
