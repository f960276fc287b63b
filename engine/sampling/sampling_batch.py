"""SamplingBatch: the sampling parameters of a step's rows, as tensors."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.sampling.device_copy import to_device


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """Rows that one sampling parameter applies to."""

    index: tuple[int, ...]
    every: bool
    """Whether the parameter applies to all rows."""
    values: tuple[Tensor, ...]
    """Parameter values of the selected rows, [rows] each."""

    def apply(self, scores: Tensor, change: Callable[..., Tensor]) -> Tensor:
        """Return ``scores`` [all rows, vocab] with the selected rows replaced by ``change(rows, *values)``."""
        if not self.index:
            return scores
        if self.every:
            return change(scores, *self.values)
        index = to_device(self.index, scores.device)
        return scores.index_copy(0, index, change(scores[index], *self.values))


class SamplingBatch:
    """Sampling parameters of a step's rows; rebuilt only when the rows change."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        self.params = tuple(params)
        self._device = device
        self.penalised = self._rows(
            lambda p: p.has_penalty, "repetition_penalty", "presence_penalty", "frequency_penalty"
        )
        self.drawn = self._rows(lambda p: not p.is_greedy, "temperature")
        self.top_k = self._rows(lambda p: not p.is_greedy and p.top_k > 0, "top_k")
        self.top_p = self._rows(lambda p: not p.is_greedy and p.top_p < 1, "top_p")
        self.min_p = self._rows(lambda p: not p.is_greedy and p.min_p > 0, "min_p")
        self.bias = self._bias()
        self.limited = tuple(row for row, p in enumerate(self.params) if p.allowed_token_ids is not None)
        """Rows with ``allowed_token_ids``."""
        self.has_bad_words = any(p.bad_words_ids for p in self.params)
        self.changes_logits = any(p.changes_logits for p in self.params)
        self.may_mask = self.changes_logits or any(p.constraint is not None for p in self.params)
        """Whether a token of any row may be excluded."""
        self.is_plain = all(p.is_plain for p in self.params)
        """Whether every row is a plain argmax."""

    @functools.cached_property
    def filters(self) -> dict[str, Tensor | None]:
        """Temperature, top-k, top-p and min-p of every row, for :func:`tapscope.kernels.triton.sampling.draw`."""
        temperature = torch.zeros(len(self.params), device=self._device)
        temperature.index_copy_(0, to_device(self.drawn.index, self._device, torch.int64), self.drawn.values[0].float())
        top_k, top_p = self._every(self.top_k, torch.int32, 0), self._every(self.top_p, torch.float32, 1)
        min_p = self._every(self.min_p, torch.float32, 0)
        if min_p is None and (top_k is not None or top_p is not None):  # fewer kernel variants to compile
            min_p = torch.zeros_like(temperature)
        return {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}

    def _every(self, rows: SelectedRows, dtype: torch.dtype, other: float) -> Tensor | None:
        """Return one parameter for every row, ``other`` where it does not apply; None if it applies to no row."""
        if not rows.index:
            return None
        values = torch.full((len(self.params),), other, dtype=dtype, device=self._device)
        return values.index_copy_(0, to_device(rows.index, self._device), rows.values[0].to(dtype))

    def is_of(self, params: Sequence[SamplingParams]) -> bool:
        """Return whether the batch was built from ``params``, compared by identity."""
        return len(params) == len(self.params) and all(a is b for a, b in zip(params, self.params, strict=True))

    def _rows(self, applies: Callable[[SamplingParams], bool], *names: str) -> SelectedRows:
        index = tuple(row for row, params in enumerate(self.params) if applies(params))
        values = (to_device([getattr(self.params[row], n) for row in index], self._device) for n in names)
        return SelectedRows(index, len(index) == len(self.params), tuple(values))

    def _bias(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return rows, token ids and values of all logit biases; None without biases."""
        entries = [(row, token, bias) for row, p in enumerate(self.params) for token, bias in p.logit_bias.items()]
        if not entries:
            return None
        rows, tokens, values = zip(*entries, strict=True)
        return (
            to_device(rows, self._device),
            to_device(tokens, self._device),
            to_device(values, self._device, torch.float32),
        )
