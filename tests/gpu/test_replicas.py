"""Replicas on GPUs: each uses exactly one GPU of its own, and a replica without a GPU is one clear error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import make_llama
from dp_server import PROMPT, Server, _ended, _started
from engine_helpers import reference_tokens

from tapscope.sources import open_run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1, max_position_embeddings=4096)


def gpus_of(pid: int) -> set[int]:
    """Return the indices of the GPUs on which process ``pid`` has a context, as listed by the driver."""
    indices = {uuid: int(index) for index, uuid in _driver("gpu", "index,uuid")}
    return {indices[uuid] for found, uuid in _driver("compute-apps", "pid,gpu_uuid") if int(found) == pid}


def _driver(what: str, fields: str) -> list[list[str]]:
    command = ["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [line.split(", ") for line in output.splitlines()]


@needs_two
def test_replicas_compute_and_capture_on_their_own_gpu(model: Path, tmp_path: Path) -> None:
    server = _started(model, tmp_path, "--set", "device=cuda")
    try:
        _ask_both(server, model)
    finally:
        ended = _ended(server)
    assert ended == (0, "")
    with open_run(server.run) as run:
        assert run.ledger().complete, run.ledger().sentences()
        assert {record.key.rank for record in run.records if record.entry} == {0, 1}


def _ask_both(server: Server, model: Path) -> None:
    server.ask("/dumper/configure", keep="full", rules=["lm_head:out=full", "*=off"])
    for replica in (0, 1):
        answer = server.generate(replica)
        assert answer["meta_info"]["dp_rank"] == replica
        assert answer["output_ids"] == reference_tokens(model, PROMPT, 4)
    ranks = server.http.get("/dumper/state").raise_for_status().json()["ranks"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
    assert [gpus_of(rank["pid"]) for rank in ranks] == [{int(gpu)} for gpu in visible]


def test_replicas_without_a_gpu_are_refused_in_one_line(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tapscope", "serve", str(model), "-o", str(tmp_path / "run"), "-q"]
    command += ["--dp", "2", "--set", "device=cuda", "--listen", "127.0.0.1:0"]
    only = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}
    result = subprocess.run(command, env=os.environ | only, capture_output=True, text=True, timeout=120, check=False)
    assert "dp=2 replicas of tp=1 ranks need 2 GPUs but there are 1; use fewer, or device='cpu'" in result.stderr
    # Packages of the driver may print warnings of their own.
    assert (result.returncode, result.stderr.count("tapscope"), "Traceback" in result.stderr) == (2, 1, False)
