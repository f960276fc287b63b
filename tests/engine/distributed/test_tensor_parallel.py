"""Tensor parallelism: sizes that do not divide by the ranks, heads replicated over ranks, other launchers."""

import os
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forkserver_pool as warm
import pytest
import torch
from checkpoints import make_checkpoint, make_llama
from engine_helpers import check_parity, reference_tokens
from hypothesis import given
from hypothesis import strategies as st
from jobs import LIMIT_S, free_port
from moe_checkpoints import make_moe

from tapscope.cli import main
from tapscope.core.errors import ConfigError, RankLostError
from tapscope.engine import LLM
from tapscope.engine.distributed import tensor_parallel
from tapscope.engine.distributed.sharding import HeadShards
from tapscope.engine.distributed.tensor_parallel import TensorParallel, span

PROMPTS = [[5, 6, 7], list(range(40, 75)), [9, 8, 7, 6, 5, 4, 3, 2, 11, 12, 13]]
ODD = {"vocab_size": 523, "intermediate_size": 93, "num_attention_heads": 8, "num_key_value_heads": 2}


class NcclGroup:
    """Imitates an NCCL abort: device collectives return immediately; the call returns once no graph contains one."""

    def __init__(self, *, is_stuck: bool) -> None:
        self.is_stuck = is_stuck
        self.released, self.calls = threading.Event(), list[str]()

    def abort(self) -> None:
        self.calls.append("abort")
        self.is_stuck = False
        assert self.released.wait(20)
        self.calls.append("aborted")

    def release(self) -> None:
        assert not self.is_stuck, "a graph is destroyed while it runs"
        self.calls.append("release")
        self.released.set()


@pytest.fixture
def connected(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[TensorParallel, NcclGroup]:
    group = NcclGroup(is_stuck=request.param)
    stream = SimpleNamespace(query=lambda: not group.is_stuck)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(tensor_parallel, "_IDLE_S", 0.2)
    tp = TensorParallel(0, 2, object(), group)
    tp.capture_collectives()
    tp.release_first(group.release)
    return tp, group


def test_rehearsal_does_not_reach_the_other_ranks() -> None:
    """The collectives return the shapes of a real step."""
    calls: list[str] = []
    group = SimpleNamespace(allreduce=lambda *_: calls.append("reduce"), allgather=lambda *_: calls.append("gather"))
    tp, rows = TensorParallel(1, 2, group), torch.ones(3, 2)
    with tp.rehearsal():
        assert tp.all_reduce(rows).shape == (3, 2)
        assert tp.all_gather(rows, 5).shape == (3, 5)
    assert calls == []
    tp.all_reduce(rows)
    tp.all_gather(rows, 5)
    assert calls == ["reduce", "gather"]


@pytest.mark.parametrize("connected", [False], indirect=True)
def test_disconnect_destroys_graphs_before_it_aborts(connected: tuple[TensorParallel, NcclGroup]) -> None:
    tp, group = connected
    tp.disconnect()
    tp.disconnect()
    assert group.calls == ["release", "abort", "aborted"]


@pytest.mark.parametrize("connected", [True], indirect=True)
def test_disconnect_of_a_stuck_device_aborts_before_it_destroys_graphs(
    connected: tuple[TensorParallel, NcclGroup],
) -> None:
    tp, group = connected
    tp.disconnect()
    assert group.calls == ["abort", "release", "aborted"]


@pytest.mark.parametrize("connected", [True], indirect=True)
def test_lost_peer_destroys_graphs_although_this_rank_is_blocked(connected: tuple[TensorParallel, NcclGroup]) -> None:
    tp, group = connected
    read, write = os.pipe()
    tp.watch([read])
    os.close(write)  # the peer has exited while this thread waits, as in an NCCL collective that blocks
    assert group.released.wait(20)
    tp.disconnect()
    assert group.calls == ["abort", "release", "aborted"]
    with pytest.raises(RankLostError, match="rank 0 lost a peer"):
        tp.check()
    os.close(read)


def test_custom_all_reduce_without_gpus_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_llama(tmp_path / "model", seed=1)
    with caplog.at_level("WARNING"), LLM(path, tp=2, device="cpu", custom_all_reduce=True) as llm:
        assert list(llm.generate([[5, 6, 7]], max_new_tokens=4)[0].token_ids) == reference_tokens(path, [5, 6, 7], 4)
    assert "custom_all_reduce has no effect: the ranks have no GPUs" in caplog.text


@given(st.integers(0, 200), st.integers(1, 17))
def test_span_partitions_evenly(total: int, size: int) -> None:
    spans = [span(total, rank, size) for rank in range(size)]
    assert spans[0][0] == 0
    assert spans[-1][1] == total
    assert all(left[1] == right[0] for left, right in pairwise(spans))
    lengths = [end - start for start, end in spans]
    assert max(lengths) - min(lengths) <= 1
    assert lengths[0] == max(lengths)  # rank 0 has the fewest pages, which bounds the scheduler


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_head_shards_keep_query_heads_with_their_key_heads(kv_heads: int, group: int, data: Any) -> None:
    size = data.draw(st.integers(1, kv_heads * group))
    queries: list[int] = []
    for rank in range(size):
        share = HeadShards.of(kv_heads * group, kv_heads, TensorParallel(rank, size))
        held = list(range(share.keys.start, share.keys.end))[slice(*share.used)]
        mine = list(range(share.queries.start, share.queries.end))
        assert len(mine) % len(held) == 0
        assert [head // group for head in mine] == [head for head in held for _ in range(len(mine) // len(held))]
        queries += mine
    assert queries == list(range(kv_heads * group))


@pytest.mark.parametrize(("tp", "more"), [(3, {"attention_bias": True, "mlp_bias": True}), (4, {}), (5, {})])
def test_tensor_parallel_logits_equal_transformers(tmp_path: Path, tp: int, more: dict[str, Any]) -> None:
    check_parity(make_llama(tmp_path / "model", seed=tp, **ODD | more), tp, PROMPTS, 8, gloo=True)


@pytest.mark.parametrize(("family", "tp"), [("qwen3", 3), ("gemma2", 3), ("olmo2", 3), ("olmo3", 4)])
def test_tensor_parallel_qk_norm_and_windows_at_three_and_four_ranks(tmp_path: Path, family: str, tp: int) -> None:
    check_parity(make_checkpoint(tmp_path / "model", family), tp, PROMPTS, 6)


def test_tensor_parallel_mla_and_experts_at_three_ranks(tmp_path: Path) -> None:
    check_parity(make_moe(tmp_path / "model", "deepseek_v3"), 3, PROMPTS, 6)


def test_tensor_parallel_dump_with_replicated_heads_equals_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_llama(tmp_path / "model", num_hidden_layers=1, **ODD)
    base, target = str(tmp_path / "base"), str(tmp_path / "target")
    assert main(["dump", str(model), "-o", base, "--backend", "hf", "--prompt", "def", "--max-new-tokens", "2"]) == 0
    assert main(["dump", str(model), "-o", target, "--tp", "4", "--tokens-from", base]) == 0
    capsys.readouterr()
    assert main(["diff", base, target]) == 0
    output = capsys.readouterr().out
    assert " 0 differs" in output
    assert "not compared" not in output


def test_tensor_parallel_loses_all_ranks_when_one_dies_in_a_collective(tmp_path: Path) -> None:
    with LLM(make_llama(tmp_path / "model", num_hidden_layers=1, **ODD), tp=3) as llm:
        pid = llm.engine.rank_pids[2]
        llm.model.model.layers[0].mlp.register_forward_hook(lambda *_: os.kill(pid, signal.SIGKILL))
        with pytest.raises(RankLostError, match="rank 2 of 3 was killed by signal 9"):
            llm.generate(PROMPTS, max_new_tokens=24)


PROGRAM = """
import os, signal, sys
from tapscope.engine import LLM
from tapscope.core.errors import RankLostError
llm = LLM(sys.argv[1], tp=2, launch="external", device="cpu", rendezvous=sys.argv[2] if sys.argv[2:] else None)
print(list(llm.generate([[5, 6, 7]], max_new_tokens=6, ignore_eos=True)[0].token_ids), flush=True)
if sys.argv[2:]:
    if pid := sys.stdin.readline().strip():
        llm.model.model.layers[0].mlp.register_forward_hook(lambda *_: os.kill(int(pid), signal.SIGKILL))
    try:
        llm.generate([[5, 6, 7]], max_new_tokens=6)
    except RankLostError as error:
        print(error, flush=True)
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint and a program that every rank runs."""
    folder = tmp_path_factory.mktemp("launched")
    (folder / "program.py").write_text(PROGRAM)
    return make_llama(folder / "model", num_hidden_layers=1), folder / "program.py"


@pytest.mark.soak
def test_torchrun_ranks_connect_over_two_nodes(
    launched: tuple[Path, Path],
) -> None:
    model, program = launched
    store, place = f"127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-id", "here", "--rdzv-endpoint", store]
    nodes = [
        subprocess.Popen(
            [*torchrun, program, model, place],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        outputs = [node.communicate(timeout=120) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.communicate()
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert sorted(out.strip() for out, _ in outputs) == ["", str(reference_tokens(model, [5, 6, 7], 6))]


@pytest.mark.parametrize(
    ("ranks_here", "is_in_collective", "expected"),
    [
        (2, False, "rank 1 of 2 has ended; see the output of its launcher"),
        (2, True, "rank 1 of 2 has ended; see the output of its launcher"),
        (1, True, "one of the ranks 1 to 1 has ended; see the output of its launcher"),
    ],
)
def test_torchrun_ranks_report_a_killed_rank(
    launched: tuple[Path, Path], ranks_here: int, is_in_collective: bool, expected: str
) -> None:
    model, program = launched
    place = f"tcp://127.0.0.1:{free_port()}"
    ranks = [
        warm.start(
            *(program, model, place),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": str(ranks_here)},
        )
        for rank in (0, 1)
    ]
    try:
        assert ranks[0].stdout.readline().strip() == str(reference_tokens(model, [5, 6, 7], 6))
        if not is_in_collective:
            ranks[1].kill()
            ranks[1].communicate(timeout=LIMIT_S)
        output = ranks[0].communicate(f"{ranks[1].pid if is_in_collective else ''}\n", timeout=LIMIT_S)[0]
        assert expected in output
        assert ranks[0].returncode == 0
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


STUCK = """
import os, signal, sys
from tapscope.engine import LLM
from tapscope.core.errors import RankLostError

class Stuck:
    epoch, armed = 0, False
    def __init__(self, model, info): self.rank = info.rank
    def before_step(self, info):
        while self.rank == 1 and info.step == 2: signal.pause()
    def after_step(self, metrics): pass
    def close(self): pass

llm = LLM(sys.argv[1], tp=2, launch="external", device="cpu", rank_timeout_s=3, observer=Stuck)
try:
    llm.generate([[5, 6, 7]], max_new_tokens=6, ignore_eos=True)
except RankLostError as error:
    print(error, flush=True)
"""


def test_torchrun_ranks_kill_and_locate_a_hung_rank(launched: tuple[Path, Path], tmp_path: Path) -> None:
    program = tmp_path / "stuck.py"
    program.write_text(STUCK)
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    places = [meeting | {"RANK": str(rank)} for rank in (0, 1)]
    ranks = [
        warm.start(program, launched[0], stdout=subprocess.PIPE, text=True, env=os.environ | place) for place in places
    ]
    try:
        output = ranks[0].communicate(timeout=LIMIT_S)[0]
        assert "rank 1 of 2 hangs: no progress for" in output
        assert f'File "{program}", line 10 in before_step' in output
        assert ranks[0].returncode == 0
        assert ranks[1].wait(LIMIT_S) == -signal.SIGKILL
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_rank_env_rejects_invalid_launches(launched: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = launched
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="RANK is not set; start the program with torchrun"):
        LLM(model, tp=2, launch="external")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="tp=2 does not match RANK=0, WORLD_SIZE=3"):
        LLM(model, tp=2, launch="external")
    with pytest.raises(ConfigError, match="rendezvous='host:1': must be tcp://HOST:PORT"):
        LLM(model, tp=2, launch="external", rendezvous="host:1")
    with pytest.raises(ConfigError, match="rendezvous='tcp://host:1': needs launch='external'"):
        LLM(model, tp=2, rendezvous="tcp://host:1")
