"""Who comes to a recorder and who leaves it: what it does when nobody is there."""

import json
import subprocess
import sys
from pathlib import Path

from jobs import LIMIT_S, wait_until

from tapscope.core import wire
from tapscope.core.wire import Message
from tapscope.dumper.transport.network import Endpoint


def test_recorder_whose_first_rank_was_refused_ends_soon(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    command = [sys.executable, "-m", "tapscope.dumper.recorder", str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps({"segment_bytes": 1 << 20}).encode())
        process.stdin.close()
        wait_until((run / "recorder.json").exists, "the recorder is up")
        found = json.loads((run / "recorder.json").read_text())
        with Endpoint.of(found).dealer() as dealer:
            for frames in ([b"no message at all"], wire.encode(Message("join", {"rank": 0}))):
                dealer.send_multipart(frames)
                assert dealer.poll(timeout=10_000)
                answer = wire.decode(dealer.recv_multipart())
                assert answer.kind == "refused"
                assert process.poll() is None
        assert "lacks the field 'opening'" in answer["reason"]
        assert process.wait(LIMIT_S) == 0
    assert not (run / "recorder.json").exists()
