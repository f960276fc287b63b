"""Faults: what comes in through the doors - other versions, random bytes, a second writer."""

import contextlib
import fcntl
import json
import os
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from fault_checks import check_recorded, check_whole
from fault_jobs import Ranks, alone
from fault_list import fault
from jobs import ask, wait_until

from tapscope.core import wire
from tapscope.sources import open_run


def _doors(ranks: Ranks) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ranks.run / "recorder.json").read_text())
    return content


@contextlib.contextmanager
def _dealer(address: str) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(address)
        yield dealer


# ---- another version


@fault("a rank of another wire version", 1, 5)
def other_rank(place: Path, rng: random.Random) -> None:
    with Ranks(place / "run") as ranks:
        ranks.opened().acked(5)
        with _dealer(_doors(ranks)["address"]) as dealer:
            hello = {"tapscope": rng.choice([0, 2, 999, "1", None]), "kind": "join", "rank": 1}
            dealer.send(json.dumps(hello).encode())
            answer = wire.decode(dealer.recv_multipart())
        assert answer.kind == "refused"
        said = f"a peer speaks wire version {hello['tapscope']}; this tapscope speaks {wire.VERSION}"
        assert answer["reason"] == said
        ranks.acked(ranks.mark("acked") + 5)
        ranks.end()
        check_whole(ranks)


@fault("a recorder of another wire version", 2, 6)
def other_recorder(place: Path, rng: random.Random) -> None:
    alone(_meet_other_recorder, str(place / "run"), rng.choice(["says so", "answers so"]))


def _meet_other_recorder(path: str, how: str) -> None:
    from fault_model import Chain, given

    from tapscope.core.errors import RecorderError
    from tapscope.dumper import Dumper

    run, model = Path(path), Chain(2)
    run.mkdir()
    lock = os.open(run / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(f"ipc://{run}.socket")
    version = 999 if how == "says so" else wire.VERSION
    about = {"pid": os.getpid(), "host": socket.gethostname(), "wire": version, "address": f"ipc://{run}.socket"}
    (run / "recorder.json").write_text(json.dumps(about | {"http": None, "live": None, "network": None}))

    done = threading.Event()

    def answer() -> None:
        while not done.is_set():
            if router.poll(timeout=50):
                identity, *_ = router.recv_multipart()
                router.send_multipart([identity, b'{"tapscope":999,"kind":"joined"}'])

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    with pytest.raises(RecorderError, match="wire version 999"):
        Dumper(model, run).open()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model(given(0, 0, 2, 2)).shape == (2, 2)
    done.set()
    thread.join()  # libzmq aborts when a socket is closed while another thread is in it
    router.close(linger=0)


# ---- random bytes


def _junk(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice([0, 1, 7, 64, 3000]))


def _value(rng: random.Random) -> Any:
    return rng.choice([None, -1, 0, 10**30, 1.5, "", "x" * 300, [], [1], [[0] * 7], {}, {"a": 1}, True, "../../x"])


def _message(rng: random.Random) -> list[bytes]:
    """Something that looks like a message, but for its content."""
    kinds = [
        "batch",
        "request",
        "reopen",
        "modules",
        "close",
        "position",
        "answer",
        "trigger",
        "call_count",
        "joined",
        "join",
    ]
    fields = ["rank", "opening", "manifest", "config", "modules", "ring", "n", "payloads", "shared", "sharing_step"]
    fields += ["blocks", "tables", "forget"]
    fields += ["verb", "body", "id", "run", "current_step", "load", "epoch", "problem", "unmatched", "method", "count"]
    header = {"tapscope": wire.VERSION, "kind": rng.choice([*kinds, _value(rng)])}
    header |= {name: _value(rng) for name in rng.sample(fields, rng.randrange(0, 8))}
    frames = [json.dumps(header).encode(), *(_junk(rng) for _ in range(rng.randrange(0, 3)))]
    return [_junk(rng), *frames] if rng.random() < 0.2 else frames


def _pour(family: int, where: Any, rng: random.Random, first: bytes) -> None:
    """Raw bytes into a socket, whatever the other side does."""
    with contextlib.suppress(OSError), socket.socket(family) as door:
        door.settimeout(0.3)
        door.connect(where)
        door.sendall(first + _junk(rng))
        if rng.random() < 0.5:
            door.recv(100)


def _tcp(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


@fault("random bytes on every door", 1, 20)
def random_bytes(place: Path, rng: random.Random) -> None:
    settings = {"control": "127.0.0.1:0", "network": "127.0.0.1"}
    with Ranks(place / "run", 2, settings=settings) as ranks:
        ranks.opened().acked(5)
        doors = _doors(ranks)
        with _dealer(doors["address"]) as inside, _dealer(doors["network"]["address"]) as outside:
            for _ in range(60):
                inside.send_multipart(rng.choice([[_junk(rng)], _message(rng), _message(rng)]))
                with contextlib.suppress(zmq.Again):  # a door that wants keys ends the connection whenever it likes
                    outside.send_multipart(_message(rng), zmq.NOBLOCK)
            for _ in range(8):
                greeting = rng.choice([b"", b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL"])
                for name in ("address", "live"):
                    _pour(socket.AF_UNIX, doors[name].removeprefix("ipc://"), rng, greeting)
                _pour(socket.AF_INET, _tcp(doors["network"]["address"]), rng, greeting)
                request = rng.choice([b"", b"POST /dumper/configure HTTP/1.1\r\n"])
                _pour(socket.AF_INET, _tcp(doors["http"]), rng, request)
            status, state = ask(f"http://{doors['http']}/dumper/state")
            assert (status, [each["status"] for each in state["ranks"]]) == (200, ["connected"] * 2), state
        for rank in (0, 1):
            ranks.acked(ranks.mark("acked", rank) + 5, rank)
        ranks.end()
        with open_run(ranks.run) as run:
            account = run.ledger()
            assert run.ranks == (0, 1)
            assert (account.lost, account.failed, account.dropped, account.lost_ranks) == (0, 0, 0, [])
            assert run.problems == []
        check_recorded(ranks, repair=False)


# ---- a second writer


@fault("two processes with the same rank and run", 1, 20)
def two_writers(place: Path, rng: random.Random) -> None:
    (place / "other").mkdir()
    with Ranks(place / "run") as ranks, Ranks(place / "run", side=place / "other") as others:
        wait_until(lambda: bool(ranks.marks()) and bool(others.marks()), "both know")
        opened = [each for each in (ranks, others) if each.mark("open")]
        refused = [each.mark("refused") for each in (ranks, others) if each.mark("refused")]
        assert len(opened) == len(refused) == 1, refused
        assert "rank 0 of" in refused[0], refused
        assert "already has a writer" in refused[0], refused
        opened[0].acked(10)
        for each in (ranks, others):
            each.ask_to_end()
        ranks.end()
        others.end()
        check_whole(opened[0])
