"""`tapscope bench`: workloads, load tests of a real server, and offline runs of the engine."""

import gzip
import io
import json
import threading
from collections.abc import Iterator
from contextlib import redirect_stdout
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from checkpoints import make_checkpoint, make_llama
from engine_http import served
from lora_adapters import make_adapter
from moe_checkpoints import make_moe
from transformers import AutoModelForCausalLM

from tapscope.cli import main
from tapscope.core.errors import DataError, UsageError
from tapscope.engine.bench import machine_limits
from tapscope.engine.bench.latency_stats import RequestTiming, summary
from tapscope.engine.bench.model_cost import ModelCost
from tapscope.engine.bench.request_files import openai_items, trace_items
from tapscope.engine.bench.workload import PromptGenerator, random_items, shared_prefix_items, sharegpt_items
from tapscope.engine.text.tokenizer import Tokenizer


@pytest.fixture(autouse=True, scope="module")
def small_measurements() -> Iterator[None]:
    """Shorten the measurement of machine limits, which every command repeats and which dominates small loads."""
    with patch.dict(machine_limits._READ_BYTES, cpu=16 << 20), patch.dict(machine_limits._SIDE, cpu=256):
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    return folder


@pytest.fixture(scope="module")
def url(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    adapters = tuple(f"{name}={make_adapter(folder / name, path, ['q_proj'])}" for name in ("a", "b"))
    settings = {"profile_dir": str(folder / "profile"), "lora_paths": adapters}
    with served(path, settings={"model_name": "tiny"}, **settings) as address:
        yield address


def test_random_items_have_requested_lengths_and_are_seeded(path: Path) -> None:
    tokenizer = Tokenizer.find(path)
    wanted: dict[str, Any] = {"num_prompt": 20, "num_output": 10, "spread": 0.5}
    items = random_items(PromptGenerator(3, tokenizer, as_text=False), 50, **wanted)
    assert items == random_items(PromptGenerator(3, tokenizer, as_text=False), 50, **wanted)
    assert items != random_items(PromptGenerator(4, tokenizer, as_text=False), 50, **wanted)
    assert all(len(item.prompt) == item.num_prompt for item in items)
    assert {item.num_prompt for item in items} <= set(range(10, 31))
    assert min(item.num_prompt for item in items) < 15 < 25 < max(item.num_prompt for item in items)
    assert not {0, 1} & {token for item in items for token in item.prompt}, "special tokens are not plain text"
    words = random_items(PromptGenerator(3, None, as_text=False), 2, **wanted)
    assert all(len(item.prompt.split()) == item.num_prompt for item in words)


def test_shared_prefix_items_share_prefixes_by_group(path: Path) -> None:
    writer = PromptGenerator(0, Tokenizer.find(path), as_text=False)
    items = shared_prefix_items(writer, 20, groups=4, num_prefix=30, num_prompt=5, num_output=8, spread=0.0)
    prefixes = [item.prompt[:30] for item in items]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [5, 5, 5, 5]
    assert len({item.prompt for item in items}) == 20
    assert {item.num_prompt for item in items} == {35}


def test_sharegpt_items_read_and_filter_conversations(tmp_path: Path) -> None:
    def conversation(*turns: str) -> dict[str, Any]:
        return {"conversations": [{"from": "human", "value": text} for text in turns]}

    question, reply = "one two three four five", "a b c d e f"
    file = tmp_path / "talks.json"
    conversations = [(question, reply), ("hi", reply), ("alone",), ("w " * 99, reply)]
    file.write_text(json.dumps([conversation(*turns) for turns in conversations]))
    wanted: dict[str, Any] = {"tokenizer": None, "seed": 0, "num_output": None, "max_tokens": 50}
    items, skipped = sharegpt_items(file, 3, **wanted)
    assert [(item.prompt, item.num_prompt, item.num_output) for item in items] == [(question, 5, 6)] * 3
    assert skipped == 2
    with pytest.raises(UsageError, match="no conversation of 4 to 5 tokens"):
        sharegpt_items(file, 3, **(wanted | {"max_tokens": 5}))
    file.write_text('{"a": 1}')
    with pytest.raises(DataError, match="is not a ShareGPT file"):
        sharegpt_items(file, 3, **wanted)


def test_trace_items_repeat_blocks_with_equal_hashes_and_scale_times(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 3000, "input_length": 20, "output_length": 3, "hash_ids": [7, 8, 9]},
        {"timestamp": 1000, "input_length": 18, "output_length": 2, "hash_ids": [7, 8, 4]},
        {"timestamp": 5000, "input_length": 9, "output_length": 1, "hash_ids": [5]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))

    def read(count: int | None = None) -> list[Any]:
        return trace_items(
            file, count, PromptGenerator(0, Tokenizer.find(path), as_text=False), block_size=8, slowdown=0.5
        )

    first, second, third = read()
    assert [(item.at_s, item.num_prompt, item.num_output) for item in (first, second, third)] == [
        (0.0, 18, 2),
        (1.0, 20, 3),
        (2.0, 9, 1),
    ]
    assert first.prompt[:16] == second.prompt[:16]
    assert first.prompt[16:18] != second.prompt[16:18]
    assert len(third.prompt) == 9
    assert read(2) == [first, second]
    file.write_text('{"timestamp": 1, "input_length": "x"}')
    with pytest.raises(DataError, match=r"trace.jsonl:1 is not a request of a trace"):
        read()


def test_openai_items_read_bodies_and_batch_lines(tmp_path: Path) -> None:
    file = tmp_path / "bodies.jsonl"
    chat = {"model": "x", "messages": [{"role": "user", "content": "one two three"}], "max_tokens": 5, "seed": 3}
    batch = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "one two"}}
    file.write_text(f"{json.dumps(chat)}\n\n{json.dumps(batch)}\n")
    first, second, again = openai_items(file, 3, tokenizer=None, num_output=9)
    assert first == again
    assert (first.num_prompt, first.num_output) == (3, 5)
    assert first.body == {"messages": chat["messages"], "max_tokens": 5, "seed": 3}
    assert (second.num_prompt, second.num_output, second.body) == (2, 9, {"prompt": "one two"})
    file.write_text(json.dumps(batch | {"url": "/v1/embeddings"}))
    with pytest.raises(DataError, match=r"bodies.jsonl:1: the url '/v1/embeddings' does not fit its body"):
        openai_items(file, None, tokenizer=None, num_output=9)
    file.write_text('{"input": "x"}')
    with pytest.raises(DataError, match="has no body with either 'messages' or 'prompt'"):
        openai_items(file, None, tokenizer=None, num_output=9)


def test_summary_aggregates_timings() -> None:
    timings = [
        RequestTiming(began=0.0, ended=1.0, first=0.2, gaps=[0.4, 0.4], num_prompt=10, num_output=3, num_cached=8),
        RequestTiming(began=1.0, ended=2.0, first=1.5, gaps=[], num_prompt=10, num_output=1),
        RequestTiming(began=0.0, ended=9.0, error="503: full"),
    ]
    found = summary(timings, 4.0, 2)
    assert (found["completed"], found["failed"], found["errors"]) == (2, 1, [{"error": "503: full", "count": 1}])
    assert (found["requests_per_s"], found["output_tokens_per_s"], found["total_tokens_per_s"]) == (0.5, 1.0, 6.0)
    assert found["ttft_ms"]["mean"] == pytest.approx(350)
    assert found["ttft_ms"]["p50"] == pytest.approx(350)
    assert found["tpot_ms"]["max"] == pytest.approx(400)
    assert found["itl_ms"]["std"] == pytest.approx(0)
    assert found["e2e_ms"]["mean"] == pytest.approx(1000)
    assert summary(timings[2:], 1.0, 1)["ttft_ms"] is None


def test_model_cost_counts_active_weights(path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(path)
    cost, config = ModelCost.read(path, kv_bytes=7), model.config
    expected = sum(p.numel() for name, p in model.named_parameters() if "embed_tokens" not in name)
    assert (cost.active_weights, cost.weight_bytes, cost.dtype) == (expected, 4 * expected, "float32")
    layers, head_dim = config.num_hidden_layers, config.hidden_size // config.num_attention_heads
    assert cost.flops(3, 5) == 6 * expected + 5 * 4 * layers * config.num_attention_heads * head_dim
    assert cost.bytes_read(2, 3) == 8 * expected + 3 * 7


def test_model_cost_counts_the_features_of_layers_with_attention(tmp_path: Path) -> None:
    for checkpoint in (make_checkpoint(tmp_path / "bamba", "bamba"), make_moe(tmp_path / "nemotron", "nemotron_h")):
        assert ModelCost.read(checkpoint).attention_flops == 4 * 64, "one layer, heads of 64 features together"
    latent = make_moe(tmp_path / "latent", "deepseek_v3")
    config = json.loads((latent / "config.json").read_text())
    head_features = config["qk_nope_head_dim"] + config["qk_rope_head_dim"] + config["v_head_dim"]
    assert ModelCost.read(latent).attention_flops == 2 * 3 * config["num_attention_heads"] * head_features


def test_bench_serving_measures_a_server(
    url: str, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "result.json"
    command = ["bench", "serving", url, "--num-prompts", "24", "--max-concurrency", "8", "--input-len", "20"]
    assert main([*command, "--output-len", "6", "--rate", "500", "-o", str(result)]) == 0
    text = capsys.readouterr().out
    found = json.loads(result.read_text())
    assert (found["completed"], found["failed"], found["model"]) == (24, 0, "tiny")
    assert (found["prompt_tokens"], found["output_tokens"]) == (24 * 20, 24 * 6)
    assert 1 <= found["peak_concurrency"] <= 8
    assert 0 < found["ttft_ms"]["p50"] <= found["e2e_ms"]["p50"] <= found["e2e_ms"]["max"]
    assert found["output_tokens_per_s"] == pytest.approx(144 / found["duration_s"])
    assert 0 < found["flops_share"] < 1
    assert "24 completed, 0 failed" in text
    assert "TTFT" in text


def _serving(url: str, *words: str) -> dict[str, Any]:
    """Return the result of ``bench serving`` with these flags, which must succeed."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["bench", "serving", url, "--warmup", "0", "--json", *words]) == 0
    return dict(json.loads(out.getvalue()))


@pytest.mark.parametrize("chat", [False, True])
def test_bench_multi_turn_sends_the_conversation_so_far(url: str, chat: bool) -> None:
    turns = ["--dataset", "multi-turn", "--num-turns", "3", "--prefix-len", "32", "--input-len", "8"]
    found = _serving(url, "--num-prompts", "2", *turns, "--output-len", "4", *(["--chat"] if chat else []))
    assert (found["completed"], found["failed"], found["output_tokens"]) == (6, 0, 24)
    assert found["prompt_tokens"] > 2 * (40 + 48 + 56), "a turn has the turns and replies before it"
    assert found["cached_tokens"] >= 2 * (32 + 32), "the second and third turn hit the prefix of the first"


def test_bench_trace_keeps_arrival_times_and_shared_prefixes(url: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    entry = {"input_length": 40, "output_length": 3, "hash_ids": [1, 2]}
    file.write_text("\n".join(json.dumps(entry | {"timestamp": 400 * index}) for index in range(3)))
    trace = ["--dataset", "trace", "--dataset-path", str(file), "--trace-block-size", "32"]
    found = _serving(url, *trace)
    assert (found["completed"], found["prompt_tokens"], found["output_tokens"]) == (3, 120, 9)
    assert found["cached_tokens"] >= 2 * 32
    assert found["duration_s"] >= 0.8
    assert _serving(url, *trace, "--trace-slowdown", "0", "--num-prompts", "2")["completed"] == 2


def test_bench_openai_file_with_adapters_and_a_profile(url: str, tmp_path: Path) -> None:
    file = tmp_path / "bodies.jsonl"
    bodies = [{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}, {"prompt": [5, 6, 7]}]
    file.write_text("\n".join(map(json.dumps, bodies)))
    flags = ["--dataset", "openai", "--dataset-path", str(file), "--num-prompts", "8", "--output-len", "2"]
    found = _serving(url, *flags, "--lora", "a", "--lora", "b", "--profile")
    assert (found["completed"], found["output_tokens"], found["lora"]) == (8, 4 * 3 + 4 * 2, ["a", "b"])
    (trace,) = found["profile"]
    events = json.loads(gzip.decompress(Path(trace).read_bytes()))["traceEvents"]
    names = {event["name"] for event in events}
    assert "aten::scaled_dot_product_attention" in names
    assert names & {"aten::mm", "tapscope::grouped_linear"}  # adapters are computed by torch or by the C++ kernel
    assert httpx.post(f"{url}/stop_profile").json()["error"]["message"].startswith("no profile is being recorded")


def test_bench_baseline_fails_on_a_regression(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    command = ["bench", "serving", url, "--num-prompts", "4", "--input-len", "8", "--output-len", "2"]
    assert main([*command, "-o", str(file)]) == 0
    assert main([*command, "--baseline", str(file), "--tolerance", "1000", "--json"]) == 0
    stored, compared = json.loads(file.read_text()), json.loads(capsys.readouterr().out.splitlines()[-1])["baseline"]
    assert compared["num_regressions"] == 0
    assert {"output_tokens_per_s", "ttft_ms_p50", "e2e_ms_mean"} <= {each["name"] for each in compared["metrics"]}
    fast = tmp_path / "fast.json"
    stored["ttft_ms"] = {name: value / 1000 for name, value in stored["ttft_ms"].items()}
    fast.write_text(json.dumps(stored))
    assert main([*command, "--baseline", str(fast), "--tolerance", "20"]) == 1
    assert "regression       TTFT mean" in capsys.readouterr().out
    assert main([*command[:-1], "3", "--baseline", str(file)]) == 2
    assert "--baseline needs the same configuration" in capsys.readouterr().err


def test_bench_serving_counts_failures(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "serving", url, "--num-prompts", "3", "--input-len", "250", "--output-len", "20", "--json"]
    assert main(command) == 4
    found = json.loads(capsys.readouterr().out)
    assert (found["completed"], found["failed"]) == (0, 3)
    assert "supports 256 in total" in found["errors"][0]["error"]
    assert found["errors"][0]["count"] == 3


def test_bench_offline_measures_throughput_and_latency(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--num-groups", "2", "--prefix-len", "32", "--input-len", "8", "--output-len", "4"]
    assert (
        main(["bench", "batch", str(path), "--num-prompts", "6", "--dataset", "shared-prefix", *words, "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["prompt_tokens"], found["output_tokens"]) == (6, 6 * 40, 24)
    assert (found["dtype"], found["device"]) == ("float32", "cpu")
    assert 0 < found["flops_share"] < 1
    assert found["steps"] >= 4
    adapter = make_adapter(tmp_path / "sql", path, ["q_proj"])
    command = ["bench", "latency", str(path), "--batch-size", "2", "--repeat", "2", "--output-len", "5"]
    assert main([*command, "--lora", f"sql={adapter}", "--profile", "--profile-dir", str(tmp_path / "traces")]) == 0
    text = capsys.readouterr().out
    (trace,) = (tmp_path / "traces").rglob("rank-0.json.gz")
    assert f"profile   {trace}" in text
    assert "prefill" in text
    assert "GB/s (memory reads)" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serving", "model"], "expects the address of a server"),
        (["batch", "http://x"], "expects the directory of a checkpoint"),
        (["batch", "model", "--num-prompts", "0"], "--num-prompts is 0"),
        (["batch", "model", "--spread", "1"], "--spread is 1.0"),
        (["serving", "http://x", "--rate", "0"], "--rate is 0.0"),
        (["serving", "http://x", "--dataset", "sharegpt"], "--dataset sharegpt requires --dataset-path"),
        (["serving", "http://x", "--dataset-path", "f"], "--dataset random has no file"),
        (["serving", "http://x", "--tolerance", "-1"], "--tolerance is -1.0"),
        (["batch", "model", "--dataset", "multi-turn"], "--dataset multi-turn needs a server"),
        (["batch", "model", "--lora", "a"], "use --lora NAME=DIR"),
        (["serving", "http://x", "--dataset", "trace", "--dataset-path", "f", "--rate", "2"], "--trace-slowdown"),
        (["latency", "model", "--dataset", "shared-prefix"], "use --dataset random"),
        (["serving", "http://127.0.0.1:9", "--extra", "{}"], "is the server running?"),
    ],
)
def test_bench_rejects_invalid_arguments(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) in (2, 4)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "body", "message"), [(401, "{}", "requires an API key"), (200, "{}", "lists no model")]
)
def test_bench_serving_reports_incompatible_servers_in_one_line(
    status: int, body: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert main(["bench", "serving", f"http://127.0.0.1:{server.server_port}"]) == 4
        finally:
            server.shutdown()
            thread.join()
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
