"""Capture a small tensor-parallel model on CPU ranks, optionally with a bug.

    python examples/08_tensor_parallel.py RUN [--tp N] [--bug bias|all-reduce] [--no-dims]

`bias` adds the bias of layer 1's down projection on every rank before the all-reduce; `all-reduce` omits that
all-reduce.
"""

import argparse
import socket
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch import nn

from tapscope import Dumper
from tapscope.core.observe import RankInfo

WIDTH, HIDDEN, LAYERS = 64, 256, 4


class ColumnParallel(nn.Module):
    """Linear layer sharded over output features: a rank holds one block of weight rows and of the bias."""

    def __init__(self, linear: nn.Linear, rank: int, tp: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.chunk(tp)[rank])
        self.bias = nn.Parameter(linear.bias.chunk(tp)[rank])
        self.tap_dims = {"in[input]": "t h", "out": "t h[tp]", "param[weight]": "o[tp] i"}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.weight, self.bias)


class RowParallel(nn.Module):
    """Linear layer sharded over input features; an all-reduce adds up the ranks' partial sums."""

    def __init__(self, linear: nn.Linear, rank: int, tp: int, bug: str | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.chunk(tp, dim=1)[rank])
        self.bias = nn.Parameter(linear.bias.clone())
        self.bug = bug
        self.tap_dims = {"in[input]": "t h[tp]", "out": "t h # tp:replicated", "param[weight]": "o i[tp]"}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        summand = nn.functional.linear(input, self.weight)
        if self.bug == "bias":
            summand = summand + self.bias
        if dist.is_initialized() and self.bug != "all-reduce":
            dist.all_reduce(summand)
        return summand if self.bug == "bias" else summand + self.bias


class Layer(nn.Module):
    """Pre-norm residual block with an MLP sharded over the ranks."""

    def __init__(self, number: int, rank: int, tp: int, bug: str | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.up = ColumnParallel(up, rank, tp)
        self.down = RowParallel(down, rank, tp, bug if number == 1 else None)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class Model(nn.Module):
    """A stack of layers."""

    def __init__(self, rank: int, tp: int, bug: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)  # every rank draws the same unsharded weights
        self.layers = nn.ModuleList(Layer(number, rank, tp, bug) for number in range(LAYERS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def work(rank: int, port: int, args: argparse.Namespace) -> None:
    """Run the model and its dumper on one rank."""
    torch.set_num_threads(1)
    if args.tp > 1:
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=args.tp)
    mesh, coords = ({}, {}) if args.no_dims else ({"tp": args.tp}, {"tp": rank})
    info = RankInfo(rank=rank, world_size=args.tp, mesh=mesh, coords=coords, model="toy", dtype="float32")
    model = Model(rank, args.tp, args.bug)
    if args.no_dims:
        for module in model.modules():
            vars(module).pop("tap_dims", None)
    hidden = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), Dumper(model, out=args.run, keep="full", info=info):
        model(hidden)
    if args.tp > 1:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--bug", choices=("bias", "all-reduce"))
    parser.add_argument("--no-dims", action="store_true", help="do not declare how tensors are sharded")
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    context = get_context("spawn")
    others = [context.Process(target=work, args=(rank, port, args), daemon=True) for rank in range(1, args.tp)]
    for rank in others:
        rank.start()
    work(0, port, args)
    for rank in others:
        rank.join()
    if any(rank.exitcode for rank in others):
        raise SystemExit("a rank failed")


if __name__ == "__main__":
    main()
