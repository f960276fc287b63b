"""The shared-memory ring, and the queue that gives its places out."""

import os
import random
import subprocess
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapscope.core.observe import StepInfo
from tapscope.dumper.pipeline import outbox
from tapscope.dumper.pipeline.outbox import BATCH_RECORDS
from tapscope.dumper.pipeline.record_batch import RecordBatch
from tapscope.dumper.pipeline.send_queue import SendQueue
from tapscope.dumper.records.buffer_pool import BufferPool
from tapscope.dumper.records.firing import Firing
from tapscope.dumper.records.inflight_record import InflightRecord
from tapscope.dumper.records.payload_slot import PayloadSlot
from tapscope.dumper.records.record_layout import NO_LAYOUT
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.selection.site_decision import SiteDecision
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.dumper.transport import shm_ring as rings
from tapscope.dumper.transport.shm_ring import ALIGNMENT, MIN_BYTES, ShmRing, ShmRingError, ShmRingView


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(10, 300))
def test_shm_ring_places_never_overlap_whatever_order_they_are_freed_in(seed: int, num_moves: int) -> None:
    ring = ShmRing(MIN_BYTES)
    ring.unlink()
    rng = random.Random(seed)
    live: dict[int, int] = {}
    for _ in range(num_moves):
        if live and rng.random() < 0.45:
            offset = rng.choice(list(live))
            del live[offset]
            ring.free(offset)
            continue
        nbytes = rng.choice([0, 1, 63, 64, 65, 10_000, 300_000, MIN_BYTES])
        offset = ring.reserve(nbytes)
        if offset is None:
            assert live or nbytes > MIN_BYTES
            continue
        assert offset % ALIGNMENT == 0
        assert offset + nbytes <= ring.nbytes
        assert all(offset + nbytes <= o or o + n <= offset for o, n in live.items() if n and nbytes)
        assert offset not in live
        live[offset] = nbytes
    for offset in live:
        ring.free(offset)
    assert ring.reserve(MIN_BYTES) == 0  # all of it is free again


def test_shm_ring_round_trip_and_unlinked_name() -> None:
    ring = ShmRing(MIN_BYTES)
    assert oct(ring.path.stat().st_mode)[-3:] == "600"
    view = ShmRingView(str(ring.path), ring.nbytes)
    assert not ring.path.exists()
    offset = ring.reserve(5)
    assert offset is not None
    ring.memory[offset : offset + 5] = b"hello"
    assert bytes(view.view(offset, 5)) == b"hello"
    for place in ((-1, 5), (ring.nbytes - 4, 5), (0, -1)):
        with pytest.raises(ShmRingError, match="outside the ring"):
            view.view(*place)


def test_shm_ring_ring_that_is_not_as_described_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "tapscope-x"
    other.write_bytes(b"x")
    with pytest.raises(ShmRingError, match="not a tapscope ring"):
        ShmRingView(str(other), 1)
    ring = ShmRing(MIN_BYTES)
    with pytest.raises(ShmRingError, match="not the ring"):
        ShmRingView(str(ring.path), ring.nbytes * 2)
    ring.unlink()
    with pytest.raises(ShmRingError, match="cannot be mapped"):
        ShmRingView(str(ring.path), ring.nbytes)


def test_shm_ring_missing_or_small_shared_memory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ShmRingError, match="too few"):
        ShmRing(1000)
    with pytest.raises(ShmRingError, match="no .* bytes of shared memory"):
        ShmRing(1 << 60)
    assert not list(Path("/dev/shm").glob(f"tapscope-{os.getpid()}-*"))
    monkeypatch.setattr(rings, "_SHARED_MEMORY", tmp_path / "missing")
    with pytest.raises(ShmRingError, match="No such file"):
        ShmRing(MIN_BYTES)


def test_shm_ring_rings_of_the_dead_are_swept_and_those_of_the_living_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rings, "_SHARED_MEMORY", tmp_path)
    dead = subprocess.Popen(["true"])
    dead.wait()
    made = {name: tmp_path / name for name in (f"tapscope-{dead.pid}-a", f"tapscope-{os.getpid()}-b", "tapscope-x-c")}
    fresh = tmp_path / f"tapscope-{dead.pid}-d"
    for path in (*made.values(), fresh):
        path.write_bytes(b"x")
    for path in made.values():
        os.utime(path, (0, 0))
    ring = ShmRing(MIN_BYTES)
    ring.unlink()
    assert {path.name for path in tmp_path.iterdir()} == {f"tapscope-{os.getpid()}-b", "tapscope-x-c", fresh.name}


def pending(slot: PayloadSlot | None) -> InflightRecord:
    stamp = Firing(OpenStep(StepInfo(step=0), 0), 0)
    return InflightRecord(SitePort(":out", SiteDecision(), {}), stamp, 0, NO_LAYOUT, b'"hash":""', 0, 1, slot)


def make_queue(limit: int, timeout_s: float | None = 0.05) -> SendQueue:
    ring = ShmRing(MIN_BYTES)
    ring.unlink()
    return SendQueue(limit, timeout_s, ring)


def test_shm_ring_payloads_overflow_to_buffers_within_the_limit() -> None:
    queue = make_queue(2 * MIN_BYTES)
    first = queue.reserve(MIN_BYTES)
    second = queue.reserve(MIN_BYTES // 2)
    assert first is not None
    assert second is not None
    assert (first.offset, second.offset) == (0, -1)
    assert first.buffer is None
    assert second.buffer is not None
    assert queue.reserve(MIN_BYTES) is None
    assert queue.in_flight_bytes == MIN_BYTES + MIN_BYTES // 2
    queue.cancel(first)
    third = queue.reserve(MIN_BYTES)
    assert third is not None
    assert third.offset == 0
    for slot in (second, third):
        queue.cancel(slot)
    assert queue.in_flight_bytes == 0
    assert queue.pool.held_bytes <= MIN_BYTES


def test_shm_ring_one_value_larger_than_everything_passes_alone() -> None:
    queue = make_queue(2 * MIN_BYTES)
    slot = queue.reserve(10 * MIN_BYTES)
    assert slot is not None
    assert queue.reserve(1) is None
    queue.cancel(slot)
    assert queue.reserve(1) is not None


def test_shm_ring_what_is_on_its_way_when_the_recorder_is_lost_is_counted() -> None:
    queue = make_queue(2 * MIN_BYTES)
    for _ in range(9):
        assert queue.put(pending(None))
    queue.flush()
    batch = RecordBatch()
    for item in queue.take(0):
        assert isinstance(item, InflightRecord)
        batch.add(item)
    queue.sent(1)
    assert queue.put(pending(None))
    queue.acknowledged(batch)
    assert queue.put(pending(None))
    assert queue.abandon("it died")
    assert not queue.abandon("it is still dead")
    assert not queue.put(pending(None)), "its caller counts it"
    queue.put_released([pending(None)])
    assert queue.num_abandoned == 3


def test_shm_ring_full_send_queue_waits_until_something_is_acknowledged() -> None:
    queue = make_queue(2 * MIN_BYTES, timeout_s=20.0)
    slot = queue.reserve(2 * MIN_BYTES - 600)
    assert slot is not None
    assert queue.put(pending(slot))

    def recorder() -> None:
        items = queue.take(10.0)
        batch = RecordBatch()
        for item in items:
            assert isinstance(item, InflightRecord)
            batch.add(item)
        queue.sent(1)
        queue.acknowledged(batch)

    thread = threading.Thread(target=recorder)
    thread.start()
    assert queue.reserve(MIN_BYTES) is not None  # waits for the thread, far less than 20 s
    thread.join()
    assert queue.in_flight_bytes == MIN_BYTES


def test_shm_ring_who_sleeps_is_called_for_what_can_be_sent_and_for_nothing_else() -> None:
    rung: list[int] = []
    queue = SendQueue(10**9, None, None)
    queue.nudge = lambda: rung.append(turn)
    turn = 1
    assert queue.sleep(9) == 9
    queue.append(b"{}\n")
    for _ in range(BATCH_RECORDS - 1):
        assert queue.put(pending(None))
    assert not rung  # it may wait for more
    assert queue.put(pending(None))
    assert rung == [1]
    turn = 2
    assert not queue.sleep(9)  # there is something to send now
    assert len(queue.take(0)) == BATCH_RECORDS
    queue.append(b"{}\n")
    turn = 3
    assert 0 < queue.sleep(9) <= 9
    queue.flush()
    queue.awake()
    queue.flush()
    assert rung == [1, 3]


def test_shm_ring_steps_that_end_soon_after_another_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(outbox.time, "monotonic", lambda: now)
    rung: list[float] = []
    queue = SendQueue(10**9, None, None)
    queue.nudge = lambda: rung.append(now)
    assert queue.sleep(9) == 9
    queue.put(pending(None))
    queue.flush_soon()
    assert rung == [100.0]  # the first immediately
    queue.awake()
    assert len(queue.take(0)) == 1
    for _ in range(3):
        assert 0 < queue.sleep(9) < 0.1  # it wakes by itself
        queue.put(pending(None))
        queue.flush_soon()
        assert queue.take(0) == []
    assert rung == [100.0]
    now = 101.0
    assert queue.sleep(9) == 0
    assert len(queue.take(0)) == 3


def test_shm_ring_what_is_abandoned_admits_nothing_and_blocks_nobody() -> None:
    queue = make_queue(2 * MIN_BYTES, timeout_s=60.0)
    slot = queue.reserve(100)
    assert slot is not None
    assert queue.abandon("the recorder died")
    assert not queue.abandon("again")
    assert queue.reserve(1) is None
    assert not queue.put(pending(slot))
    assert not queue.drained(60.0)


def test_shm_ring_buffers_that_is_unused_make_room() -> None:
    pool = BufferPool(1000)
    for nbytes in range(100, 400, 10):
        pool.release(pool.acquire(nbytes))
    assert 0 < pool.held_bytes <= 1000
    again = pool.acquire(390)
    pool.release(again)
    assert pool.acquire(390) is again
    large = pool.acquire(5000)
    assert pool.held_bytes == 5390  # what is lent is bounded by who asks; nothing idle is kept in addition to it
    pool.release(large)
    assert pool.held_bytes <= 1000
