"""All-reduce of tensor-parallel ranks in a CUDA graph: NCCL, and the kernel that reads peer GPU memory directly.

    python benchmarks/all_reduce.py [--tp 2] [--hidden 4096] [--rows 1 32 256]

Prints the microseconds of one bf16 all-reduce of [rows, hidden], in a graph of 64: median of 20 replays on rank 0.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from torch import Tensor, multiprocessing

from tapscope.engine.distributed.tensor_parallel import TensorParallel

COUNT = 64
REPLAYS = 20


def captured(tp: TensorParallel, states: Tensor) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        tp.all_reduce(states)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(COUNT):
            tp.all_reduce(states)
    return graph


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    taken = []
    for _ in range(3 + REPLAYS):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        taken.append(1e3 * first.elapsed_time(last) / COUNT)
    return statistics.median(taken[3:])


def rank_main(rank: int, folder: Path, args: argparse.Namespace) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    for is_custom in (False, True):
        path = folder / f"store-{is_custom}"
        tp = TensorParallel.connect(path, rank, args.tp, 60.0, device, is_watched=True, custom_all_reduce=is_custom)
        tp.capture_collectives()
        found = []
        for rows in args.rows:
            graph = captured(tp, torch.randn(rows, args.hidden, device=device, dtype=torch.bfloat16))
            found.append(f"{rows} rows {microseconds(graph):6.2f}")
            graph.reset()
        if rank == 0:
            name = "one kernel" if is_custom and tp.has_custom_all_reduce else "NCCL"
            print(f"{name:10} µs: {'; '.join(found)}", flush=True)
        tp.disconnect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256, 512])
    args = parser.parse_args()
    print(f"{args.tp} x {torch.cuda.get_device_name()}, torch {torch.__version__}, bf16 [rows, {args.hidden}]")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(rank_main, (Path(folder), args), nprocs=args.tp)


if __name__ == "__main__":
    main()
