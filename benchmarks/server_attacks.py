"""Delay that one malicious request causes to other clients of `tapscope serve`.

    python -m benchmarks.server_attacks [MODEL] [--seconds 6] [--server-cores 0] [--client-cores 1] [--json]

The server runs on its own cores; the attacker (a process that repeats one attack at a time) and the measured clients
share the others, the attacker with lower priority. Measured are GET /health every 5 ms, the gaps between tokens of a
stream, and full requests of eight tokens; first without an attack, then under each. Times in ms. A gap is the cost of
the slowest moment to one client, so `max` is the figure to look at: the goals are 250 ms, and 50 ms for the p99 of
/health. Without MODEL, a tiny Llama is created.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

Attack = Callable[[str], str]
"""Attacks the server at an address once and returns a description of the outcome."""

OVERLAPPING = {f"^a{i}[a-z]*$": {"type": "string", "pattern": f"x{i}y*"} for i in range(1000)}


def _post(path: str, body: Any) -> Attack:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    def attack(address: str) -> str:
        try:
            answer = httpx.post(
                address + path, content=content, headers={"content-type": "application/json"}, timeout=60
            )
        except httpx.HTTPError as error:
            return type(error).__name__
        return f"{answer.status_code}, {len(answer.content):,} B"

    return attack


def _connections(number: int, begun: bytes) -> Attack:
    def attack(address: str) -> str:
        host, port = address.removeprefix("http://").split(":")
        with ExitStack() as stack:
            for _ in range(number):
                with suppress(OSError):
                    client = stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
                    client.sendall(begun)
            time.sleep(2)
        return f"{number} connections"

    return attack


def _generate(**more: Any) -> Attack:
    body = {"input_ids": [[5, 6, 7]], "sampling_params": {"max_new_tokens": 1}}
    return _post("/generate", body | more)


ATTACKS: dict[str, Attack] = {
    "256,000 generations": _post("/v1/completions", {"prompt": ["ab"] * 2000, "n": 128, "max_tokens": 1}),
    "512 generations": _post("/v1/completions", {"prompt": ["ab"] * 4, "n": 128, "max_tokens": 8, "temperature": 1.0}),
    "a prompt of 2 MB": _post("/v1/completions", {"prompt": "word and " * 250_000, "max_tokens": 1}),
    "a prompt of 8 MB": _post("/v1/completions", {"prompt": "x" * 8_300_000, "max_tokens": 1}),
    "a body of 64 MB": _post("/v1/completions", b" " * 64_000_000),
    "4 million brackets": _post("/v1/completions", b"[" * 4_000_000),
    "500 x 4,096 log-probabilities": _generate(
        input_ids=[5] * 500, return_logprob=True, logprob_start_len=0, top_logprobs_num=4096
    ),
    "190,000 log-probabilities": _generate(
        input_ids=[[5] * 60] * 16, return_logprob=True, logprob_start_len=0, top_logprobs_num=195
    ),
    "a grammar that takes minutes": _generate(
        sampling_params={"json_schema": json.dumps({"type": "object", "patternProperties": OVERLAPPING})}
    ),
    "a regex that explodes": _generate(sampling_params={"regex": "(a|b)*a(a|b){1000}(c{1,500}){1,500}"}),
    "1,500 half-open requests": _connections(1500, b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"),
    "1,500 connections that say nothing": _connections(1500, b""),
}


class Watch:
    """Latencies seen by the measured clients, in seconds."""

    def __init__(self) -> None:
        self.health: list[float] = []
        self.gaps: list[float] = []
        self.requests: list[float] = []

    def row(self) -> list[float]:
        """Return p50, p99 and maximum of each, in ms."""
        return [value for times in (self.health, self.gaps, self.requests) for value in _summary(times)]


def _summary(times: Sequence[float]) -> tuple[float, float, float]:
    if not times:
        return (float("nan"),) * 3
    ordered = sorted(times)
    return tuple(1e3 * each for each in (statistics.median(ordered), ordered[int(0.99 * len(ordered))], ordered[-1]))


async def measure(address: str, seconds: float) -> Watch:
    """Measure the latencies of three clients for ``seconds``."""
    watch, end = Watch(), time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=address, timeout=120) as client:

        async def health() -> None:
            while time.monotonic() < end:
                begun = time.perf_counter()
                (await client.get("/health")).raise_for_status()
                watch.health.append(time.perf_counter() - begun)
                await asyncio.sleep(0.005)

        async def stream() -> None:
            while time.monotonic() < end:
                last = time.perf_counter()
                async for _ in _tokens(client, 100):
                    watch.gaps.append(time.perf_counter() - last)
                    last = time.perf_counter()

        async def requests() -> None:
            body = {"prompt": [[5, 6, 7]], "max_tokens": 8}
            while time.monotonic() < end:
                begun = time.perf_counter()
                (await client.post("/v1/completions", json=body)).raise_for_status()
                watch.requests.append(time.perf_counter() - begun)

        await asyncio.gather(health(), stream(), requests())
    return watch


async def _tokens(client: httpx.AsyncClient, number: int) -> AsyncIterator[str]:
    body = {"prompt": [[5, 6, 7]], "max_tokens": number, "stream": True, "ignore_eos": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line:
                yield line


def _attacker(name: str, address: str, cores: Sequence[int], said: "multiprocessing.Queue[str]") -> None:
    os.sched_setaffinity(0, cores)
    os.nice(5)
    while True:
        begun = time.monotonic()
        outcome = ATTACKS[name](address)
        said.put(f"{outcome} after {time.monotonic() - begun:.2f} s")


@contextmanager
def attacked(name: str | None, address: str, cores: Sequence[int]) -> Iterator["multiprocessing.Queue[str]"]:
    """Context manager: a process repeats the named attack inside the ``with`` block."""
    context = multiprocessing.get_context("fork")
    said: multiprocessing.Queue[str] = context.Queue()
    if name is None:
        yield said
        return
    process = context.Process(target=_attacker, args=(name, address, cores, said), daemon=True)
    process.start()
    try:
        yield said
    finally:
        process.kill()
        process.join()


@contextmanager
def serving(model: Path, cores: str) -> Iterator[str]:
    """Context manager: run `tapscope serve` on its own cores; yields its address."""
    command = ["taskset", "-c", cores, sys.executable, "-m", "tapscope", "serve", str(model), "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if match := re.search(r"http://[\w.]+:\d+", line):
                while httpx.get(match[0] + "/health").status_code != 200:  # the engine is still loading
                    time.sleep(0.1)
                yield match[0]
                return
        raise SystemExit("the server did not start: " + "".join(lines))
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL", help="a checkpoint with a tokenizer")
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds per attack (default 6)")
    parser.add_argument(
        "--server-cores", default="0", metavar="LIST", help="cores of the server, in taskset syntax (default 0)"
    )
    parser.add_argument(
        "--client-cores",
        default="1",
        metavar="LIST",
        help="cores of the clients; the attacker gets the last (default 1)",
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="only attacks whose name contains this")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args()
    cores = [int(core) for core in args.client_cores.split(",")]
    with ExitStack() as stack:
        model = args.model
        if model is None:
            from examples.tiny_llama import make_checkpoint

            model = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="attacked-"))) / "model"
            make_checkpoint(model, steps=1)
        address = stack.enter_context(serving(model, args.server_cores))
        os.sched_setaffinity(0, cores[:-1] or cores)
        asyncio.run(measure(address, 2))  # warm-up
        print(f"{'':<36} {'/health':^22} {'gap of a stream':^22} {'request of 8 tokens':^22}")
        print(f"{'':<36}" + f" {'p50':>6} {'p99':>7} {'max':>7}" * 3)
        for name in (None, *(each for each in ATTACKS if args.only in each), None):
            with attacked(name, address, cores[-1:]) as said:
                if name is not None:
                    time.sleep(0.3)
                row = asyncio.run(measure(address, args.seconds)).row()
                outcomes = [said.get() for _ in range(said.qsize())]
            if args.json:
                print(json.dumps({"attack": name, "ms": row, "outcomes": outcomes}), flush=True)
                continue
            cells = "".join(f" {value:>{width}.1f}" for value, width in zip(row, (6, 7, 7) * 3, strict=True))
            ending = "" if name is None else f"  {len(outcomes)} x {outcomes[-1] if outcomes else 'not answered yet'}"
            print(f"{name or 'no attack':<36}{cells}{ending}", flush=True)


if __name__ == "__main__":
    main()
