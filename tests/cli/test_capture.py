"""`dump`, `serve`, `ctl` and `diff` end to end: real processes, real models, real ports."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forkserver_pool as warm
import httpx
import pytest
import torch
from checkpoints import make_llama
from jobs import LIMIT_S, ask, free_port, wait_until
from safetensors.torch import load_file, save_file

from tapscope import wait_for_ready
from tapscope.cli import main
from tapscope.sources import open_run

PROMPTS = ["--prompt", "def main():", "--prompt", "x", "--prompt", "import os, sys"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("models") / "llama", max_position_embeddings=512)


@pytest.fixture(scope="module")
def reference(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run recorded by transformers in fp32."""
    path = tmp_path_factory.mktemp("runs") / "reference"
    assert main(["dump", str(llama), "-o", str(path), "--backend", "hf", *PROMPTS, "--max-new-tokens", "5", "-q"]) == 0
    return path


def _damaged(llama: Path, target: Path, tensor: str) -> Path:
    target.mkdir()
    for file in llama.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    weights = load_file(llama / "model.safetensors")
    torch.manual_seed(1)
    weights[tensor] += torch.randn_like(weights[tensor]) * weights[tensor].square().mean().sqrt() * 0.1
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _command(*words: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "tapscope", *map(str, words)], capture_output=True, text=True, check=False
    )


def test_diff_names_the_read_of_an_fp8_kv_cache(
    llama: Path, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scales = tmp_path / "scales.json"
    scales.write_text(json.dumps({"kv_cache": {"scaling_factor": {"0": {"0": 0.02, "1": 0.02, "2": 0.02}}}}))
    flags = ["--kv-cache-dtype", "fp8", "--quantization-param-path", str(scales)]
    command = ["dump", str(llama), "-o", str(tmp_path / "fp8"), "--tokens-from", str(reference), *flags, "-q"]
    assert main([*command, "--backend", "hf"]) == 2
    assert "--backend hf keeps the KV cache in --dtype" in capsys.readouterr().err
    assert main(command) == 0
    assert open_run(tmp_path / "fp8").manifest["kv_cache_dtype"] == "fp8_e4m3"
    assert main(["info", str(tmp_path / "fp8")]) == 0
    assert "KV cache fp8_e4m3" in capsys.readouterr().out
    assert main(["diff", str(reference), str(tmp_path / "fp8")]) == 1
    said = capsys.readouterr().out
    assert re.search(r"what +model\.layers\.0\.self_attn", said)
    assert re.search(r"^target +fp8 .*, KV fp8_e4m3 ", said, re.MULTILINE)


def test_dump_hf_records_tokens_rows_and_steps(reference: Path) -> None:
    run = open_run(reference)
    assert run.manifest["framework"] == "transformers"
    assert run.ledger().complete, run.ledger().sentences()
    prompts = run.prompts()
    assert list(prompts) == ["0", "1", "2"]
    assert [line[0].info.phase for line in run.steps.values()] == ["prefill", *["decode"] * 4]
    for request, tokens in run.tokens().items():
        assert sorted(tokens) == list(range(len(prompts[request]) + 4))
    assert run.steps[0][0].info.num_rows == sum(map(len, prompts.values()))


@pytest.mark.parametrize(("tp", "dtype"), [(1, "float32"), (2, "float32"), (2, "bfloat16")])
def test_dump_engine_agrees_with_transformers_on_the_same_tokens(
    llama: Path, reference: Path, tmp_path: Path, tp: int, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "engine"
    flags = ["--tp", str(tp), "--dtype", dtype, "--tokens-from", str(reference)]
    assert main(["dump", str(llama), "-o", str(out), *flags, "-q"]) == 0
    run = open_run(out)
    assert (run.manifest["framework"], run.manifest["dtype"], run.ranks) == ("tapscope", dtype, tuple(range(tp)))
    assert run.tokens() == open_run(reference).tokens()
    capsys.readouterr()
    assert main(["diff", str(reference), str(out)]) == 0, capsys.readouterr().out
    assert "0 differs" in capsys.readouterr().out
    names = {metric.name for metric in run.metrics()}
    assert {"latency_s", "num_tokens", "batch_size", "kv_pages_used", "rss_bytes", "queue_bytes"} <= names


@pytest.mark.parametrize(
    ("tensor", "culprit"),
    [
        ("model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.down_proj"),
        ("model.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn.o_proj"),
        ("model.layers.2.self_attn.v_proj.weight", "model.layers.2.self_attn.v_proj"),
        ("model.layers.2.mlp.gate_proj.weight", "model.layers.2.mlp.gate_proj"),
        ("model.layers.1.post_attention_layernorm.weight", "model.layers.1.post_attention_layernorm"),
    ],
)
def test_diff_names_a_damaged_tensor_with_a_noise_run_and_with_a_reference(
    llama: Path, reference: Path, tmp_path: Path, tensor: str, culprit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = _damaged(llama, tmp_path / "damaged", tensor)
    for name, model in (("twin", llama), ("broken", broken)):
        flags = ["-o", str(tmp_path / name), "--dtype", "bfloat16", "--tokens-from", str(reference), "-q"]
        assert main(["dump", str(model), *flags]) == 0
    for baseline in (tmp_path / "twin", reference):
        capsys.readouterr()
        assert main(["diff", str(baseline), str(tmp_path / "broken"), "--json"]) == 1
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        divergence = lines[-1]["first_divergence"]
        assert divergence["module"] == culprit, divergence


def test_dump_engine_and_transformers_generate_the_same_tokens(llama: Path, reference: Path, tmp_path: Path) -> None:
    assert main(["dump", str(llama), "-o", str(tmp_path / "free"), *PROMPTS, "--max-new-tokens", "5", "-q"]) == 0
    assert open_run(tmp_path / "free").tokens() == open_run(reference).tokens()


def test_dump_set_changes_a_setting_of_the_engine(llama: Path, tmp_path: Path) -> None:
    line = ["dump", str(llama), "-o", str(tmp_path / "run"), "--input-ids", "5,6,7,8,9,10,11", "--keep", "stats"]
    assert main([*line, "--max-new-tokens", "2", "--set", "max_num_batched_tokens=3", "-q"]) == 0
    assert [line[0].info.num_rows for line in open_run(tmp_path / "run").steps.values()] == [3, 3, 1, 1]


def test_dump_keep_and_site_options_limit_what_is_recorded(llama: Path, tmp_path: Path) -> None:
    flags = ["--prompt", "x", "--max-new-tokens", "2", "-q", "--keep", "stats", "--layers", "1", "--skip", "mlp*"]
    assert main(["dump", str(llama), "-o", str(tmp_path / "run"), *flags]) == 0
    records = open_run(tmp_path / "run").records
    assert {r.key.site.split(":")[0].split(".mlp")[0] for r in records} >= {
        "model.layers.1",
        "model.layers.1.self_attn",
    }
    assert all(r.key.site.startswith("model.layers.1") and ".mlp" not in r.key.site for r in records)
    assert not any(r.entry for r in records)


@pytest.mark.parametrize("backend", ["engine", "hf"])
@pytest.mark.parametrize(
    ("spoil", "code", "says"),
    [
        (lambda d: (d / "config.json").unlink(), 3, "config.json"),
        (lambda d: (d / "model.safetensors").unlink(), 3, "safetensors"),
        (lambda d: os.truncate(d / "model.safetensors", 5000), 3, ""),
        (lambda d: _edit(d / "config.json", architectures=["FooForCausalLM"], model_type="foo"), 3, "oo"),
    ],
    ids=["no config", "no weights", "truncated", "unknown architecture"],
)
def test_dump_refuses_a_bad_model_directory_in_one_line(
    llama: Path, tmp_path: Path, backend: str, spoil: object, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in llama.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    assert callable(spoil)
    spoil(model)
    capsys.readouterr()
    assert main(["dump", str(model), "-o", str(tmp_path / "run"), "--prompt", "x", "--backend", backend]) == code
    error = capsys.readouterr().err
    assert error.startswith("tapscope: error: ")
    assert error.count("\n") == 1
    assert says in error
    assert not (tmp_path / "run").exists()


def test_dump_without_a_tokenizer_takes_token_ids(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, run = shutil.copytree(llama, tmp_path / "model"), tmp_path / "run"
    (model / "tokenizer.json").unlink()
    assert main(["dump", str(model), "-o", str(run), "--prompt", "x"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tapscope: error: {model} has no tokenizer.json")
    assert error.count("\n") == 1
    assert main(["dump", str(model), "-o", str(run), "--prompt", "x", "--backend", "hf"]) in (2, 3)
    error = capsys.readouterr().err
    assert "give token ids instead: --input-ids 1,2,3" in error
    assert error.count("\n") == 1
    line = ["dump", str(model), "-o", str(run), "--input-ids", "5,6,7", "--input-ids", "9", "--max-new-tokens", "1"]
    assert main(line) == 0
    with open_run(run) as opened:
        assert list(opened.prompts().values()) == [[5, 6, 7], [9]]


@pytest.mark.parametrize("backend", ["hf", "engine"])
def test_dump_says_once_why_nothing_was_recorded(
    llama: Path, tmp_path: Path, backend: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    line = ["dump", str(llama), "-o", str(tmp_path / "run"), "--input-ids", "5,6", "--max-new-tokens", "1"]
    assert main([*line, "--backend", backend, "--site", "model.layers.0:in*", "--skip", "model.layers.0*"]) == 1
    assert capsys.readouterr().err.count("no records") == 1
    assert "no records" not in caplog.text


def _edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_dump_refuses_wrong_arguments_in_one_line(
    llama: Path, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "run.json").write_text('{"format": "tapscope-run", "version": 99}')
    run = str(tmp_path / "run")
    cases = [
        (["dump", "/nowhere/model", "-o", run, "--prompt", "x"], 3, "/nowhere/model"),
        (["dump", str(llama), "-o", run], 2, "nothing to run"),
        (["dump", str(llama), "-o", str(reference), "--prompt", "x"], 2, "--force"),
        (["dump", str(llama), "-o", run, "--prompt", "x", "--site", "layers.99.*"], 2, "layers are 0-2"),
        (["dump", str(llama), "-o", run, "--prompt", "x", "--backend", "hf", "--tp", "2"], 2, "one rank"),
        (
            ["dump", str(llama), "-o", run, "--prompt", "x", "--backend", "hf", "--set", "num_pages=9"],
            2,
            "remove --set",
        ),
        (["dump", str(llama), "-o", run, "--prompt", "x", "--set", "num_pages"], 2, "expected NAME=VALUE"),
        (["dump", str(llama), "-o", run, "--prompt", "x", "--set", "num_pages=many"], 2, "num_pages"),
        (["dump", str(llama), "-o", run, "--prompt", "x", "--set", "kv_cache_dtype=fp8"], 2, "use the flag --kv-cache"),
        (["dump", str(llama), "-o", run, "--prompt", "x", "--set", "dp=2"], 2, "dp cannot be set here"),
        (["dump", str(llama), "-o", run, "--tokens-from", run], 3, "not a tapscope run"),
        (["dump", str(llama), "-o", run, "--prompts", "/nowhere.txt"], 2, "/nowhere.txt"),
        (["diff", str(reference), str(newer)], 3, "version 99; this tapscope reads up to 3"),
        (["diff", str(reference), run], 3, "not a tapscope run"),
        (["dump", str(llama), "-o", run, "--input-ids", "1,x"], 2, "invalid --input-ids '1,x'"),
        (["ctl", "127.0.0.1:1", "state"], 4, "no response from 127.0.0.1:1: Connection refused; is the server"),
        (["ctl", "127.0.0.1:65537", "state"], 2, "'127.0.0.1:65537' is neither the directory of a run nor [HOST:]PORT"),
        (["ctl", "runs/typo", "state"], 2, "'runs/typo' is neither the directory of a run nor [HOST:]PORT"),
        (["frobnicate"], 2, "commands: dump"),
        (["serve", str(llama), "--listen", "0.0.0.0:1"], 2, "need a token"),
        (["serve", str(llama), "--api-key", ""], 2, "api_key: must have at least one character"),
    ]
    for words, code, says in cases:
        capsys.readouterr()
        assert main(words) == code, words
        error = capsys.readouterr().err
        assert says in error, (words, error)
        assert "Traceback" not in error


def test_diff_exits_3_without_common_sites(reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from factories import RunFactory

    with RunFactory(tmp_path / "other") as other:
        other.step()
        other.put("vision.tower:out", torch.ones(3, 4).numpy())
    assert main(["diff", str(reference), str(tmp_path / "other")]) == 3
    assert "were they captured from models of one architecture?" in capsys.readouterr().err


def test_serve_is_controlled_over_http_and_drains_on_sigterm(llama: Path, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    words = "-m", "tapscope", "serve", llama, "-o", tmp_path / "live", "--listen", address, "--tp", 2, "-q"
    server = warm.start(*words, popen=warm.WarmTree)
    try:
        wait_for_ready(address, server, LIMIT_S)
        body = {"text": "def main():", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
        first = ask(f"http://{address}/generate", body)[1]
        assert (
            ask(
                f"http://{address}/dumper/configure",
                {"enabled": True, "keep": "full", "rules": ["lm_head=full", "*=off"]},
            )[0]
            == 200
        )
        assert ask(f"http://{address}/generate", body)[1]["output_ids"] == first["output_ids"]
        assert ask(f"http://{address}/dumper/configure", {"enabled": False})[0] == 200
        ask(f"http://{address}/generate", body)
        state = json.loads(_command("ctl", address, "state").stdout)
        assert [rank["status"] for rank in state["ranks"]] == ["connected", "connected"]
        refused = warm.run("-m", "tapscope", "ctl", address, "configure", "keep=some")
        assert (refused.returncode, "one of off, stats, sketch, full" in refused.stderr) == (2, True)
        taken = warm.run("-m", "tapscope", "serve", llama, "-o", tmp_path / "second", "--listen", address)
        assert (taken.returncode, f"cannot listen on {address}" in taken.stderr) == (2, True)
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(LIMIT_S) == 0
    run = open_run(tmp_path / "live")
    assert run.closed
    assert run.ledger().complete, run.ledger().sentences()
    steps = {(r.key.rank, r.key.step) for r in run.records}
    assert steps == {(rank, step) for rank in (0, 1) for step in (4, 5, 6, 7)}
    assert {r.key.site for r in run.records} >= {"lm_head:out"}


def test_serve_ends_requests_that_outlast_the_drain_timeout_with_their_own_503(llama: Path, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    words = ["serve", llama, "-o", tmp_path / "live", "--listen", address, "-q", "--drain-timeout", "0.1"]
    server = warm.start("-m", "tapscope", *words, popen=warm.WarmTree, stderr=subprocess.PIPE, text=True)
    body = {"prompt": "def main():", "n": 16, "max_tokens": 480, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        try:
            wait_for_ready(address, server, LIMIT_S)
            url = f"http://{address}/v1/completions"
            whole = pool.submit(httpx.post, url, json=body, timeout=LIMIT_S)
            streamed = pool.submit(httpx.post, url, json=body | {"stream": True}, timeout=LIMIT_S)
            running = re.compile(r"^tapscope_engine_num_running\S* 3[12]", re.MULTILINE)
            wait_until(lambda: running.search(httpx.get(f"http://{address}/metrics").text), "all generations run")
        finally:
            server.send_signal(signal.SIGTERM)
            error = server.communicate(timeout=LIMIT_S)[1]
    reason = "the server shuts down, and the request did not finish within 0.1 s (--drain-timeout)"
    assert (whole.result().status_code, whole.result().json()["error"]["message"]) == (503, reason)
    *_, last, end = streamed.result().text.split("\n\n")
    assert (json.loads(last.removeprefix("data: "))["error"]["message"], end) == (reason, "")
    assert (server.returncode, error.count(reason)) == (0, 1)


def test_dump_that_was_refused_does_not_block_the_next(llama: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    assert main(["dump", str(llama), "-o", out, "--prompt", "x", "--max-new-tokens", "5000"]) == 2
    assert not (tmp_path / "run").exists()
    assert main(["dump", str(llama), "-o", out, "--prompt", "x", "--max-new-tokens", "2", "-q"]) == 0


@pytest.mark.parametrize("backend", ["engine", "hf"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_dump_reports_what_it_recorded_when_interrupted(llama: Path, tmp_path: Path, backend: str, number: int) -> None:
    out = tmp_path / "run"
    flags = ["--backend", backend, "--prompt", "def main():", "--max-new-tokens", "400"]
    process = warm.start("-m", "tapscope", "dump", llama, "-o", out, *flags, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(_lines(out)) > 2000, "some steps are recorded")
    process.send_signal(number)
    error = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == 130
    assert "is incomplete" in error
    assert "incomplete" in error
    account = open_run(out).ledger()
    assert account.interrupted_ranks == [0]
    assert not account.complete


def _lines(run: Path) -> bytes:
    index = run / "rank-00000/records.jsonl"
    return index.read_bytes() if index.is_file() else b""


def test_diff_exit_code_is_unchanged_by_a_closed_pipe(reference: Path) -> None:
    command = f"{sys.executable} -m tapscope diff {reference} {reference} --all | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 141)
    assert done.stdout.startswith("baseline")
    assert "Traceback" not in done.stderr


def test_diff_refuses_unknown_steps_by_name(reference: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(reference), str(reference), "--steps", "77"]) == 2
    assert "no step 77 in" in capsys.readouterr().err


def test_diff_reports_a_different_setting_without_a_culprit(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    from tapscope.dumper import Dumper

    model = AutoModelForCausalLM.from_pretrained(llama)
    for name, cached in (("with", True), ("without", False)):
        with torch.no_grad(), Dumper(model, tmp_path / name, keep="full"):
            model(input_ids=torch.arange(9)[None], use_cache=cached)
    assert main(["diff", str(tmp_path / "with"), str(tmp_path / "without")]) == 0
    assert "plain value" in capsys.readouterr().out


def test_diff_compares_statistics_of_different_dtypes(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--backend", "hf", "--keep", "stats", "-q", *PROMPTS, "--max-new-tokens", "1"]
    for dtype in ("float32", "bfloat16"):
        assert main(["dump", str(llama), "-o", str(tmp_path / dtype), "--dtype", dtype, *flags]) == 0
    capsys.readouterr()
    main(["diff", str(tmp_path / "float32"), str(tmp_path / "bfloat16"), "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    by_site = {line["site"]: line for line in lines if line["type"] == "finding"}
    assert by_site["model.rotary_emb:out[0]"]["verdict"] in ("same", "close")
