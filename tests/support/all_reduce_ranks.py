"""Ranks of the one-shot all-reduce as processes, in Triton's interpreter."""

from typing import Any

import torch
from torch import Tensor


def reduce_all(rank: int, windows: list[Tensor], states: list[Tensor]) -> list[Tensor]:
    """Return the all-reduced ``states``, one call each; ``windows`` is memory shared by all ranks."""
    from tapscope.kernels.triton.all_reduce import all_reduce, new_calls

    addresses = torch.tensor([window.data_ptr() for window in windows])
    calls, give_up = new_calls(torch.device("cpu")), torch.zeros(1, dtype=torch.int32)
    return [all_reduce(each, addresses, rank, calls, give_up) for each in states]


def rank_main(rank: int, windows: list[Tensor], states: list[Tensor], answers: Any) -> None:
    torch.set_num_threads(1)
    answers.put((rank, [total.numpy() for total in reduce_all(rank, windows, states)]))
