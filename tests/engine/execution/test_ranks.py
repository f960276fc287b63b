"""Multi-process ranks: they agree, exit together, and report a lost rank within seconds."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import forkserver_pool as warm
import pytest
import torch
import zmq
from checkpoints import make_llama
from engine_helpers import reference_tokens
from engine_observers import HangingOn, JournalIn, Memory, unmakeable_on_rank_1
from graph_imitation import KilledInRank1, imitate_prefill_graphs

from tapscope.core.errors import RankLostError, UsageError
from tapscope.engine import LLM
from tapscope.engine.distributed.heartbeat import Activity, Heartbeat
from tapscope.engine.execution.rank_worker import _ends_before_a_message

PROMPTS = [[5, 6, 7], list(range(40, 75)), [300]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1, vocab_size=523, attention_bias=True)


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def _is_gone(pid: int) -> bool:
    """Return whether no process ``pid`` runs; an unreaped zombie counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("is_done", [False, True])
def test_worker_waits_for_the_end_of_a_step_or_for_a_message(is_done: bool) -> None:
    step: Any = SimpleNamespace(is_done=is_done)
    heartbeat, poller = Heartbeat(), zmq.Poller()
    with zmq.Context() as context, context.socket(zmq.PAIR) as rank_0, context.socket(zmq.PAIR) as worker:
        rank_0.bind("inproc://ranks")
        worker.connect("inproc://ranks")
        poller.register(worker, zmq.POLLIN)
        if not is_done:
            rank_0.send(b"plan")
        assert _ends_before_a_message(step, poller, heartbeat) is is_done
    assert heartbeat.read().activity is Activity.WAITING


def test_two_ranks_generate_the_tokens_of_one(path: Path, tmp_path: Path) -> None:
    loaded = LLM(path, tp=2, observer=JournalIn(tmp_path))
    assert torch.get_num_threads() == 1
    for generation, prompt in zip(loaded.generate(PROMPTS, max_new_tokens=24, ignore_eos=True), PROMPTS, strict=True):
        assert list(generation.token_ids) == reference_tokens(path, prompt, 24)
    loaded.observer.epoch = 8
    assert loaded.generate([[5, 6]], max_new_tokens=1)
    pids = list(loaded.engine.rank_pids.values())
    loaded.close()
    journals = [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)]
    assert journals[0] == journals[1]
    assert journals[0].count("\n") == 25
    assert journals[0].splitlines()[-1].startswith("24 8 prefill")
    assert (tmp_path / "closed-0").exists()
    assert (tmp_path / "closed-1").exists()
    assert all(_is_gone(pid) for pid in pids)


def test_rank_group_reports_a_killed_rank_immediately(path: Path) -> None:
    patience = 600.0  # longer than a test may take
    with LLM(path, tp=2, rank_timeout_s=patience) as first, LLM(path, tp=2, rank_timeout_s=patience) as second:
        for llm in (first, second, first):
            (generation,) = llm.generate([[5, 6, 7]], max_new_tokens=5, ignore_eos=True)
            assert list(generation.token_ids) == reference_tokens(path, [5, 6, 7], 5)
        idle = first.engine.rank_pids[1]
        os.kill(idle, signal.SIGKILL)
        assert _wait(lambda: _is_gone(idle), 5)
        with pytest.raises(RankLostError, match="rank 1 of 2 was killed by signal 9"):
            first.generate([[5]])
        # The other engine is unaffected; its rank is killed within a step, while rank 0 waits in a collective.
        busy = second.engine.rank_pids[1]
        second.model.model.layers[1].register_forward_hook(lambda *_: os.kill(busy, signal.SIGKILL))
        with pytest.raises(RankLostError, match="rank 1 of 2 was killed by signal 9"):
            second.generate(PROMPTS, max_new_tokens=24)
        with pytest.raises(RankLostError, match="the engine stopped: rank 1 of 2 was killed"):
            second.step()


def test_rank_group_reports_a_rank_killed_while_graphs_are_captured(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits in a collective of its next graph; the error names the cause instead of that collective."""
    pytest.importorskip("triton")
    imitate_prefill_graphs(monkeypatch)
    with pytest.raises(RankLostError, match="rank 1 of 2 was killed by signal 9"):
        LLM(path, tp=2, observer=KilledInRank1(imitates=True))


def test_rank_group_reports_the_traceback_of_a_failed_rank(path: Path, tmp_path: Path) -> None:
    with LLM(path, tp=2, observer=JournalIn(tmp_path, explode=(1, 3))) as llm:
        with pytest.raises(RankLostError, match=r"(?s)rank 1 of 2 failed:.*in after_step.*gave up"):
            llm.generate(PROMPTS, max_new_tokens=24)
        assert (tmp_path / "closed-1").exists()  # recorded data was flushed first


def test_rank_workers_close_when_rank_0_leaves_a_step(path: Path, tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with LLM(path, tp=2, observer=JournalIn(tmp_path)) as llm:
        llm.generate([[5]], max_new_tokens=2)
        llm.model.model.layers[1].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5]])
        with pytest.raises(RankLostError, match="rank 0 failed in step 2: KeyboardInterrupt"):
            llm.generate([[5]])
    assert (tmp_path / "closed-1").exists()


@pytest.mark.parametrize("is_stopped", [True, False])
def test_rank_group_locates_a_hung_rank(path: Path, is_stopped: bool) -> None:
    with LLM(path, tp=3, rank_timeout_s=2.0, observer=None if is_stopped else HangingOn(2)) as llm:
        pid = llm.engine.rank_pids[2]
        if is_stopped:
            assert llm.generate([[5]], max_new_tokens=1)
            os.kill(pid, signal.SIGSTOP)
            words = r", stopped by a signal, .*step 0.*; its main thread:\n(?s:.*) in rank_main\n"
        else:
            words = r", in step 0; its main thread:\n(?s:.*) in before_step\n"
        words = r"^rank 2 of 3 hangs: no progress for \S+ s \(rank_timeout_s=2\)" + words
        with pytest.raises(RankLostError, match=words):
            llm.generate([[5]])
        with pytest.raises(RankLostError, match="the engine stopped: rank 2 of 3 hangs"):
            llm.generate([[5]])
    assert _is_gone(pid)


SCRIPT = """
import sys, time
from tapscope.engine import LLM
if __name__ == "__main__":
    llm = LLM(sys.argv[1], tp=2)
    llm.generate([[5, 6]], max_new_tokens=2)
    print(llm.engine.rank_pids[1], flush=True)
    {ending}
"""


@pytest.mark.parametrize("ending", ["time.sleep(60)", "sys.exit(0)"])
def test_rank_workers_do_not_outlive_their_engine(path: Path, tmp_path: Path, ending: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(SCRIPT.replace("{ending}", ending))
    with TemporaryDirectory() as temporary:
        environment = os.environ | {"TMPDIR": temporary}
        streams = {"stdout": subprocess.PIPE, "text": True, "env": environment}
        with warm.start(script, path, popen=warm.WarmTree, **streams) as process:
            pid = int(process.stdout.readline())
            if "sleep" in ending:
                assert not _is_gone(pid)
                process.kill()
            assert process.wait(15) == (-9 if "sleep" in ending else 0)
            assert _wait(lambda: _is_gone(pid), 10)
        assert not list(Path(temporary).iterdir()), "sockets were left behind"


def test_spawned_ranks_reject_an_unpicklable_observer_factory(path: Path) -> None:
    with pytest.raises(UsageError, match="the observer factory must be picklable when tp or dp > 1"):
        LLM(path, tp=2, observer=lambda model, info: Memory(model, info))


def test_spawned_ranks_reject_a_too_long_temporary_directory(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(UsageError, match="set TMPDIR to a shorter path"):
        LLM(path, tp=2)
    assert not list(deep.iterdir())


def test_spawned_ranks_explain_a_missing_main_guard(path: Path, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(f"from tapscope.engine import LLM\nLLM({str(path)!r}, tp=2)\n")
    done = warm.run(script, popen=warm.WarmTree)
    assert done.returncode == 1
    assert 'under `if __name__ == "__main__":`' in done.stderr


def test_rank_group_fails_if_an_observer_factory_raises(path: Path) -> None:
    with pytest.raises(RankLostError, match=r"(?s)rank 1 of 2 failed:.*no room on rank 1"):
        LLM(path, tp=2, observer=unmakeable_on_rank_1)
