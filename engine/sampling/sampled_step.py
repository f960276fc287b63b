"""SampledStep: samples the tokens of one step and records the log-probabilities that its requests ask for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import ScheduledRequest, StepPlan
from tapscope.engine.requests.token_logprob import TokenLogprob
from tapscope.engine.sampling.device_copy import to_device
from tapscope.engine.sampling.sampler import Sampler, greedy

cuda: Any = torch.cuda  # parts of it have no type hints
_ROWS = 64  # rows converted to float32 at a time, to bound the memory of a long prompt


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    """Log-probabilities to compute from one row of scores."""

    row: int
    token: int
    """Token id whose log-probability is computed."""
    num_top: int
    chosen: tuple[int, ...] = ()
    """Additional token ids."""
    full: bool = False


def token_logprobs(scores: Tensor, wanted: Sequence[LogprobRequest]) -> Iterator[TokenLogprob]:
    """Yield one result per item of ``wanted``, in order, from logits [rows, vocab] of any dtype.

    log_softmax is computed in float32.
    """
    for start in range(0, len(wanted), _ROWS):
        yield from _chunk_logprobs(scores, wanted[start : start + _ROWS])


def _chunk_logprobs(scores: Tensor, wanted: Sequence[LogprobRequest]) -> Iterator[TokenLogprob]:
    device = scores.device
    rows = scores[torch.tensor([item.row for item in wanted], device=device)]
    values = rows.float().log_softmax(-1)
    tokens = torch.tensor([item.token for item in wanted], device=device)
    chosen = values.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
    top = values.topk(max(item.num_top for item in wanted), dim=-1)
    likely, ids = top.values.tolist(), top.indices.tolist()
    for i, item in enumerate(wanted):
        yield TokenLogprob(
            token_id=item.token,
            logprob=chosen[i],
            top=tuple(zip(ids[i][: item.num_top], likely[i][: item.num_top], strict=True)),
            chosen=tuple(zip(item.chosen, values[i, list(item.chosen)].tolist(), strict=True)) if item.chosen else (),
            full=tuple(values[i].tolist()) if item.full else None,
        )


@dataclass(frozen=True, slots=True)
class NanCheck:
    """Pending check for NaN in the logits that requests' tokens were sampled from."""

    requests: Sequence[Request]
    flags: Tensor
    """[requests] bool on the host: whether the request's logits have NaN."""
    copied: Any = None
    """torch.cuda.Event of the copy of ``flags`` to the host; None if the flags are already valid."""

    def found(self, *, wait: bool) -> list[Request] | None:
        """Return the requests with NaN; None while the flags are still being copied, unless ``wait``."""
        if self.copied is not None and not self.copied.query():
            if not wait:
                return None
            self.copied.synchronize()
        return [request for request, is_nan in zip(self.requests, self.flags.tolist(), strict=True) if is_nan]


class SampledStep:
    """Sampling of one step on rank 0: call with the logits, then :meth:`record_logprobs` once tokens are appended."""

    def __init__(self, sampler: Sampler, plan: StepPlan, requests: Sequence[Request]) -> None:
        """``requests``: one per scheduled request of ``plan``."""
        self._sampler, self._plan, self._scheduled = sampler, plan, list(zip(plan.scheduled, requests, strict=True))
        self._requests = list(requests)
        if not plan.is_decode:
            self._requests = [request for item, request in self._scheduled for _ in range(item.num_sampled)]
        self._logits = self._raw = self._scores = torch.empty(0)
        self._is_nan: Tensor | None = None
        """Whether the logit of each sampled token is NaN; valid on the host once the tokens are. None in most steps on
        a GPU, see :meth:`check_nan`."""

    def __call__(self, logits: Tensor) -> Tensor:
        """Sample one token int64 per row of logits [logit rows, vocab]; rows that are not sampled get the argmax."""
        self._logits = logits
        rows = self._plan.sampled_logits
        index = to_device(rows, logits.device, torch.int64) if len(rows) < len(logits) else None
        self._raw = logits if index is None else logits[index]
        # A plain argmax depends on neither positions nor drafts
        scheduled = () if self._plan.greedy else self._plan.scheduled
        each = [(item, row) for item in scheduled for row in _sampled_rows(item)]
        drafts = [item.drafts_up_to(row) for item, row in each]
        positions = [item.row_positions[row] + 1 for item, row in each]
        tokens, self._scores = self._sampler.draw(self._raw, self._requests, positions, drafts)
        has_prompt = self._plan.phase in ("prefill", "mixed")
        if not tokens.is_cuda or has_prompt or self._sampler.may_mask(self._requests):
            is_nan = self._raw.gather(1, tokens.clamp(min=0).unsqueeze(1)).squeeze(1).isnan()
            self._is_nan = torch.empty(is_nan.shape, dtype=torch.bool, pin_memory=is_nan.is_cuda)
            self._is_nan.copy_(is_nan, non_blocking=True)
        return tokens if index is None else greedy(logits).index_copy(0, index, tokens)

    def check_nan(self, tokens: Sequence[int]) -> "NanCheck | None":
        """Start a check for NaN in the logits of sampled rows, whose ``tokens`` are on the host; None if not needed.

        The sampler picks the first NaN of a row, so a row has NaN if the logit of its token is NaN. That flag is copied
        with the tokens, except in pure decode steps on a GPU without masks. In these steps, only rows whose token is 0
        are checked, because a row full of NaN gives token 0. NaN in a part of the vocabulary is then found only in
        steps with prompts. The host does not wait for the result: the next step is already running, and token 0 may be
        frequent ("!" in the vocabularies of GPT-2 and Qwen).
        """
        if self._is_nan is None and 0 not in tokens:
            return None
        rows = [row for row, each in enumerate(self._requests) if not (each.has_nan or each.finish_reason)]
        if self._is_nan is not None:
            return NanCheck([self._requests[row] for row in rows], self._is_nan[rows]) if rows else None
        suspects = [row for row in rows if tokens[row] == 0]
        if not suspects:
            return None
        is_nan = self._raw[to_device(suspects, self._raw.device, torch.int64), 0].isnan()
        flags = torch.empty(is_nan.shape, dtype=torch.bool, pin_memory=is_nan.is_cuda)
        flags.copy_(is_nan, non_blocking=True)
        copied = None
        if is_nan.is_cuda:
            copied = cuda.Event()
            copied.record()
        return NanCheck([self._requests[row] for row in suspects], flags, copied)

    def record_logprobs(self) -> None:
        """Append log-probabilities to the requests that ask for them; call after their tokens were appended."""
        if not any(request.wants_logprobs for _, request in self._scheduled):
            return
        due = list(self._due_rows())
        for mode, scores in (("raw", self._raw), ("processed", self._scores)):
            rows = [(row, r, token) for row, r, token in due if r.params.logprobs_mode == mode]
            wanted = [
                LogprobRequest(row, token, r.params.logprobs or 0, r.params.token_ids_logprob, r.params.full_logprobs)
                for row, r, token in rows
            ]
            for (_, request, _), logprob in zip(rows, token_logprobs(scores, wanted), strict=True):
                request.logprobs.append(logprob)
        self._record_prompt_logprobs()

    def _due_rows(self) -> Iterator[tuple[int, Request, int]]:
        """Yield (row of scores, request, token) for each appended token that has no log-probability yet."""
        row = 0
        for item, request in self._scheduled:
            if not item.samples:
                continue
            if request.params.wants_logprobs:
                rows = (0, *(1 + draft for draft in request.accepted_drafts))
                new = request.tokens[len(request.prompt_ids) + len(request.logprobs) :]
                for i, token in zip(rows, new, strict=False):
                    yield row + i, request, token
            row += item.num_sampled

    def _record_prompt_logprobs(self) -> None:
        """Append prompt log-probabilities, skipping positions recomputed after a preemption."""
        row = 0
        for item, request in self._scheduled:
            if (num_top := request.params.prompt_logprobs) is not None:
                first = item.position + len(item.tokens) - item.num_logits + 1  # position predicted by the first row
                known = max(1, len(request.prompt_logprobs))
                wanted = [
                    LogprobRequest(row + i, request.prompt_ids[first + i], num_top, request.params.token_ids_logprob)
                    for i in range(item.num_logits)
                    if known <= first + i < len(request.prompt_ids)
                ]
                request.prompt_logprobs = request.prompt_logprobs or [None]
                request.prompt_logprobs += token_logprobs(self._logits, wanted)
            row += item.num_logits


def _sampled_rows(item: ScheduledRequest) -> range:
    """Return the rows of the request that are sampled."""
    return range(len(item.tokens) - item.num_sampled, len(item.tokens))
