"""Data-parallel replicas behind one server: routing, commands to all replicas, and the loss of one."""

import asyncio
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import zmq
from dp_server import GREEDY, PROMPT, Server, _ended, _started
from dp_server import models as models
from dp_server import server as server
from engine_helpers import reference_tokens
from engine_observers import JournalIn, Memory
from jobs import LIMIT_S, wait_until
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save

from tapscope.core.errors import CheckpointError, ConfigError, LiveError, RankLostError, UsageError
from tapscope.core.wire import Message
from tapscope.engine import LLM, SamplingParams
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.engine import Engine
from tapscope.engine.execution.model_runner import ModelRunner
from tapscope.engine.execution.resolved_settings import resolve_device
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.requests.output import Output
from tapscope.engine.runners.engine_client import EngineClient
from tapscope.engine.runners.engine_service import EngineService
from tapscope.engine.runners.prefix_index import PrefixIndex, blocks_of
from tapscope.sources import open_run

TALK: list[Any] = [{"role": "user", "content": "Tell me which of all the numbers that there are is the next."}]
WORDS = "DP replica 1 hangs: no progress for "


def test_router_balances_load_and_replicas_sample_independently(server: Server, models: list[Path]) -> None:
    answers = server.ask("/generate", input_ids=[PROMPT] * 6, sampling_params=GREEDY)
    assert [answer["meta_info"]["dp_rank"] for answer in answers] == [0, 1, 0, 1, 0, 1]
    assert all(answer["output_ids"] == reference_tokens(models[0], PROMPT, 4) for answer in answers)
    warm = GREEDY | {"n": 4, "temperature": 2, "max_new_tokens": 9}
    drawn = server.ask("/generate", input_ids=PROMPT, sampling_params=warm)
    assert len({tuple(answer["output_ids"]) for answer in drawn}) == 4
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert [sum(line["dp_rank"] == replica for line in lines) for replica in (0, 1)] == [5, 5]


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_a_pause_stops_every_replica(server: Server, mode: str) -> None:
    streams = [server.events(f"{mode}-{replica}", replica) for replica in (0, 1)]
    for stream in streams:
        next(stream)
    num_live = 0 if mode == "abort" else 2
    assert server.ask("/pause_generation", mode=mode)["num_live"] == num_live
    steps = server.metric("num_steps_total")
    info = server.http.get("/get_server_info").json()
    assert [(each["is_paused"], each["num_running"] + each["num_waiting"]) for each in info["replicas"]] == [
        (True, num_live // 2)
    ] * 2
    assert server.metric("num_steps_total") == steps
    assert server.ask("/continue_generation")["num_live"] == num_live
    if num_live:
        server.ask("/abort_request", abort_all=True)
    ends = [list(stream)[-1] for stream in streams]
    assert [end["meta_info"]["finish_reason"]["type"] for end in ends] == ["abort"] * 2
    assert [server.generate(replica)["meta_info"]["dp_rank"] for replica in (0, 1)] == [0, 1]


def test_a_capture_that_begins_in_a_pause_records_the_next_steps(server: Server) -> None:
    server.ask("/pause_generation", mode="in_place")
    server.ask("/dumper/capture", steps=2, rules=["lm_head:out=full", "*=off"])
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(server.generate, replica, max_new_tokens=5) for replica in (0, 1)]
        wait_until(lambda: server.http.get("/get_server_info").json()["num_waiting"] == 2, "both requests wait")
        before = server.http.get("/dumper/state").json()
        assert "the capture of 2 steps" in before["capture_under_way"]
        server.ask("/continue_generation")
        assert [len(answer.result()["output_ids"]) for answer in answers] == [5, 5]
    wait_until(lambda: server.http.get("/dumper/state").json()["capture_under_way"] is None, "the capture is complete")
    after = server.http.get("/dumper/state").json()
    for old, new in zip(before["ranks"], after["ranks"], strict=True):
        assert new["total_records"] - old["total_records"] == 2


def test_router_honours_a_pinned_replica(server: Server) -> None:
    assert [server.generate(replica)["meta_info"]["dp_rank"] for replica in (1, 1, 0)] == [1, 1, 0]
    before = server.metric("decode_tokens_total")
    with openai.OpenAI(base_url=f"{server.http.base_url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        for replica, count in (("1", 3), ("0", 2)):
            headers = {"X-data-parallel-rank": replica}
            client.completions.create(
                model=model, prompt=PROMPT, max_tokens=count, temperature=0, extra_headers=headers
            )
            client.embeddings.create(model=model, input=PROMPT, extra_headers=headers)
        for wrong, words in (
            ("2", "this server has 2 replicas, 0 to 1"),
            ("first", "must be the number of a DP replica"),
        ):
            with pytest.raises(openai.BadRequestError, match=words):
                client.completions.create(model=model, prompt=PROMPT, extra_headers={"X-data-parallel-rank": wrong})
    after = server.metric("decode_tokens_total")
    assert {replica: after[replica] - before[replica] for replica in after} == {"0": 2 + 1, "1": 3 + 1}
    for wrong in (2, -1, "1"):
        answer = server.http.post("/generate", json={"input_ids": PROMPT, "data_parallel_rank": wrong})
        assert answer.status_code == 400
        assert "data_parallel_rank" in answer.json()["error"]["message"]


def test_router_prefers_the_replica_with_the_prefix(server: Server) -> None:
    def ask(prompts: list[list[int]]) -> list[tuple[int, int]]:
        """Return the replica and the number of cached tokens for each prompt."""
        answers = [each["meta_info"] for each in server.ask("/generate", input_ids=prompts, sampling_params=GREEDY)]
        return [(answer["dp_rank"], answer["cached_tokens"]) for answer in answers]

    prefixes = [[10 + group, *range(50, 370), group] for group in range(4)]  # 20 pages of 16 tokens and a rest
    first = [ask([[*prefix, 7]])[0] for prefix in prefixes]
    assert sorted(replica for replica, _ in first) == [0, 0, 1, 1]  # new prefixes go to the emptier cache
    later = [ask([[*prefix, end]])[0] for end in (8, 9, 11) for prefix in prefixes]
    assert later == [(replica, 320) for replica, _ in first] * 3  # the same hits as with one replica
    talk = server.ask("/generate", input_ids=prefixes[0], sampling_params=GREEDY | {"max_new_tokens": 40})
    more = [*prefixes[0], *talk["output_ids"], 7]
    assert ask([more]) == [(first[0][0], (len(more) - 2) // 16 * 16)]  # generated tokens count too
    crowd = [replica for replica, _ in ask([[*prefixes[0], end] for end in range(100, 108)])]
    assert crowd[:2] == [first[0][0]] * 2
    assert abs(crowd.count(0) - crowd.count(1)) <= 2
    spread = [replica for replica, _ in ask([[200 + number, *range(50, 90)] for number in range(8)])]
    assert (spread.count(0), spread.count(1)) == (4, 4)
    text = server.http.get("/metrics").text
    routed = [s for f in text_string_to_metric_families(text) for s in f.samples if "routed_requests_total" in s.name]
    assert sum(sample.value for sample in routed if sample.labels["by"] == "prefix") >= 13
    cached = server.metric("cached_tokens_total")
    assert all(cached[replica] >= 3 * 2 * 320 for replica in "01")
    server.ask("/flush_cache")
    assert ask([prefixes[1]])[0][1] == 0


def test_prefix_index_evicts_blocks_from_their_ends() -> None:
    index = PrefixIndex(max_kept=6)
    first, second = list(range(100)), [*range(40), *range(200, 260)]
    index.note(blocks_of(first))
    assert (len(index), index.num_matched(blocks_of(first))) == (6, 96)
    assert index.num_matched(blocks_of(second)) == 32
    assert index.num_matched(blocks_of([9, *first])) == 0
    index.note(blocks_of(second)[:3])
    assert (len(index), index.num_matched(blocks_of(second)), index.num_matched(blocks_of(first))) == (6, 48, 80)
    assert len(blocks_of(range(10**6))) == 1024
    index.clear()
    assert index.num_matched(blocks_of(first)) == 0


def test_router_keeps_a_chat_on_its_replica(server: Server, models: list[Path]) -> None:
    with openai.OpenAI(base_url=f"{server.http.base_url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        more: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
        answers = {}
        for replica in "01":
            made = client.chat.completions.create(
                messages=TALK, extra_headers={"X-data-parallel-rank": replica}, **more
            )
            answers[replica] = made.choices[0].message.content
            chunks = client.chat.completions.create(
                messages=TALK, stream=True, extra_headers={"X-data-parallel-rank": replica}, **more
            )
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answers[replica]
        assert answers["0"] == answers["1"]
        several = client.chat.completions.create(messages=TALK, n=4, **more)
        assert [choice.message.content for choice in several.choices] == [answers["0"]] * 4
        talk = [*TALK, {"role": "assistant", "content": answers["0"]}, {"role": "user", "content": "And the next one?"}]
        first = client.chat.completions.create(messages=talk, **more)
        again = client.chat.completions.create(messages=[*talk, *talk[-2:]], **more)
        assert again.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens // 16 * 16
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert {line["dp_rank"] for line in lines[-2:]} == {lines[-1]["dp_rank"]}
    with LLM(models[0]) as llm:
        (alone,) = llm.chat([TALK], max_new_tokens=6, ignore_eos=True)
    assert answers["0"] == alone.text


def test_abort_reaches_the_replica_of_the_request(server: Server) -> None:
    first, second = server.events("first", 0), server.events("second", 1)
    assert [next(stream)["meta_info"]["dp_rank"] for stream in (first, second)] == [0, 1]
    refused = server.http.post("/generate", json={"input_ids": PROMPT, "rid": "second", "data_parallel_rank": 0})
    assert "'second' is in use by a live request" in refused.json()["error"]["message"]
    server.ask("/abort_request", rid="second")
    assert list(second)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.metric("num_running") == {"0": 1, "1": 0}
    third = server.events("third", 1)
    next(third)
    server.ask("/abort_request", abort_all=True)
    assert [list(stream)[-1]["meta_info"]["finish_reason"]["type"] for stream in (first, third)] == ["abort"] * 2


def test_flush_and_weight_updates_reach_every_replica(server: Server, models: list[Path]) -> None:
    prompt = list(range(40, 80))
    cached = lambda: [server.generate(each, prompt)["meta_info"]["cached_tokens"] for each in (0, 1)]  # noqa: E731
    assert (cached(), cached()) == ([0, 0], [32, 32])
    assert server.ask("/flush_cache")["num_pages"] >= 2 * 2
    assert cached() == [0, 0]
    other = {"model_path": str(models[0].parent)}
    refused = server.http.post("/update_weights_from_disk", json=other)
    assert (refused.status_code, "DP replica 0: " in refused.text) == (400, True)
    answer = server.ask("/update_weights_from_disk", model_path=str(models[1]), weight_version="v2")
    assert (answer["weight_version"], answer["num_live"]) == ("v2", 0)
    for replica in (0, 1):
        answer = server.generate(replica)
        assert answer["output_ids"] == reference_tokens(models[1], PROMPT, 4)
        assert answer["meta_info"]["weight_version"] == "v2"
    body = save(load_file(models[0] / "model.safetensors"))
    server.http.post("/update_weights_from_tensor?weight_version=v3", content=body).raise_for_status()
    assert all(server.generate(each)["output_ids"] == reference_tokens(models[0], PROMPT, 4) for each in (0, 1))


def test_health_info_and_taps_cover_all_replicas(server: Server) -> None:
    before = server.metric("num_steps_total")
    server.http.get("/health_generate").raise_for_status()
    after = server.metric("num_steps_total")
    assert all(after[replica] == before[replica] + 1 for replica in "01")
    info = server.http.get("/get_server_info").json()
    assert (info["dp"], info["kv_pages_total"]) == (2, 2 * 1024)
    assert [each["num_steps"] for each in info["replicas"]] == [after["0"], after["1"]]
    server.ask("/dumper/configure", keep="full", rules=["lm_head:out=full", "*=off"])
    assert [server.generate(each)["meta_info"]["dp_rank"] for each in (0, 1)] == [0, 1]
    state = server.http.get("/dumper/state").json()
    assert [(rank["rank"], rank["status"]) for rank in state["ranks"]] == [(0, "connected"), (1, "connected")]
    assert state["hints"] == []
    server.ask("/dumper/configure", enabled=False)


@pytest.mark.soak
def test_server_replaces_a_lost_recorder_and_exits_with_a_hung_replica(models: list[Path], tmp_path: Path) -> None:
    server = _started(models[0], tmp_path, "--set", "rank_timeout_s=3", "--keep", "full", "--site", "lm_head:out")
    try:
        _replace_the_recorder(server)
        _lose_a_replica(server)
    finally:
        code, output = _ended(server)
    assert (code, WORDS in output, "tapscope stops recording" in output) == (4, True, True)
    with open_run(server.run) as run:
        assert "recorder was killed: ranks 0, 1" in " ".join(run.ledger().sentences())
    with open_run(server.run.with_name("run-2")) as run:
        assert "died while recording: rank 1" in run.ledger().sentences()
        assert (run.ledger().lost, run.ledger().dropped) == (0, 0)
        assert {record.key.rank for record in run.records} == {0, 1}
        assert {"first", "captured"} <= run.tokens().keys()


def _replace_the_recorder(server: Server) -> None:
    under_way = server.events("first", 0)
    next(under_way)
    server.generate(1)
    os.kill(json.loads((server.run / "recorder.json").read_text())["pid"], signal.SIGKILL)
    gone = server.http.get("/dumper/state")
    assert (gone.status_code, "/dumper/reset continues in a new run" in gone.json()["error"]) == (503, True)
    next(under_way)  # the model keeps running
    refused = server.http.post("/dumper/reset", json={"run": "../x"})
    assert (refused.status_code, "must be a plain name" in refused.json()["error"]) == (400, True)
    answer = server.ask("/dumper/reset")
    assert (answer["run"], list(answer["ranks"])) == (str(server.run.with_name("run-2")), ["0", "1"])
    next(under_way)
    server.ask("/generate", input_ids=PROMPT, sampling_params=GREEDY, data_parallel_rank=1, rid="captured")
    server.ask("/abort_request", rid="first")
    assert list(under_way)[-1]["meta_info"]["finish_reason"]["type"] == "abort"


def _lose_a_replica(server: Server) -> None:
    state = server.http.get("/dumper/state").json()
    under_way = server.events("mine", 0)
    next(under_way)
    os.kill(state["ranks"][1]["pid"], signal.SIGSTOP)
    wait_until(lambda: server.http.get("/health").status_code == 503, "the loss is noticed")
    for dp_rank in (0, 1):
        answer = server.http.post("/generate", json={"input_ids": PROMPT, "data_parallel_rank": dp_rank})
        assert (answer.status_code, answer.json()["error"]["message"].startswith(WORDS)) == (503, True)
    server.ask("/abort_request", rid="mine")
    assert list(under_way)[-1]["meta_info"]["finish_reason"]["type"] == "abort"  # the other replica kept running it


def test_server_refuses_requests_while_replica_weights_differ(models: list[Path]) -> None:
    with LLM(models[0], num_pages=64) as first, LLM(models[0], num_pages=64) as second, zmq.Context() as context:
        services, threads = [], []
        for number, llm in enumerate((first, second)):
            router = context.socket(zmq.ROUTER)
            router.bind(f"inproc://replica-{number}")
            services.append(EngineService(llm.engine, router))
            threads.append(threading.Thread(target=_run, args=(services[-1], router)))
            threads[-1].start()
        try:
            asyncio.run(_disagree(context, second.engine, str(models[1])))
        finally:
            for thread in threads:
                thread.join(LIMIT_S)


def _run(service: EngineService, router: "zmq.Socket[bytes]") -> None:
    service.run()
    router.close(linger=0)


async def _disagree(context: "zmq.Context[Any]", engine: Engine, folder: str) -> None:
    client = EngineClient(context, ["inproc://replica-0", "inproc://replica-1"], None)
    load = engine.update_weights

    def vanished(*_: Any, **__: Any) -> None:
        raise CheckpointError("the file has vanished")

    engine.update_weights = vanished  # the check has passed
    with pytest.raises(LiveError, match=r"different weights: 1 kept the old ones \(the file has vanished\)"):
        await client.update_weights(folder, partial=False)
    with pytest.raises(LiveError, match="different weights"):
        await client.generate(PROMPT)
    engine.update_weights = load  # type: ignore[method-assign]
    assert await client.update_weights(folder, partial=False) == {"num_live": 0}
    release = engine.weights.release_memory
    engine.weights.release_memory = vanished  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="DP replica 1: the file has vanished"):
        await client.release_memory(None)
    engine.weights.release_memory = release  # replica 0 has its memory again
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    made = [await client.generate(PROMPT, params, dp_rank=replica) for replica in (0, 1)]
    assert made[0].token_ids == made[1].token_ids
    for replica in client.replicas:
        replica.send(Message("stop"))
    client.close()


PROMPTS = [PROMPT, list(range(40, 75)), [300], [9, 8]]


def test_llm_distributes_calls_over_replicas_and_names_a_lost_one(models: list[Path], tmp_path: Path) -> None:
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    expected = [reference_tokens(models[0], prompt, 6) for prompt in PROMPTS]
    threads = torch.get_num_threads()
    with LLM(models[0], dp=2, num_pages=1024, observer=JournalIn(tmp_path)) as llm:
        made = llm.generate(PROMPTS, params)
        assert [list(each.token_ids) for each in made] == expected
        assert [(each.request, each.dp_rank) for each in made] == [("0", 0), ("1", 1), ("2", 0), ("3", 1)]
        chats = llm.chat([TALK, TALK, [*TALK, *TALK]], params)
        assert [chat.token_ids for chat in chats[:2]] == [chats[0].token_ids] * 2
        assert {chat.dp_rank for chat in chats} == {0, 1}
        assert list(chats[2].token_ids) == reference_tokens(models[0], llm.chat_prompt([*TALK, *TALK]), 6)
        (forced,) = llm.generate([PROMPT], params, forced_token_ids=[[1, 2]])
        assert forced.token_ids[:2] == (1, 2)
        outputs = list(llm.stream(PROMPTS[:2], params, request_ids=["a", "b"]))
        assert {output.request: output.dp_rank for output in outputs} == {"a": 0, "b": 1}
        assert [t for output in outputs if output.request == "b" for t in output.token_ids] == expected[1]
        asyncio.run(_together(llm, params, expected))
        with pytest.raises(UsageError, match="request id 'x' is in use"):
            llm.generate(PROMPTS[:2], params, request_ids=["x", "x"])
        with pytest.raises(UsageError, match="submit steps a single engine, but dp=2; use generate, chat, stream, "):
            llm.submit(PROMPT)
        under_way = llm.stream([PROMPT], SamplingParams(max_new_tokens=4000, ignore_eos=True))
        assert next(under_way).dp_rank == 0
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
        for _ in range(2):  # whenever the loss is detected
            with pytest.raises(RankLostError, match="DP replica 1 was killed by signal 9"):
                llm.generate(PROMPTS * 8, params)
        assert next(under_way).token_ids  # the other replica keeps running
        under_way.close()
    assert torch.get_num_threads() == threads
    assert not multiprocessing.active_children()
    assert (tmp_path / "closed-0").exists()


async def _together(llm: LLM, params: SamplingParams, expected: list[list[int]]) -> None:
    """Run overlapping async calls concurrently with a synchronous call."""
    streamed, (answer,), blocking = await asyncio.gather(
        _all_of(llm.astream(PROMPT, params)),
        llm.agenerate([PROMPTS[1]], params),
        asyncio.to_thread(llm.generate, [PROMPTS[2]], params),
    )
    assert [streamed, list(answer.token_ids), list(blocking[0].token_ids)] == expected[:3]


async def _all_of(outputs: AsyncGenerator[Output]) -> list[int]:
    return [token async for output in outputs for token in output.token_ids]


def test_ranks_of_replicas_have_distinct_mesh_coordinates(models: list[Path]) -> None:
    model, places = ModelConfig.read(models[0]), []
    for dp_rank, tp_rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        config = EngineConfig(model=str(models[0]), device="cpu", dp=2, dp_rank=dp_rank, tp=2, num_pages=64)
        places.append(ModelRunner(config, model, TensorParallel(tp_rank, 2), Memory).observer.info)
    assert [info.rank for info in places] == [0, 1, 2, 3]
    assert [tuple(info.coords.values()) for info in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {(info.world_size, *info.mesh.items(), *info.own_steps) for info in places} == {
        (4, ("dp", 2), ("tp", 2), "dp")
    }


def test_replicas_have_distinct_devices_threads_and_seeds(models: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(models[0]), dp=2, dp_rank=1, tp=2, num_pages=64)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [resolve_device(config, rank).index for rank in (0, 1)] == [2, 3]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(ConfigError, match="dp=2 replicas of tp=2 ranks need 4 GPUs but there are 3"):
        resolve_device(config, 0)
    with pytest.raises(ConfigError, match="tp=4 ranks need 4 GPUs but there are 3"):
        LLM(models[0], tp=4, rank_timeout_s=600)  # fails before any rank is started
    monkeypatch.undo()
    assert len({EngineConfig(model="m", dp=3, dp_rank=rank, seed=7).replica_seed() for rank in range(3)}) == 3
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        engine = Engine(EngineConfig(model=str(models[0]), device="cpu", dp=2, num_pages=64), None)
        assert torch.get_num_threads() == 2
        engine.close()
    finally:
        torch.set_num_threads(threads)


def test_data_parallel_rejects_invalid_settings() -> None:
    for settings, words in (
        ({"dp": 0}, "dp=0: must be an integer ≥ 1"),
        ({"dp": 2, "dp_rank": 2}, "dp_rank=2: must be below dp=2"),
        ({"dp": 2, "launch": "external"}, "dp=2: needs launch='spawn'"),
    ):
        with pytest.raises(ConfigError, match=words):
            EngineConfig(model="m", **settings)
