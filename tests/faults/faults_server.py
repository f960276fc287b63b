"""Faults: what clients do to the served engine."""

import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from checkpoints import make_llama
from engine_http import Served, raw_post
from fault_list import fault

from tapscope.engine import LLM

CLIENTS = 100
_WAYS = ("unsent", "unread", "begun", "reset")


@fault("100 clients that hang up on the engine", 1, 10)
def hung_up(place: Path, rng: random.Random) -> None:
    path = make_llama(place / "model", seed=1)
    with LLM(path, check_invariants=True) as llm:  # the books are checked after every step
        served = Served(llm, [])
        try:
            ways = [rng.choice(_WAYS) for _ in range(CLIENTS)]
            with ThreadPoolExecutor(16) as pool:
                list(pool.map(lambda way: _hang_up(served, way), ways))
            _await_idle(served)
            answered = served.generate(input_ids=[5], sampling_params={"max_new_tokens": 4, "ignore_eos": True})
            assert len(answered.raise_for_status().json()["output_ids"]) == 4
            info = served.info()
            assert info["kv_pages_used"] == 0, info  # what is left is the prefix cache's alone
        finally:
            served.close()


def _hang_up(served: Served, way: str) -> None:
    params = {"max_new_tokens": 240, "ignore_eos": True}
    request = raw_post({"input_ids": [5, 6], "sampling_params": params, "stream": way == "begun"})
    url = served.client.base_url
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(request[:-20] if way == "unsent" else request)
        if way == "begun":
            connection.recv(1000)
        if way == "reset":  # closing then sends RST
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def _await_idle(served: Served) -> None:
    deadline = time.monotonic() + 60
    while (info := served.info())["num_running"] + info["num_waiting"]:
        assert time.monotonic() < deadline, info
        time.sleep(0.05)
