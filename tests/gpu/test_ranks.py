"""Two ranks on two GPUs: NCCL sums are right, the ranks exit together, and a lost rank ends the job before NCCL would.

Skipped with fewer than two GPUs. `rank_timeout_s` exceeds the time limit of the tests, so no test can pass by waiting
for that timeout.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, make_llama
from engine_helpers import reference_tokens
from engine_observers import JournalIn
from graph_imitation import KilledInRank1
from graph_observers import Recording, check_equal
from moe_checkpoints import make_moe

from tapscope.core.errors import RankLostError
from tapscope.dumper import make_observer
from tapscope.dumper.config import DumperConfig
from tapscope.engine import LLM, SamplingParams
from tapscope.engine.execution.decode_graphs import DecodeGraphs
from tapscope.engine.execution.prefill_graphs import PrefillGraphs
from tapscope.sources import open_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(120),
]
PROMPTS = [[5, 6, 7], list(range(40, 75)), [300]]
PATIENT: dict[str, Any] = {"tp": 2, "device": "cuda", "rank_timeout_s": 600.0}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1, vocab_size=523, attention_bias=True)


@pytest.mark.parametrize(
    ("family", "settings"), [("qwen3", {}), ("gemma2", {}), ("qwen3_moe", {"ep": 2}), ("deepseek_v3", {})]
)
def test_two_gpus_match_transformers(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    make = make_moe if "_" in family else make_checkpoint
    path = make(tmp_path / "model", family, seed=1)
    with LLM(path, **PATIENT, **settings) as llm:
        generations = llm.generate(PROMPTS, max_new_tokens=24, ignore_eos=True)
    for generation, prompt in zip(generations, PROMPTS, strict=True):
        assert list(generation.token_ids) == reference_tokens(path, prompt, 24)


MANY = [[7 * i + j for j in range(1 + 5 * i)] for i in range(9)]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("hooked", [False, True])
def test_decode_graphs_of_two_ranks_keep_the_tokens(tmp_path: Path, family: str, hooked: bool) -> None:
    """With a hook on rank 0 only, rank 0 calls every module while rank 1 replays graphs."""
    make = make_moe if "_" in family else make_checkpoint
    path = make(tmp_path / "model", family, seed=1, dtype="bfloat16")
    params = [SamplingParams(max_new_tokens=20 + 9 * i, ignore_eos=True, temperature=i % 2, seed=i) for i in range(9)]
    more: dict[str, Any] = PATIENT | {"page_size": 4, "num_pages": 160, "max_num_seqs": 6, "check_invariants": True}
    tokens = []
    for graphs in ("off", "decode"):
        with LLM(path, cuda_graphs=graphs, **more) as llm:
            assert llm.engine.runner.has_graphs == (graphs == "decode")
            if hooked:
                llm.model.model.layers[0].register_forward_hook(lambda *_: None)
            tokens.append([g.token_ids for g in llm.generate(MANY, params)])
            tokens.append([g.token_ids for g in llm.generate(MANY, max_new_tokens=40, ignore_eos=True)])
    assert tokens[:2] == tokens[2:]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("hooked", [False, True])
def test_prefill_graphs_of_two_ranks_keep_the_tokens(
    tmp_path: Path, family: str, hooked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, since eager steps have other shapes. With a hook, rank 0 computes as many rows as rank 1."""
    make = make_moe if "_" in family else make_checkpoint
    path = make(tmp_path / "model", family, seed=1)
    run, replays, rows = PrefillGraphs.run, [0], set()

    def counted(self: PrefillGraphs, plan: Any, extra: Any = None) -> Any:
        hidden = run(self, plan, extra)
        replays[0] += hidden is not None
        return hidden

    monkeypatch.setattr(PrefillGraphs, "run", counted)
    more: dict[str, Any] = PATIENT | {"page_size": 4, "num_pages": 160, "max_num_seqs": 6, "max_num_batched_tokens": 50}
    tokens = []
    for graphs in ("off", "all"):
        with LLM(path, cuda_graphs=graphs, check_invariants=True, **more) as llm:
            if hooked:
                llm.model.model.register_forward_pre_hook(lambda _module, args: rows.add(len(args[0])))
            tokens.append([g.token_ids for g in llm.generate(MANY, max_new_tokens=40, ignore_eos=True)])
    assert tokens[0] == tokens[1]
    assert bool(replays[0]) != hooked
    assert bool(rows) == hooked


@pytest.mark.parametrize(
    ("rule", "ranks"), [("", set()), ("layers.0.mlp:out=full", {0, 1}), ("layers.0.mlp:out=full rank=1", {1})]
)
def test_graphs_of_two_ranks_run_where_no_tap_is_in_place(
    tmp_path: Path, rule: str, ranks: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank may replay graphs while the other passes its values to taps; both compute the same number of rows."""
    path = make_checkpoint(tmp_path / "model", "qwen3", seed=1, dtype="bfloat16")
    run, replays = DecodeGraphs.run, []

    def counted(self: DecodeGraphs, *args: Any) -> Any:
        hidden = run(self, *args)
        replays[-1] += hidden is not None
        return hidden

    monkeypatch.setattr(DecodeGraphs, "run", counted)
    config = DumperConfig(keep="off", rules=[rule] if rule else [])
    tokens = []
    for observer in (None, partial(make_observer, out=str(tmp_path / "run"), config=config)):
        replays.append(0)
        with LLM(path, max_num_seqs=6, observer=observer, **PATIENT) as llm:
            tokens.append([g.token_ids for g in llm.generate(MANY, max_new_tokens=20, ignore_eos=True)])
    assert tokens[0] == tokens[1]
    assert replays[0] > 20
    assert replays[1] == (0 if 0 in ranks else replays[0])  # replays of rank 0
    assert {record.key.rank for record in open_run(tmp_path / "run").records} == ranks


@pytest.mark.parametrize(
    ("family", "settings", "keep", "rules", "ranks"),
    [
        ("qwen3", {}, "full", [], {0, 1}),
        ("qwen3", {}, "stats", [], {0, 1}),
        ("qwen3", {}, "sketch", [], {0, 1}),
        ("qwen3", {}, "off", ["layers.0.mlp:out=full rank=1", "layers.*.mlp.down_proj:out=stats rank=0"], {0, 1}),
        ("qwen3", {}, "off", ["layers.*:out=full rank=1"], {1}),
        ("qwen3_moe", {}, "full", [], {0, 1}),
        ("qwen3_moe", {"ep": 2}, "full", [], {0, 1}),
        ("deepseek_v3", {"ep": 2}, "stats", [], {0, 1}),
    ],
)
def test_two_ranks_record_in_graphs_what_eager_steps_record(
    tmp_path: Path, family: str, settings: dict[str, Any], keep: Any, rules: list[str], ranks: set[int]
) -> None:
    """Includes the case that only one rank has a graph with taps, while the other calls every module."""
    make = make_checkpoint if family == "qwen3" else make_moe
    path = make(tmp_path / "model", family, seed=1, dtype="bfloat16")
    config = DumperConfig(keep=keep, rules=rules)
    tokens, runs = [], []
    for name, eager in (("eager", (0, 1)), ("graph", ()), ("mixed", (0,))):
        recording = Recording(tmp_path / name, config, eager)
        with LLM(path, max_num_seqs=6, observer=recording, **PATIENT, **settings) as llm:
            assert llm.engine.runner.has_graphs
            tokens.append([g.token_ids for g in llm.generate(MANY, max_new_tokens=20, ignore_eos=True)])
        assert {rank for rank, count in enumerate(recording.replays(2)) if count > 15} == ranks.difference(eager)
        runs.append(open_run(recording.out))
        assert runs[-1].ledger().complete, runs[-1].ledger().sentences()
    assert tokens[0] == tokens[1] == tokens[2]
    assert {record.key.rank for record in runs[1].records} == ranks
    assert min(check_equal(run, runs[0]) for run in runs[1:]) > 15


def test_rank_killed_while_graphs_with_taps_run_is_reported(path: Path, tmp_path: Path) -> None:
    recording = Recording(tmp_path / "run", DumperConfig(keep="off", rules=["layers.0.mlp:out=stats"]))
    with LLM(path, observer=recording, **PATIENT) as llm:
        llm.generate([[5]], max_new_tokens=4, ignore_eos=True)
        pid = llm.engine.rank_pids[1]
        killer = threading.Timer(1.0, os.kill, (pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(RankLostError, match="rank 1 of 2 was killed by signal 9"):
            while True:
                llm.generate(PROMPTS, max_new_tokens=200, ignore_eos=True)


@pytest.mark.parametrize("graphs", ["decode", "all", "off"])
def test_custom_all_reduce_gives_the_tokens_of_nccl(tmp_path: Path, graphs: str) -> None:
    """Two terms have one sum, rounded once, so NCCL and the kernel agree.

    Prompts use either of them, depending on size.
    """
    path = make_checkpoint(tmp_path / "model", "qwen3", seed=1, dtype="bfloat16")
    tokens = []
    for is_custom in (False, True, None):
        with LLM(path, cuda_graphs=graphs, custom_all_reduce=is_custom, max_num_seqs=9, **PATIENT) as llm:
            assert llm.engine.runner.model.tp.has_custom_all_reduce == (is_custom is not False)
            tokens.append([g.token_ids for g in llm.generate(MANY, max_new_tokens=200, ignore_eos=True)])
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.parametrize("is_custom", [False, True])
def test_rank_killed_in_a_captured_collective_is_reported(path: Path, is_custom: bool) -> None:
    with LLM(path, custom_all_reduce=is_custom, **PATIENT) as llm:
        llm.generate([[5]], max_new_tokens=2)
        assert llm.engine.runner.has_graphs
        pid = llm.engine.rank_pids[1]
        killer = threading.Timer(1.0, os.kill, (pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(RankLostError, match="rank 1 of 2 was killed by signal 9"):
            while True:
                llm.generate(PROMPTS, max_new_tokens=200, ignore_eos=True)


@pytest.mark.parametrize("is_custom", [False, True])
@pytest.mark.parametrize("graphs", ["decode", "all"])
def test_rank_killed_while_graphs_are_measured_is_reported(path: Path, graphs: str, is_custom: bool) -> None:
    """The other rank holds a graph with collectives and waits for the device in the next graph."""
    with pytest.raises(RankLostError, match="rank 1 of 2 was killed by signal 9"):
        LLM(path, cuda_graphs=graphs, custom_all_reduce=is_custom, observer=KilledInRank1(imitates=False), **PATIENT)


def test_killed_idle_rank_is_reported(path: Path) -> None:
    with LLM(path, **PATIENT) as llm:
        llm.generate([[5]], max_new_tokens=2)
        os.kill(llm.engine.rank_pids[1], signal.SIGKILL)
        with pytest.raises(RankLostError, match="rank 1 of 2 was killed by signal 9"):
            llm.generate(PROMPTS, max_new_tokens=24)


@pytest.mark.parametrize("graphs", ["off", "decode"])
def test_killed_rank_within_a_step_is_reported(path: Path, graphs: str) -> None:
    with LLM(path, cuda_graphs=graphs, **PATIENT) as llm:
        llm.generate([[5]], max_new_tokens=2)
        pid = llm.engine.rank_pids[1]
        llm.model.model.layers[1].register_forward_hook(lambda *_: os.kill(pid, signal.SIGKILL))
        with pytest.raises(RankLostError, match="rank 1 of 2 was killed by signal 9"):
            llm.generate(PROMPTS, max_new_tokens=24)
        with pytest.raises(RankLostError, match="the engine stopped: rank 1 of 2 was killed"):
            llm.step()


LAUNCHED = """
import os, signal, sys
from tapscope.engine import LLM
from tapscope.core.errors import RankLostError
llm = LLM(sys.argv[1], tp=2, launch="external", device="cuda", rendezvous=sys.argv[2], rank_timeout_s=600.0)
pid = int(sys.stdin.readline())
llm.model.model.layers[1].register_forward_hook(lambda *_: os.kill(pid, signal.SIGKILL))
try:
    llm.generate([[5, 6, 7]], max_new_tokens=6)
except RankLostError as error:
    print(error, flush=True)
"""


def test_killed_launched_rank_within_a_step_is_reported(path: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(LAUNCHED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    ranks = [
        subprocess.Popen(
            [sys.executable, program, path, place],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)},
        )
        for rank in (0, 1)
    ]
    try:
        output = ranks[0].communicate(f"{ranks[1].pid}\n", timeout=100)[0]
        assert "rank 1 of 2 has ended; see the output of its launcher" in output
        assert ranks[0].returncode == 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_raising_rank_is_lost_with_its_traceback(path: Path, tmp_path: Path) -> None:
    with LLM(path, observer=JournalIn(tmp_path, explode=(1, 3)), **PATIENT) as llm:
        with pytest.raises(RankLostError, match=r"(?s)rank 1 of 2 failed:.*in after_step.*gave up"):
            llm.generate(PROMPTS, max_new_tokens=24)
        assert (tmp_path / "closed-1").exists()  # recorded data was flushed first


SCRIPT = """
import os, signal, sys
from tapscope.engine import LLM
if __name__ == "__main__":
    llm = LLM(sys.argv[1], tp=2, device="cuda", rank_timeout_s=600.0)
    llm.generate([[5, 6]], max_new_tokens=2)
    print(llm.engine.rank_pids[1], flush=True)
    {ending}
"""
ENDINGS = {
    "it closes": ("llm.close()", 0),
    "it just ends": ("pass", 0),
    "it exits": ("sys.exit(3)", 3),
    "it raises": ("1 / 0", 1),
    "it is killed within a step": (
        "llm.model.model.layers[1].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL)); "
        "llm.generate([[5, 6]], max_new_tokens=2)",
        -9,
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_other_ranks_end_with_rank_0(path: Path, tmp_path: Path, ending: str) -> None:
    script, (line, code) = tmp_path / "program.py", ENDINGS[ending]
    script.write_text(SCRIPT.replace("{ending}", line))
    # The pipe stays open until the last process that holds it has exited.
    with subprocess.Popen([sys.executable, str(script), str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert int(process.stdout.readline()) != process.pid
        assert process.stdout.read() == ""
        assert process.wait(60) == code
