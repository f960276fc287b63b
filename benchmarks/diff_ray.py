"""Speedup of two single-threaded Ray workers over one single-threaded process, and Ray's overhead per task.

    python benchmarks/diff_ray.py BASELINE TARGET [--rounds 3] [--detail]

Both measure the same batches; opening and matching the runs is excluded, locally and in the workers. Rounds are
interleaved. *cost per task*: wall time of an empty task from submission to result, one at a time and 100 at a time.

Wall times are meaningless if other processes use the cores; CPU times are not: *predicted* is CPU time of one thread /
(CPU time of the caller + half of the workers' CPU time), as if nothing in the caller overlapped with the workers. It
excludes the wait for the last task. The CPU time of Ray's services is reported separately.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from tapscope.comparator.options.options import CompareOptions
from tapscope.comparator.pair_analysis.pool import batches_of
from tapscope.comparator.pipeline.match_runs import match_runs
from tapscope.comparator.pipeline.measure_pairs import analyzer_of
from tapscope.comparator.pipeline.open_runs import open_runs
from tapscope.comparator.pipeline.ray_workers import RayWorkers, measure_batches
from tapscope.comparator.runs.corrupt_records import CorruptRecords
from tapscope.sources import open_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baseline")
    parser.add_argument("target")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--detail", action="store_true", help="measure in detail: more work per byte")
    args = parser.parse_args()
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    with open_run(args.baseline) as baseline, open_run(args.target) as target:
        corrupt = CorruptRecords(baseline), CorruptRecords(target)
        matched = match_runs(open_runs(baseline, target, CompareOptions(detail=args.detail), corrupt))
        batches, workers = list(batches_of(matched.pairs)), RayWorkers(matched)

        def with_ray() -> None:
            assert sum(1 for _ in workers.measure(analyzer_of(matched), batches)) == len(batches)

        def in_one_thread() -> None:
            analyzer = analyzer_of(matched)
            for batch, _ in batches:
                analyzer.packed(batch)

        with_ray()
        num_tasks, times, cpu = workers.num_tasks, list[tuple[float, float]](), list[tuple[float, ...]]()
        for _ in range(args.rounds):
            began = time.process_time()
            first = _seconds(in_one_thread)
            before = _cpu_times()
            times.append((first, _seconds(with_ray)))
            spent = [after - one for one, after in zip(before, _cpu_times(), strict=True)]
            cpu.append((before[0] - began, *spent))
        alone, spread = map(statistics.median, zip(*times, strict=True))
        print(f"one thread {alone:.2f} s, two workers {spread:.2f} s ({num_tasks} tasks): {alone / spread:.2f}x")
        one, caller, both, services = map(statistics.median, zip(*cpu, strict=True))
        print(
            f"CPU time: one thread {one:.2f} s; caller {caller:.2f}, workers {both:.2f}, Ray {services:.2f} s", end="; "
        )
        print(f"predicted {one / (caller + both / 2):.2f}x, load {os.getloadavg()[0]:.1f}")
        task, source = ray.remote(measure_batches), ray.put(workers._source)
        single = _seconds(lambda: [ray.get(task.remote(source, 0, ())) for _ in range(100)])
        many = _seconds(lambda: ray.get([task.remote(source, 0, ()) for _ in range(100)]))
        print(f"cost per task: {10 * single:.1f} ms one at a time, {10 * many:.1f} ms of 100 at a time")


def _cpu_times() -> tuple[float, float, float]:
    """Return the CPU seconds of this process, of its Ray workers, and of its Ray services."""
    parents, workers, services = dict[int, int](), 0, 0
    ticks, names = dict[int, int](), dict[int, bytes]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            names[int(folder.name)] = (folder / "cmdline").read_bytes()
        except OSError:  # the process has ended
            continue
        parents[int(folder.name)], ticks[int(folder.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    for pid, spent in ticks.items():
        parent = parents[pid]
        while parent in parents and parent != os.getpid():
            parent = parents[parent]
        if parent == os.getpid():
            is_worker = names.get(pid, b"").startswith(b"ray::")
            workers, services = workers + spent * is_worker, services + spent * (not is_worker)
    per_second = os.sysconf("SC_CLK_TCK")
    return time.process_time(), workers / per_second, services / per_second


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
