"""What two Ray workers of one thread gain over one process of one thread, and what Ray costs per task.

    python benchmarks/diff_ray.py BASELINE TARGET [--rounds 3] [--detail]

Both measure the same batches; opening and matching the runs is not timed, here and at the workers. Rounds are
interleaved. *cost per task*: wall time of an empty task, from its submission to its result, one at a time and 100 at a
time.
"""

import argparse
import statistics
import time
from collections.abc import Callable

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
        num_tasks, times = workers.num_tasks, list[tuple[float, float]]()
        for _ in range(args.rounds):
            times.append((_seconds(in_one_thread), _seconds(with_ray)))
        alone, spread = map(statistics.median, zip(*times, strict=True))
        print(f"one thread {alone:.2f} s, two workers {spread:.2f} s ({num_tasks} tasks): {alone / spread:.2f}x")
        task, source = ray.remote(measure_batches), ray.put(workers._source)
        one = _seconds(lambda: [ray.get(task.remote(source, 0, ())) for _ in range(100)])
        many = _seconds(lambda: ray.get([task.remote(source, 0, ()) for _ in range(100)]))
        print(f"cost per task: {10 * one:.1f} ms one at a time, {10 * many:.1f} ms of 100 at a time")


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
