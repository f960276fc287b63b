"""An invalid flag or setting of `tapscope serve` prints one line that names it, with exit code 2."""

import argparse
import re
import shlex
from pathlib import Path

import forkserver_pool as warm
import pytest
from checkpoints import make_llama
from soak_cases import mostly_soak

from tapscope.cli import main
from tapscope.cli.serve import ServeCommand, _engine_config

CASES = [
    ("--tp 0", "tp=0: must be an integer ≥ 1"),
    ("--tp 1.5", "argument --tp: invalid value '1.5': expected an integer"),
    ("--ep 2", "ep=2: must divide tp=1"),
    ("--dp 0", "dp=0: must be an integer ≥ 1"),
    ("--dp 1000000", "dp=1000000, tp=1: 1,000,000 processes on [0-9]+ CPU cores?; at most 32 per core"),
    ("--listen 0.0.0.0:0", "--listen 0.0.0.0:0: other hosts can reach 0.0.0.0, so the control routes need a token"),
    ("--set max_num_seqs=8 --set max_num_seqs=9", "max_num_seqs was set before, by --set 'max_num_seqs=8'"),
    ("--dp 2 --set launch=external", "dp=2: needs launch='spawn'"),
    ("--dtype float8", "argument --dtype: invalid choice: 'float8'"),
    ("--kv-cache-dtype int8", "argument --kv-cache-dtype: invalid choice: 'int8'"),
    ("--quantization-param-path ''", "quantization_param_path='': must be a non-empty string or null"),
    ("--max-model-len 1", "max_model_len=1: must be an integer ≥ 2"),
    ("--max-model-len 1k", "argument --max-model-len: invalid value '1k'"),
    ("--set max_num_seqs", "--set 'max_num_seqs': expected NAME=VALUE"),
    ("--set max_num_seqs=", "max_num_seqs='': must be an integer ≥ 1"),
    ("--set max_num_seqs=-1", "max_num_seqs=-1: must be an integer ≥ 1"),
    ("--set max_num_seqs=1.5", "max_num_seqs=1.5: must be an integer ≥ 1"),
    ("--set max_running=8 --set max_num_seqs=9", "'max_running' is the deprecated name of 'max_num_seqs'"),
    ("--set nothing=1", "unknown engine setting 'nothing'; valid settings: dtype"),
    ("--set tp=2", "--set 'tp=2': use the flag --tp"),
    ("--set dp_rank=1", "--set 'dp_rank=1': dp_rank cannot be set here"),
    ("--set page_size=0", "page_size=0: must be an integer ≥ 1"),
    ("--set num_pages=-5", "num_pages=-5: must be an integer ≥ 1"),
    ("--set swa_full_tokens_ratio=2", "swa_full_tokens_ratio=2: must be a number > 0 and ≤ 1"),
    ("--set state_checkpoint_interval=0", "state_checkpoint_interval=0: must be an integer ≥ 1"),
    ("--set max_num_batched_tokens=0", "max_num_batched_tokens=0: must be an integer ≥ 1"),
    ("--set prefix_cache=maybe", "prefix_cache='maybe': must be true or false"),
    ("--set watermark=1", "watermark=1: must be a number ≥ 0 and < 1"),
    ("--set priority_aging_steps=0", "priority_aging_steps=0: must be an integer ≥ 1"),
    ("--set waiting_timeout_s=-1", "waiting_timeout_s=-1: must be a finite number > 0"),
    ("--set running_timeout_s=inf", "running_timeout_s='inf': must be a finite number > 0"),
    ("--set rank_timeout_s=1e400", "rank_timeout_s=inf: must be a finite number > 0"),
    ("--set check_invariants=2", "check_invariants=2: must be true or false"),
    ("--set load_format=pt", "load_format='pt': must be one of auto, dummy"),
    ("--set quantization=int3", "quantization='int3': must be fp8"),
    ("--set exclude_modules=a", "exclude_modules=\\('a',\\): needs quantization"),
    ("--set quantized_layers=x", "quantized_layers='x': must be one of auto, weight_only, dequantize"),
    ("--set logits=some", "logits='some': must be one of last, all, observed"),
    ("--set seed=-1", "seed=-1: must be an integer ≥ 0"),
    ("--set batch_invariant=2", "batch_invariant=2: must be true or false"),
    ("--set launch=x", "launch='x': must be one of spawn, external"),
    ("--set rendezvous=x", "rendezvous='x': must be tcp://HOST:PORT"),
    ("--set cuda_graphs=maybe", "cuda_graphs='maybe': must be one of decode, all, off"),
    ("--set custom_all_reduce=maybe", "custom_all_reduce='maybe': must be true or false"),
    ("--set async_scheduling=3", "async_scheduling=3: must be true or false"),
    ("--set device=tpu", "device='tpu': must be one of auto, cpu, cuda"),
    ("--set profile_dir=", "profile_dir='': must be a non-empty string"),
    ("--lora-paths x", "lora_paths\\[0\\]='x': must be NAME=DIR"),
    ("--lora-paths a=x a=y", "lora_paths: 'a' is given twice"),
    ("--max-loras-per-batch 5", "max_loras_per_batch=5: needs enable_lora or lora_paths"),
    ("--max-loras-per-batch 0 --enable-lora", "max_loras_per_batch=0: must be an integer ≥ 1"),
    ("--max-lora-rank 8", "max_lora_rank=8: needs enable_lora or lora_paths"),
    ("--speculative-algorithm x", "speculative_algorithm='x': must be one of NGRAM"),
    ("--speculative-num-steps 3", "speculative_num_steps=3: needs speculative_algorithm"),
    ("--speculative-algorithm STANDALONE", "needs speculative_draft_model_path"),
    ("--speculative-ngram-min-match-window-size 5", "needs speculative_algorithm='NGRAM'"),
    ("--listen x", "--listen 'x': must be HOST:PORT or PORT"),
    ("--listen 127.0.0.1:99999", "--listen '127.0.0.1:99999': must be HOST:PORT or PORT"),
    ("--served-model-name ''", "model_name='': must be a non-empty string"),
    ("--api-key ''", "api_key: must have at least one character and no spaces"),
    ("--tool-format x", "tool_format='x': must be one of auto, "),
    ("--reasoning-format x", "reasoning_format='x': must be one of auto, "),
    ("--request-log ''", "request_log='': must be a non-empty string"),
    ("--request-log /none/x", "request_log='/none/x': cannot be written"),
    ("--otlp-traces-endpoint x", "otlp_traces_endpoint='x': expected the URL of a collector"),
    ("--max-body-bytes 0", "max_body_bytes=0: must be an integer ≥ 1"),
    ("--max-waiting 0", "max_waiting=0: must be an integer ≥ 1"),
    ("--max-generations -3", "max_generations=-3: must be an integer ≥ 1"),
    ("--max-answer-values 0", "max_answer_values=0: must be an integer ≥ 1"),
    ("--max-connections 0", "max_connections=0: must be an integer ≥ 1"),
    ("--request-timeout 0", "request_timeout_s=0.0: must be a finite number > 0"),
    ("--drain-timeout nan", "drain_timeout_s=nan: must be a finite number ≥ 0"),
    ("--site ''", "--site and --skip: an empty pattern selects nothing"),
    ("--site x --layers 2", "--site and --layers cannot be combined"),
    ("--layers 3-1", "range 3-1 in '3-1' ends before it begins"),
    ("--keep all", "argument --keep: invalid choice: 'all'"),
    ("--against-rtol 0.1", "against_rtol=0.1: no reference run"),
    ("--inject x", "inject: no run to take the values from"),
    ("--inject-wait -1", "inject_wait_s=-1.0: must be a finite number ≥ 0"),
    ("--port 3", "unknown option --port \\(did you mean --listen\\?\\)"),
    ("more", "unexpected argument 'more'"),
]

OF_A_MODEL = [
    ("--tp 1000", "tp=1000 is more than the model's 4 heads; use at most 4"),
    ("--max-model-len 257", "max_model_len=257: the model has 256 positions"),
    ("--speculative-algorithm NEXTN", "LlamaForCausalLM has no MTP layer"),
    ("--quantization-param-path x", "quantization_param_path='x': requires an FP8 KV cache"),
    ("--set page_size=100000000", "kv_cache_memory_bytes=1073741824: must hold at least one page"),
    ("--set num_pages=100000000000", "lower num_pages, kv_cache_memory_bytes, max_num_seqs or max_num_batched_tokens"),
    ("--set kv_cache_memory_bytes=10", "kv_cache_memory_bytes=10: must hold at least one page of "),
    ("--set swa_full_tokens_ratio=0.5", "swa_full_tokens_ratio=0.5: .* does not mix sliding-window and full attention"),
    ("--set num_state_slots=5", "num_state_slots=5: .* has no recurrent state; leave it out"),
    ("--layers 99", "no site matches 'layers.99'; layers are 0-2"),
]
"""Invalid settings that are detected once the model is known; tested in a separate process."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1)


def _words(model: Path, run: Path, flags: str) -> list[str]:
    return ["serve", str(model), "-o", str(run), "--listen", "127.0.0.1:0", *shlex.split(flags)]


def _check(error: str, message: str) -> None:
    (line,) = error.splitlines()
    assert line.startswith("tapscope: error: ")
    assert re.search(message, line), line


@pytest.mark.parametrize(("flags", "message"), CASES, ids=[flags for flags, _ in CASES])
def test_a_wrong_value_is_one_line(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    assert main(_words(model, tmp_path / "run", flags)) == 2
    _check(capfd.readouterr().err, message)


@pytest.mark.parametrize(("flags", "message"), mostly_soak(OF_A_MODEL, default=OF_A_MODEL[:3]))
def test_a_value_that_does_not_fit_the_model_is_one_line(model: Path, tmp_path: Path, flags: str, message: str) -> None:
    ended = warm.run("-m", "tapscope", *_words(model, tmp_path / "run", flags))
    assert ended.returncode == 2
    _check(ended.stderr, message)


def test_logits_and_profile_dir_of_set_are_used(model: Path, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    command = ServeCommand()
    command.prepare(parser)
    given = ["--set", "logits=all", "--set", f"profile_dir={tmp_path}"]
    for words, logits, folder in ((given, "all", str(tmp_path)), ([], "observed", str(tmp_path / "run" / "profile"))):
        config = _engine_config(parser.parse_args([str(model), *words]), tmp_path / "run")
        assert (config.logits, config.profile_dir) == (logits, folder)
