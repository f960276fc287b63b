"""Routes for trainers: weights from another process, digests, and releasing the memory of weights and KV cache."""

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forkserver_pool as warm
import httpx
import moe_checkpoints
import pytest
import torch
from checkpoints import make_checkpoint, make_llama
from engine_http import served
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_checkpoints import make_moe
from safetensors.torch import load_file

from tapscope.core.errors import CheckpointError, LiveError, UsageError
from tapscope.engine import LLM, SamplingParams
from tapscope.engine.checkpoint.weight_digest import ShardDigest, joined_digests, part_digest, tensor_digest
from tapscope.engine.execution.memory_occupation import MemoryOccupation

WORKER = Path(__file__).parents[2] / "support" / "trainer_process.py"


class TrainerProcess:
    """A process that runs :mod:`trainer_process`."""

    def __init__(self, url: str) -> None:
        self.process = warm.start(WORKER, url, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def do(self, *words: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@contextmanager
def trainer_of(url: str) -> Iterator[TrainerProcess]:
    trainer = TrainerProcess(url)
    try:
        yield trainer
    finally:
        trainer.process.stdin.close()
        trainer.process.stdout.close()
        trainer.process.kill()
        trainer.process.wait()


def _tokens(client: httpx.Client) -> Any:
    body = {"input_ids": [3, 5, 7, 9] * 6, "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["output_ids"]


def _expected(path: Path) -> list[int]:
    with LLM(path) as llm:
        return list(llm.generate([[3, 5, 7, 9] * 6], SamplingParams(max_new_tokens=8, ignore_eos=True))[0].token_ids)


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_trainer_process_updates_a_running_server(tmp_path: Path, tp: int) -> None:
    old, new = (make_llama(tmp_path / name, seed=seed) for name, seed in (("old", 1), ("new", 2)))
    expected = _expected(new)
    with served(old, tp=tp) as url, httpx.Client(base_url=url, timeout=90) as client, trainer_of(url) as trainer:
        before = _tokens(client)
        assert before != expected
        assert "call join() first: it creates the process group" in trainer.do("update", str(new), None, "v1")["error"]
        assert trainer.do("join") is None
        assert set(trainer.do("compare", str(new), None).values()) == {"other values"}
        refused = trainer.do("update", str(new), ["model.norm.weight", "nowhere.weight"], "v1")["error"]
        assert "nowhere.weight is unexpected" in refused
        assert _tokens(client) == before
        assert trainer.do("compare", str(old), None) == {}
        answer = trainer.do("update", str(new), None, "v2")
        assert (answer["success"], answer["weight_version"], answer["num_live"]) == (True, "v2", 0)
        assert _tokens(client) == expected, "the prefix cache has nothing of the old weights"
        assert trainer.do("compare", str(new), None) == {}
        name = "model.layers.1.self_attn.k_proj.weight"
        assert trainer.do("compare", str(new), name) == {name: "other values"}
        assert trainer.do("update", str(old), [name], "v3")["success"]
        assert trainer.do("compare", str(new), None) == {name: "other values"}
        client.post("/release_memory_occupation").raise_for_status()
        begin = time.monotonic()
        assert "is released" in trainer.do("update", str(new), None, "v4")["error"]
        assert time.monotonic() - begin < 60, "a refused update does not wait for ranks that never receive"
        client.post("/resume_memory_occupation").raise_for_status()
        assert trainer.do("update", str(new), None, "v4")["success"]
        assert trainer.do("compare", str(new), None) == {}
        assert trainer.do("close") is None
        gone = client.post("/destroy_weights_update_group", json={})
        assert gone.json()["error"]["message"].startswith("unknown group 'weight_update_group': create it with POST")


def test_trainer_that_ends_leaves_the_old_weights(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model", seed=1)
    with served(path) as url, httpx.Client(base_url=url, timeout=90) as client:
        before = _tokens(client)
        with trainer_of(url) as trainer:
            trainer.do("join")
        body = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]]}
        answer = client.post("/update_weights_from_distributed", json=body)
        assert answer.status_code == 400
        assert "no weights arrived in group 'weight_update_group'" in answer.json()["error"]["message"]
        assert _tokens(client) == before
        with trainer_of(url) as trainer:
            refused = trainer.do("join")["error"]
            assert "group 'weight_update_group' exists; end it with POST /destroy_weights_update_group" in refused
            assert client.post("/destroy_weights_update_group", json={}).status_code == 200
            assert trainer.do("join") is None


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("/update_weights_from_distributed", {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]]}, "unknown group"),
        ("/init_weights_update_group", {"backend": "nccl"}, "backend 'nccl' needs GPUs"),
        ("/init_weights_update_group", {"backend": "mpi"}, "unknown backend 'mpi'; supported: gloo, nccl"),
        ("/init_weights_update_group", {"rank_offset": 2}, "ranks 2 to 2 of a group of 2"),
        ("/release_memory_occupation", {"tags": ["disk"]}, "unknown tag 'disk'"),
    ],
)
def test_weight_routes_refuse_invalid_bodies(server: str, route: str, body: dict[str, Any], message: str) -> None:
    if route.startswith("/init"):
        group = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
        body = group | body
    answer = httpx.post(server + route, json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1)) as address:
        yield address


def test_memory_is_released_and_resumed_with_the_same_weights(server: str) -> None:
    with httpx.Client(base_url=server, timeout=90) as client:
        before = _tokens(client)
        answer = client.post("/release_memory_occupation", json={"tags": ["kv_cache"]})
        assert answer.json() == {"success": True, "released": ["kv_cache"]}
        assert client.post("/release_memory_occupation").json()["released"] == ["weights", "kv_cache"]
        refused = client.post("/generate", json={"input_ids": [3]})
        assert refused.status_code == 503
        message = refused.json()["error"]["message"]
        assert message == "the memory of weights and kv_cache is released; resume it first"
        assert client.get("/health").status_code == 200
        assert "resume it first" in client.post("/weights_digest").json()["error"]["message"]
        assert client.post("/resume_memory_occupation", json={"tags": ["weights"]}).json()["released"] == ["kv_cache"]
        assert client.post("/resume_memory_occupation").json()["released"] == []
        assert _tokens(client) == before


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="no resident size")
def test_released_memory_returns_to_the_system(tmp_path: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    path = make_llama(tmp_path / "model", seed=1, vocab_size=40_000, hidden_size=256)
    with LLM(path, num_pages=4096) as llm:
        prompt = [[3, 5, 7, 9] * 6]
        before = llm.generate(prompt, SamplingParams(max_new_tokens=4))[0].token_ids
        size = sum(parameter.nbytes for parameter in llm.model.parameters())
        held = resident()
        llm.engine.weights.release_memory(None)
        assert held - resident() > 0.8 * size
        with pytest.raises(LiveError, match="is released"):
            llm.submit(prompt[0])
        with pytest.raises(UsageError, match="resume it before an update"):
            llm.engine.update_weights(path)
        llm.engine.weights.resume_memory(None)
        assert llm.generate(prompt, SamplingParams(max_new_tokens=4))[0].token_ids == before
        llm.submit(prompt[0])
        with pytest.raises(UsageError, match="1 requests are live"):
            llm.engine.weights.release_memory(None)


def test_memory_that_a_rank_fails_to_release_or_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error the memory is in its previous state, and the command can be repeated."""
    with LLM(make_llama(tmp_path / "model", seed=1), num_pages=16) as llm:
        control, params = llm.engine.weights, SamplingParams(max_new_tokens=4)
        before = llm.generate([[3, 5, 7, 9]], params)[0].token_ids
        release, resize = MemoryOccupation.release, torch.UntypedStorage.resize_
        num_left = 2

        def release_and_fail(memory: MemoryOccupation, tags: Sequence[str]) -> int:
            release(memory, tags)
            raise OSError("No space left on device")  # on another rank

        def fail_third(storage: torch.UntypedStorage, size: int) -> None:
            nonlocal num_left
            num_left -= 1
            if num_left < 0:
                raise RuntimeError("out of memory")
            resize(storage, size)

        with monkeypatch.context() as patch:
            patch.setattr(MemoryOccupation, "release", release_and_fail)
            with pytest.raises(UsageError, match="memory of weights, kv_cache cannot be released: No space left"):
                control.release_memory(None)
        assert llm.generate([[3, 5, 7, 9]], params)[0].token_ids == before
        control.release_memory(None)
        with monkeypatch.context() as patch:
            patch.setattr(torch.UntypedStorage, "resize_", fail_third)
            with pytest.raises(UsageError, match="memory of weights cannot be resumed: out of memory"):
                control.resume_memory(["weights"])
        with pytest.raises(LiveError, match="the memory of weights and kv_cache is released"):
            llm.submit([3])
        assert control.resume_memory(None) == []
        assert llm.generate([[3, 5, 7, 9]], params)[0].token_ids == before


_FAMILIES = ["gemma3", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "llama4", "phi3", "falcon_h1"]
_FAMILIES += ["kimi_linear", "zamba2"]


@pytest.mark.parametrize("family", ["llama", *(pytest.param(name, marks=pytest.mark.soak) for name in _FAMILIES)])
def test_digests_of_ranks_add_up_to_those_of_the_checkpoint(tmp_path: Path, family: str) -> None:
    make = make_moe if family in moe_checkpoints.FAMILIES else make_checkpoint
    path = make(tmp_path / "model", family, seed=1)
    expected = {name: tensor_digest(tensor) for name, tensor in load_file(path / "model.safetensors").items()}
    with LLM(path, tp=2) as llm:
        found = llm.engine.weights.digests(list(expected))
        assert {name: each["digest"] for name, each in found.items()} == expected
        with torch.no_grad():
            llm.model.get_parameter("model.layers.1.input_layernorm.weight")[0] += 1
        with pytest.raises(CheckpointError, match=r"ranks 0 and 1 hold different values in .*input_layernorm.weight"):
            llm.engine.weights.digests(None)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_digest_of_a_tensor_is_the_sum_over_any_split(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn]))
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))).to(dtype)
    axis = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[axis]))
    parts = [(tensor.narrow(axis, 0, cut), 0), (tensor.narrow(axis, cut, shape[axis] - cut), cut)]
    starts = [[first if each == axis else 0 for each in range(len(shape))] for _, first in parts]
    total = sum(part_digest(part, shape, start) for (part, _), start in zip(parts, starts, strict=True))
    assert f"{total % (1 << 64):016x}" == tensor_digest(tensor)
    if tensor.numel() > 1:
        other = tensor.flatten().roll(1)
        assert torch.equal(other.float(), tensor.flatten().float()) == (
            tensor_digest(other.view(shape)) == tensor_digest(tensor)
        )


def test_digests_of_ranks_that_miss_a_part_are_refused() -> None:
    shard = ShardDigest("w", (4, 2), "float32", (-1, 0, 0, 2), 4, 7)
    with pytest.raises(CheckpointError, match="the ranks hold 4 of the 8 elements of w"):
        joined_digests([[shard], [shard]])
