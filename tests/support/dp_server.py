"""`tapscope serve --dp N` as a process under test."""

import json
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forkserver_pool as warm
import httpx
import pytest
from checkpoints import make_llama
from jobs import LIMIT_S, free_port
from prometheus_client.parser import text_string_to_metric_families

from tapscope import wait_for_ready
from tapscope.sources import open_run

GREEDY = {"max_new_tokens": 4, "ignore_eos": True}


LONG = GREEDY | {"max_new_tokens": 4000}


PROMPT = [5, 6, 7]


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@dataclass
class Server:
    """A `tapscope serve` with several replicas, and a client."""

    process: "subprocess.Popen[str]"
    http: httpx.Client
    run: Path
    log: Path

    def ask(self, path: str, **body: Any) -> Any:
        return self.http.post(path, json=body).raise_for_status().json()

    def generate(self, dp_rank: int, prompt: list[int] = PROMPT, **params: Any) -> Any:
        return self.ask("/generate", input_ids=prompt, sampling_params=GREEDY | params, data_parallel_rank=dp_rank)

    def events(self, rid: str, dp_rank: int) -> Iterator[dict[str, Any]]:
        """Yield the events of a long stream."""
        body = {"input_ids": PROMPT, "sampling_params": LONG, "rid": rid, "stream": True, "data_parallel_rank": dp_rank}
        with self.http.stream("POST", "/generate", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    def metric(self, name: str) -> dict[str, float]:
        """Return an engine metric by replica."""
        text = self.http.get("/metrics").raise_for_status().text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        assert all(s.labels["dp_rank"] in "01" for s in samples if s.name.startswith("tapscope_engine_"))
        return {s.labels["dp_rank"]: s.value for s in samples if s.name == f"tapscope_engine_{name}"}


def _started(model: Path, folder: Path, *flags: str) -> Server:
    address = f"127.0.0.1:{free_port()}"
    run, log = folder / "run", folder / "log.jsonl"
    words = ["-m", "tapscope", "serve", model, "-o", run, "--listen", address, "-q"]
    words += ["--dp", "2", "--set", "num_pages=1024", "--request-log", log, *flags]
    process = warm.start(*words, popen=warm.WarmTree, stderr=subprocess.PIPE, text=True)
    server = Server(process, httpx.Client(base_url=f"http://{address}", timeout=LIMIT_S), run, log)
    wait_for_ready(address, process, LIMIT_S)
    return server


def _ended(server: Server) -> tuple[int, str]:
    server.http.close()
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
    return_code, said = None, ""
    try:
        said = server.process.communicate(timeout=LIMIT_S)[1]
        return_code = server.process.returncode
    finally:
        server.process.kill()
    return return_code, said


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two checkpoints of the same model with different weights."""
    folder = tmp_path_factory.mktemp("models")
    made = {"num_hidden_layers": 1, "max_position_embeddings": 4096}
    paths = [make_llama(folder / name, seed=seed, **made) for seed, name in enumerate(("old", "new"))]
    for path in paths:
        (path / "chat_template.jinja").write_text(TEMPLATE)
    return paths


@pytest.fixture(scope="module")
def server(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = _started(models[0], tmp_path_factory.mktemp("served"))
    try:
        yield server
        server.ask("/dumper/configure", enabled=True, keep="full", rules=["lm_head:out=full", "*=off"])
        for replica in (0, 1):
            server.generate(replica)
    finally:
        code, said = _ended(server)
    assert (code, said) == (0, "")
    with open_run(server.run) as run:
        assert run.ledger().complete, run.ledger().sentences()
        assert run.mesh == {"dp": 2, "tp": 1}
        assert [run.coords(rank)["dp"] for rank in run.ranks] == [0, 1]
        assert {record.key.rank for record in run.records} == {0, 1}
