"""Out of memory in a step raises one error naming the setting to lower; the engine keeps running without leaks."""

import resource
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, make_llama
from draft_heads import make_speculating
from lora_adapters import ATTENTION, make_adapter
from moe_checkpoints import make_moe
from soak_cases import EXAMPLES, mostly_soak
from torch.utils._python_dispatch import TorchDispatchMode

from tapscope.core.errors import OutOfMemoryError, RankLostError
from tapscope.engine import LLM, SamplingParams
from tapscope.engine.speculative.speculator import Speculator

PROMPTS = [[5, 6, 7] * 3, list(range(40, 60)), [300]]
LONG = [(7 * i + i // 3) % 500 for i in range(4000)]
EVERYTHING = SamplingParams(
    max_new_tokens=4, temperature=0.8, seed=1, ignore_eos=True, logprobs=2, prompt_logprobs=1, hidden_states=True
)
CUDA = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.80 GiB."
ERRORS = [torch.cuda.OutOfMemoryError(CUDA), MemoryError(), RuntimeError("DefaultCPUAllocator: not enough memory: you")]
MODES = ("plain", "steps ahead", "adapter", "state", "NGRAM", "EAGLE", "tree")


@contextmanager
def _address_space(more_bytes: int) -> Iterator[None]:
    """Limit this process to mapping ``more_bytes`` of additional memory."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


class FailingOp(TorchDispatchMode):
    """Makes the ``number``-th tensor operation raise ``error``, once."""

    def __init__(self, number: int, error: BaseException) -> None:
        super().__init__()
        self.number, self._error, self.count = number, error, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.number:
            raise self._error
        return func(*args, **kwargs or {})


def _make(mode: str, folder: Path) -> LLM:
    settings: dict[str, Any] = {"page_size": 4, "max_num_batched_tokens": 16}
    settings |= {"check_invariants": True, "batch_invariant": True}  # no bit depends on the content of the prefix cache
    if mode in ("EAGLE", "tree"):
        path, more = make_speculating(folder, "EAGLE")
        settings |= more
        if mode == "tree":
            settings |= {"speculative_eagle_topk": 2}
    elif mode == "state":
        path = make_moe(folder / "model", "qwen3_next", seed=1)
    else:
        path = make_llama(folder / "model", seed=1)
    if mode == "NGRAM":
        settings["speculative_algorithm"] = "NGRAM"
    if mode == "adapter":
        settings["lora_paths"] = {"a": make_adapter(folder / "a", path, ATTENTION, seed=1)}
    llm = LLM(path, **settings)
    llm.engine.async_scheduling = mode == "steps ahead"
    return llm


def _tokens(llm: LLM, params: SamplingParams, mode: str) -> list[Any]:
    adapter = "a" if mode == "adapter" else None
    return [(g.token_ids, g.logprobs) for g in llm.generate(PROMPTS, params, adapter=adapter)]


def _assert_nothing_is_left(llm: LLM) -> None:
    engine = llm.engine
    engine.scheduler.check()
    assert (llm.has_work, engine.num_in_flight, engine._live, llm._sync_runner._assemblers) == (False, 0, {}, {})
    assert engine.scheduler.kv_cache_manager.num_used == 0
    assert len(engine.scheduler._free_rows) == llm.config.max_num_seqs
    assert all(adapter.num_live == 0 for adapter in engine.adapters)


@pytest.mark.parametrize("mode", mostly_soak(MODES, default=["steps ahead", "adapter", "tree"]))
def test_out_of_memory_at_any_operation_ends_the_call_and_nothing_else(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Speculator, "record_time", lambda self, plan, seconds: None)
    greedy = SamplingParams(max_new_tokens=4, ignore_eos=True)
    with _make(mode, tmp_path) as llm:
        for params in (greedy, EVERYTHING):
            llm.engine.scheduler.flush()
            with FailingOp(0, MemoryError()) as counting:
                expected = _tokens(llm, params, mode)
            num_cases = 3 * EXAMPLES
            for case in range(num_cases):
                llm.engine.scheduler.flush()
                number = 1 + (counting.count - 1) * (2 * case + 1) // (2 * num_cases)
                with FailingOp(number, ERRORS[case % 3]), pytest.raises(OutOfMemoryError) as caught:
                    _tokens(llm, params, mode)
                assert str(caught.value).startswith("a step failed: ")
                assert "lower max_num_batched_tokens (16), max_num_seqs (64) or num_pages (" in str(caught.value)
                assert caught.value.__cause__ is ERRORS[case % 3]
                _assert_nothing_is_left(llm)
                assert _tokens(llm, params, mode) == expected, number


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with an MLP so wide that a long prompt takes 128 MB."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    return make_checkpoint(folder, "llama", seed=1, intermediate_size=8192, max_position_embeddings=4096)


def test_out_of_memory_of_the_allocator_names_the_settings(wide: Path) -> None:
    with LLM(wide, max_num_batched_tokens=4096, max_num_seqs=4, check_invariants=True) as llm:
        expected = llm.generate(PROMPTS, max_new_tokens=4, ignore_eos=True)
        with _address_space(48 << 20), pytest.raises(OutOfMemoryError) as caught:
            llm.generate([LONG], max_new_tokens=1)
        pages = llm.engine.scheduler.config.num_pages
        assert str(caught.value) == (
            "a step failed: cpu has too little free memory for 4000 rows of 1 request; lower "
            f"max_num_batched_tokens (4096), max_num_seqs (4) or num_pages ({pages})"
        )
        assert isinstance(caught.value, MemoryError)
        _assert_nothing_is_left(llm)
        again = llm.generate(PROMPTS, max_new_tokens=4, ignore_eos=True)
        assert [g.token_ids for g in again] == [g.token_ids for g in expected]
        whole = llm.generate([LONG], max_new_tokens=2, ignore_eos=True)
    with LLM(wide, max_num_batched_tokens=64) as llm, _address_space(48 << 20):  # the suggested setting helps
        assert llm.generate([LONG], max_new_tokens=2, ignore_eos=True)[0].token_ids == whole[0].token_ids


@pytest.mark.parametrize("mode", ["plain", "steps ahead", "state"])
def test_out_of_memory_in_a_step_of_the_caller_is_tried_again(mode: str, tmp_path: Path) -> None:
    """Only if no token of the step was sampled; otherwise its requests end."""
    params = SamplingParams(max_new_tokens=4, temperature=0.8, seed=1, ignore_eos=True)
    with _make(mode, tmp_path) as llm:
        with FailingOp(0, MemoryError()) as counting:
            expected = [g.token_ids for g in llm.generate(PROMPTS, params)]
        for case in range(3 * EXAMPLES):
            llm.engine.scheduler.flush()
            names = [llm.submit(prompt, params) for prompt in PROMPTS]
            done, num_failed = {}, 0
            with FailingOp(1 + (counting.count - 1) * (2 * case + 1) // (6 * EXAMPLES), torch.OutOfMemoryError(CUDA)):
                while llm.has_work:
                    try:
                        done |= {generation.request: generation.token_ids for generation in llm.step()}
                    except OutOfMemoryError:
                        num_failed += 1
            assert (num_failed, [done[name] for name in names]) == (1, expected)
            _assert_nothing_is_left(llm)


class Steps:
    """An observer that counts announced and finished steps."""

    def __init__(self, *_: Any) -> None:
        self.epoch, self.armed, self.open, self.finished = 0, False, 0, 0

    def before_step(self, info: Any) -> None:
        assert not self.open, "the step before is not finished"
        self.open = 1

    def after_step(self, metrics: Any) -> None:
        assert self.open, "the step is finished twice"
        self.open, self.finished = 0, self.finished + 1

    def close(self) -> None:
        assert not self.open


@pytest.mark.parametrize("is_async", [False, True])
def test_out_of_memory_closes_the_step_of_an_observer_once(tmp_path: Path, is_async: bool) -> None:
    params = SamplingParams(max_new_tokens=4, ignore_eos=True, **({} if is_async else {"hidden_states": True}))
    with LLM(make_llama(tmp_path / "model", seed=1), observer=Steps) as llm:
        llm.engine.async_scheduling = is_async
        for _ in range(2):  # the first call also allocates persistent buffers
            llm.engine.scheduler.flush()
            with FailingOp(0, MemoryError()) as counting:
                llm.generate(PROMPTS, params)
        llm.engine.scheduler.flush()
        for number in range(1, counting.count, max(1, counting.count // (8 * EXAMPLES))):
            with FailingOp(number, MemoryError()), pytest.raises(OutOfMemoryError):
                llm.generate(PROMPTS, params)
            assert not llm.observer.open
            llm.engine.scheduler.flush()


def test_out_of_memory_frees_the_tensors_of_the_step_while_the_error_is_held(tmp_path: Path) -> None:
    class Products(FailingOp):
        made: list[Any] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = super().__torch_dispatch__(func, types, args, kwargs)
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.silu):
                self.made.append(weakref.ref(found))
            return found

    with LLM(make_llama(tmp_path / "model", seed=1)) as llm:
        with FailingOp(0, MemoryError()) as counting:
            llm.generate(PROMPTS, max_new_tokens=1)
        llm.engine.scheduler.flush()
        with Products(counting.count // 2, torch.OutOfMemoryError(CUDA)), pytest.raises(OutOfMemoryError) as caught:
            llm.generate(PROMPTS, max_new_tokens=1)
        assert len(Products.made) > 5
        assert [reference() for reference in Products.made if reference() is not None] == [], caught.value


def test_out_of_memory_on_one_of_several_ranks_ends_them(tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError(CUDA)

    with LLM(make_llama(tmp_path / "model", seed=1), tp=2) as llm:
        llm.model.register_forward_hook(fail)
        with pytest.raises(OutOfMemoryError, match="a step failed: cpu has too little free memory for 3 rows"):
            llm.generate([[5, 6, 7]], max_new_tokens=1)
        with pytest.raises(RankLostError, match=r"the engine stopped: rank 0 failed in step 0: .*lower max_num"):
            llm.generate([[5, 6, 7]], max_new_tokens=1)
