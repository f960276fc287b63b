"""A start with an empty Triton cache compiles in threads; later requests, also with taps, find the kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
PROGRAM = """
import logging, sys, threading
from pathlib import Path
from triton import knobs
from tapscope.engine import LLM, SamplingParams
from tapscope.dumper import make_observer
from tapscope.dumper.config import DumperConfig

compiled = []
logging.basicConfig(level=logging.INFO)
knobs.compilation.listener = lambda *, src, cache_hit, **_: cache_hit or compiled.append(
    (src.name, threading.current_thread() is threading.main_thread())
)
observers = []

def observe(*args):
    observers.append(make_observer(*args, out=sys.argv[2], config=DumperConfig(keep="off")))
    return observers[0]

def generate(prompts):
    compiled.clear()
    print([each.token_ids for each in llm.generate(prompts, sampled)])
    print("later:", *[name for name, _ in compiled])

with LLM(sys.argv[1], device="cuda", observer=observe) as llm:
    print(sum(not is_main for _, is_main in compiled), "in threads")
    print("in turn:", *[name for name, is_main in compiled if is_main])
    sampled = SamplingParams(max_new_tokens=4, temperature=1.0, top_p=0.9, seed=1)
    generate([[5, 6, 7], list(range(40))] * 9)
    observers[0].configure(keep="stats")
    generate([[8, 6, 7], list(range(1, 41))] * 9)
"""


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma2", "deepseek_v3"])
def test_cold_start_compiles_in_threads(tmp_path: Path, family: str) -> None:
    from moe_checkpoints import make_moe

    make = make_moe if family in ("qwen3_moe", "deepseek_v3") else make_checkpoint
    path = make(tmp_path / "model", family, seed=1, dtype="bfloat16")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    outputs = []
    for start in ("cold", "warm"):
        command = [sys.executable, "-c", PROGRAM, str(path), str(tmp_path / f"run-{start}")]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "first launch" not in done.stderr
        outputs.append(done.stdout.splitlines())
    (in_threads, in_turn, tokens, _, tapped, tapped_later), warm = outputs
    print(family, *outputs[0], sep="\n")
    assert int(in_threads.split()[0]) > 10
    assert len(in_turn.split()) - 2 < int(in_threads.split()[0]) / 3
    assert tapped_later == "later:"
    assert warm == ["0 in threads", "in turn:", tokens, "later:", tapped, "later:"]
