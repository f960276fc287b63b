"""Live views: a run that grows by 100,000 records/s, and many viewers of one run.

    python benchmarks/dashboard_live.py [--rate 100000] [--seconds 8] [--viewers 20] [--records 300000] [--skip viewers]

Lag: the longest time a record is on disk before the view counts it. CPU: the reader thread, as a share of a core.
Viewers: memory of `tapscope web` after one viewer has opened a run's page and its live view, and after many have.
"""

import argparse
import http.client
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from open_run import make

from tapscope.dashboard.live_run import LiveRun

READ_S = 0.5
_SETTLE_S = 3  # time to render requested pages, before memory is measured
WRITER = """
import json, sys, time
path, rate, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
stats = {"count": 4096, "nan": 0, "posinf": 0, "neginf": 0, "zeros": 3, "subnormals": 0}
stats |= {"min": -1.5, "max": 1.5, "absmax": 1.5, "sum": 0.5, "sumsq": 2.25}
line = {"type": "record", "seq": 7, "site": "model.layers.17.mlp.part42:out", "step": 0, "dtype": "bfloat16",
        "shape": [4, 1024], "dims": "t h", "hash": "0" * 32, "bag": "0" * 16, "stats": stats,
        "entry": ["seg-000000.safetensors", 8192, 8192]}
begun, num = time.monotonic(), 0
with open(path, "ab", buffering=0) as file:
    file.write(json.dumps({"type": "event", "kind": "open", "coords": {}, "mesh": {}}).encode() + b"\\n")
    while (now := time.monotonic() - begun) < seconds:
        due = int(now * rate) - num
        step = int(now * 10)
        text = json.dumps(line | {"step": step}).encode() + b"\\n"
        end = json.dumps({"type": "step", "at": "end", "step": step, "dropped": 0}).encode() + b"\\n"
        file.write(text * due + end)
        num += due
        time.sleep(0.01)
print(num)
"""


def live(root: Path, rate: int, seconds: float) -> tuple[float, float, int]:
    """Return (largest lag in seconds, share of a core, records missing from the view at the end)."""
    rank = root / "live" / "rank-00000"
    rank.mkdir(parents=True)
    (root / "live" / "run.json").write_text(json.dumps({"version": 2, "format": "tapscope-run", "world_size": 1}))
    lines = rank / "records.jsonl"
    lines.touch()
    command = [sys.executable, "-c", WRITER, str(lines), str(rate), str(seconds)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    run, lag, used, sizes, begun = LiveRun(root / "live"), 0.0, 0.0, [(time.monotonic(), 0)], time.monotonic()
    while writer.poll() is None:
        time.sleep(READ_S)
        before = time.thread_time()
        view = run.read()
        used += time.thread_time() - before
        now = time.monotonic()
        sizes.append((now, lines.stat().st_size))
        num_read = sizes[-1][1] - view.bytes_unread
        # A record that was on disk at an earlier reading and is not counted yet has waited at least since then.
        waiting = next((at for at, size in sizes if size > num_read), now)
        lag = max(lag, now - waiting)
    took = time.monotonic() - begun
    written = int(writer.communicate()[0])
    return lag + READ_S, used / took, written - run.read().num_records


def resident(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1000


def get(host: str, path: str, cookie: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(host)
    connection.request("GET", path, headers={"Cookie": cookie})
    return connection.getresponse()


def view_run(host: str, cookie: str) -> http.client.HTTPResponse:
    """Send the requests of a browser: list of runs, page of one run, and its live view, whose stream stays open."""
    run_id = json.loads(get(host, "/api/runs", cookie).read())["runs"][0]["id"]
    for path in ("", "/records?step=1", "/series"):
        get(host, f"/api/runs/{run_id}{path}", cookie).read()
    stream = get(host, f"/api/runs/{run_id}/live", cookie)
    while not stream.readline().startswith(b"data:"):
        pass
    return stream


def viewers(root: Path, num_records: int, num_viewers: int) -> tuple[float, float]:
    """Return the server's memory in MB with one viewer, and with many."""
    make(root / "run", num_records)
    command = [sys.executable, "-m", "tapscope", "web", str(root / "run")]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        host, path = re.fullmatch(r"http://([^/]+)(/.*)\s*", server.stdout.readline()).groups()  # type: ignore[union-attr]
        cookie = (get(host, path, "").getheader("set-cookie") or "").partition(";")[0]
        streams = [view_run(host, cookie)]
        time.sleep(_SETTLE_S)
        one = resident(server.pid)
        threads = [
            threading.Thread(target=lambda: streams.append(view_run(host, cookie))) for _ in range(num_viewers - 1)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        time.sleep(_SETTLE_S)
        return one, resident(server.pid)
    finally:
        server.terminate()
        server.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--viewers", type=int, default=20)
    parser.add_argument("--records", type=int, default=300_000)
    parser.add_argument("--skip", action="append", default=[], choices=("live", "viewers"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if "live" not in args.skip:
            lag, share, missing = live(root, args.rate, args.seconds)
            what = f"live at {args.rate:,} records/s"
            print(f"{what}: lag {lag:.1f} s (2 s), {share:.0%} of a core (50 %), {missing:,} unread")
        if "viewers" not in args.skip:
            one, many = viewers(root, args.records, args.viewers)
            what = f"{args.viewers} viewers of {args.records:,} records"
            print(f"{what}: {one:.0f} and {many:.0f} MB, {many / one:.2f} times (1.2)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
