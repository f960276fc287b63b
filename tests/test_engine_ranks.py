"""Several ranks are several processes: they agree, they end together, and a lost one is said within seconds."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_llama
from engine_helpers import Memory, reference_tokens

from tapscope.engine import LLM
from tapscope.errors import RankLostError
from tapscope.observe import RankInfo, StepInfo

PROMPTS = [[5, 6, 7], list(range(40, 75)), [300]]


class Journal(Memory):
    """Writes what this rank is told to FOLDER/rank-N, so that another process can read it."""

    folder: Path

    def before_step(self, info: StepInfo) -> None:
        super().before_step(info)
        with (self.folder / f"rank-{self.info.rank}").open("a") as file:
            file.write(f"{info.step} {info.epoch} {info.phase} {info.rows}\n")

    def close(self) -> None:
        super().close()
        (self.folder / f"closed-{self.info.rank}").touch()


class JournalIn:
    """A picklable factory of Journals; ``explode`` makes a rank raise at that step."""

    def __init__(self, folder: Path, explode: tuple[int, int] | None = None) -> None:
        self.folder = folder
        self.explode = explode

    def __call__(self, model: Any, info: RankInfo) -> Journal:
        journal = (Exploding if self.explode and info.rank == self.explode[0] else Journal)(model, info)
        journal.folder = self.folder
        journal.last_step = self.explode[1] if self.explode else -1
        return journal


class Exploding(Journal):
    """Raises when its last step ends."""

    last_step: int

    def after_step(self, metrics: Mapping[str, float]) -> None:
        super().after_step(metrics)
        if self.steps[-1].step == self.last_step:
            raise ValueError("the observer of this rank gave up")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1, vocab_size=523, attention_bias=True)


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def _is_gone(pid: int) -> bool:
    """Whether no such process runs; a zombie that nobody has waited for counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture
def loaded(path: Path, tmp_path: Path) -> Iterator[LLM]:
    with LLM(path, tp=2, observer=JournalIn(tmp_path)) as llm:
        yield llm


def test_two_ranks_generate_what_one_does_see_the_same_steps_and_close(loaded: LLM, path: Path, tmp_path: Path) -> None:
    assert torch.get_num_threads() == 1
    for generation, prompt in zip(
        loaded.generate(PROMPTS, max_new_tokens=24, ignore_eos=True), PROMPTS, strict=True
    ):
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


def test_a_killed_rank_is_said_within_seconds_and_the_engine_stays_stopped(loaded: LLM, tmp_path: Path) -> None:
    pid = loaded.engine.rank_pids[1]
    # It dies in the middle of a step, while rank 0 waits for it in a collective.
    loaded.model.model.layers[1].register_forward_hook(lambda *_: os.kill(pid, signal.SIGKILL))
    started = time.monotonic()
    with pytest.raises(RankLostError, match="rank 1 of 2 was killed by signal 9"):
        loaded.generate(PROMPTS, max_new_tokens=24)
    with pytest.raises(RankLostError, match="the engine stopped: rank 1 of 2 was killed"):
        loaded.step()
    loaded.close()
    assert time.monotonic() - started < 10


def test_a_rank_that_dies_while_idle_is_noticed_at_the_next_step(loaded: LLM) -> None:
    pid = loaded.engine.rank_pids[1]
    os.kill(pid, signal.SIGKILL)
    assert _wait(lambda: _is_gone(pid), 5)
    with pytest.raises(RankLostError, match="rank 1 of 2 was killed by signal 9"):
        loaded.generate([[5]])


def test_a_rank_that_raises_is_lost_with_its_traceback(path: Path, tmp_path: Path) -> None:
    with LLM(path, tp=2, observer=JournalIn(tmp_path, explode=(1, 3))) as llm:
        with pytest.raises(RankLostError, match=r"(?s)rank 1 of 2 failed:.*in after_step.*gave up"):
            llm.generate(PROMPTS, max_new_tokens=24)
        assert (tmp_path / "closed-1").exists()  # what it had recorded was flushed first


def test_a_rank_that_hangs_is_lost_after_the_timeout(path: Path, tmp_path: Path) -> None:
    with LLM(path, tp=2, rank_timeout_s=2.0) as llm:
        assert llm.generate([[5]], max_new_tokens=1)
        pid = llm.engine.rank_pids[1]
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(RankLostError, match=r"lost a peer in an all-"):
            llm.generate([[5]])
        assert time.monotonic() - started < 8
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
def test_no_rank_outlives_its_engine(path: Path, tmp_path: Path, ending: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(SCRIPT.replace("{ending}", ending))
    with subprocess.Popen([sys.executable, str(script), str(path)], stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        if "sleep" in ending:
            assert not _is_gone(pid)
            process.kill()
        assert process.wait(15) == (-9 if "sleep" in ending else 0)
        assert _wait(lambda: _is_gone(pid), 10)


def test_a_script_without_a_main_guard_is_told_what_to_write(path: Path, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(f"from tapscope.engine import LLM\nLLM({str(path)!r}, tp=2)\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert 'under `if __name__ == "__main__":`' in done.stderr


def test_an_observer_that_cannot_be_made_on_one_rank_fails_the_start(path: Path) -> None:
    with pytest.raises(RankLostError, match=r"(?s)rank 1 of 2 failed:.*no room on rank 1"):
        LLM(path, tp=2, observer=_picky)


def _picky(model: Any, info: RankInfo) -> Memory:
    if info.rank == 1:
        raise OSError("no room on rank 1")
    return Memory(model, info)


def test_two_engines_of_two_ranks_run_side_by_side(path: Path) -> None:
    with LLM(path, tp=2) as first:
        made: list[LLM] = []
        thread = threading.Thread(target=lambda: made.append(LLM(path, tp=2)))
        thread.start()
        thread.join()
        with made[0] as second:
            for llm in (first, second, first):
                (generation,) = llm.generate([[5, 6, 7]], max_new_tokens=5, ignore_eos=True)
                assert list(generation.token_ids) == reference_tokens(path, [5, 6, 7], 5)
