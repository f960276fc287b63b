"""An observer is notified of every step on every rank, with the same information."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from checkpoints import make_llama
from engine_observers import Memory

from tapscope.core.observe import RankInfo, RowSpan, StepInfo
from tapscope.engine import LLM


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1)


def test_observer_step_info_has_requests_positions_slots_and_tokens(path: Path) -> None:
    with LLM(path, observer=Memory) as llm:
        llm.submit([5, 6, 7], max_new_tokens=3, request_id="a", forced_token_ids=[50, 51, 52])
        llm.step()
        llm.submit([8, 9], max_new_tokens=2, request_id="b", forced_token_ids=[60, 61])
        while llm.has_work:
            llm.step()
        steps = llm.observer.steps
    assert [info.step for info in steps] == [0, 1, 2]
    assert [info.phase for info in steps] == ["prefill", "mixed", "decode"]
    assert [info.grid for info in steps] == [(3,), (3,), (2,)]
    assert steps[0].rows == (RowSpan("a", 0, 3, 0, 0),)
    assert steps[1].rows == (RowSpan("a", 3, 1, 0, 0), RowSpan("b", 0, 2, 0, 1))
    assert steps[2].rows == (RowSpan("a", 4, 1, 0, 0), RowSpan("b", 2, 1, 0, 1))
    assert [tuple(info.token_ids) for info in steps] == [(5, 6, 7), (50, 8, 9), (51, 60)]
    assert [info.row_sets["logits"] for info in steps] == [(2,), (0, 2), (0, 1)]


def test_observer_receives_metrics_of_every_step(path: Path) -> None:
    with LLM(path, observer=Memory, page_size=4, num_pages=10) as llm:
        llm.generate([[5, 6, 7], [8] * 6], max_new_tokens=2, ignore_eos=True)
        metrics = llm.observer.metrics
    assert [m["num_tokens"] for m in metrics] == [9, 2]
    assert [m["batch_size"] for m in metrics] == [2, 2]
    assert [m["kv_pages_used"] for m in metrics] == [1 + 2, 1 + 2]
    assert {m["kv_pages_total"] for m in metrics} == {10}
    assert all(m["latency_s"] > 0 and m["rss_bytes"] > 1 << 20 for m in metrics)


def test_step_plan_carries_the_epoch_of_rank_0(path: Path) -> None:
    with LLM(path, observer=Memory) as llm:
        llm.submit([5, 6], max_new_tokens=3, ignore_eos=True)
        llm.step()
        llm.observer.epoch = 8
        llm.step()
        assert [info.epoch for info in llm.observer.steps] == [7, 8]


def test_engine_step_without_requests_does_not_notify_the_observer(path: Path) -> None:
    with LLM(path, observer=Memory) as llm:
        assert llm.step() == []
        assert llm.observer.steps == []


def test_observer_factory_receives_model_and_rank_info(path: Path) -> None:
    with LLM(path, observer=Memory) as llm:
        info: RankInfo = llm.observer.info
    assert (info.rank, info.world_size, info.framework, info.dtype) == (0, 1, "tapscope", "float32")
    assert info.model == str(path)
    assert (info.mesh, info.coords) == ({"tp": 1}, {"tp": 0})


class Strict(Memory):
    """Raises at the end of the second step, like a strict dumper that has lost data."""

    def after_step(self, metrics: Mapping[str, float]) -> None:
        super().after_step(metrics)
        if len(self.metrics) == 2:
            raise RuntimeError("lost a record")


class Refusing(Memory):
    """Fails to begin its first step."""

    def before_step(self, info: StepInfo) -> None:
        if not self.steps:
            self.steps.append(info)
            self.metrics.append({})
            raise RuntimeError("not ready")
        super().before_step(info)


def test_observer_error_in_after_step_keeps_committed_tokens(path: Path) -> None:
    with LLM(path, observer=Strict) as llm:
        llm.submit([5, 6], max_new_tokens=4, request_id="a", forced_token_ids=[50, 51, 52, 53])
        llm.step()
        with pytest.raises(RuntimeError, match="lost a record"):
            llm.step()
        done = []
        while llm.has_work:
            done += llm.step()
        positions = [run.position for info in llm.observer.steps for run in info.rows]
    assert done[0].token_ids == (50, 51, 52, 53)
    assert positions == [0, 2, 3, 4]


def test_observer_error_in_before_step_leaves_tokens_to_the_next_step(path: Path) -> None:
    with LLM(path, observer=Refusing) as llm:
        llm.submit([5, 6], max_new_tokens=2, forced_token_ids=[50, 51])
        with pytest.raises(RuntimeError, match="not ready"):
            llm.step()
        llm.step()
        (done,) = llm.step()
        assert done.token_ids == (50, 51)
        assert [info.step for info in llm.observer.steps] == [0, 1, 2]
