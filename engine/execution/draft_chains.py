"""DraftChains: draft chains of a draft head, computed on the device right after the preceding verification step.

The host does not wait: the device computes how many drafts were accepted, starts the head's rows after the accepted
ones, and stores each draft where the next forward reads it. One CUDA graph per number of requests does all of this. It
finds the last accepted row and samples the first draft after it. For each further draft it advances positions, slots
and lengths in the static buffers, and computes one row of the head per request.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tapscope.core.observe import GraphObserver
from tapscope.engine.execution.decode_graphs import DecodeGraphs, cuda
from tapscope.engine.execution.input_buffers import InputBuffers, StepInputs
from tapscope.engine.execution.packed_vectors import PackedVectors
from tapscope.engine.layers.grouped_linear import in_one_launch
from tapscope.engine.models.draft_head import DraftHead
from tapscope.engine.requests.step_plan import StepPlan
from tapscope.engine.sampling.sampler import greedy


@dataclass(frozen=True, slots=True)
class LaunchedDrafts:
    """Drafts that the device is computing."""

    _tokens: Tensor
    """[drafts per request, requests including padding] int64 on the host."""
    _count: int
    _copied: torch.cuda.Event | None

    def wait(self) -> list[list[int]]:
        """Return the drafts of each request, once the device has computed them."""
        if self._copied is not None:
            self._copied.synchronize()
        drafts: list[list[int]] = self._tokens[:, : self._count].t().tolist()
        return drafts


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Rows of the draft head in a step that verifies drafts."""

    sampled: Tensor
    """[rows] int64: tokens that the target samples from these rows, which the head reads."""
    outputs: Tensor
    """[rows, hidden]: input of the output head."""
    states: Tensor
    """[rows, hidden]: hidden state that the next row reads."""


class DraftChains:
    """Draft chains of one head, whose CUDA graphs use ``buffers``."""

    def __init__(
        self,
        model: DraftHead,
        buffers: InputBuffers,
        *,
        last_tokens: Tensor,
        max_requests: int,
        max_rows: int,
        num_drafts: int,
        dtype: torch.dtype,
        numerics: Callable[[], AbstractContextManager[Any]] = nullcontext,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """``last_tokens``: the target's buffer, which receives the drafts; ``max_rows``: rows of a step that verifies
        drafts; ``num_drafts``: maximum number of drafts per request in that step.
        """
        self._model, self._buffers, self._num_drafts = model, buffers, num_drafts
        self._device = device = buffers.page_tables[0].device
        self.sizes = [1 << i for i in range(max(0, max_requests - 1).bit_length())] + [max_requests]
        """Batch sizes of the graphs; a step with fewer requests is padded."""
        size, rows, is_cuda = model.config.hidden_size, max_rows + num_drafts, device.type == "cuda"
        self._vectors = PackedVectors(3, max(max_requests, rows), torch.int64, device)
        """First row and number of drafts of each request, and the token ids of the rows, in the verifying step."""
        self._sampled = torch.zeros(rows, dtype=torch.int64, device=device)
        """Tokens sampled from the rows of the verifying step."""
        self._outputs, self._states = (torch.zeros(rows, size, dtype=dtype, device=device) for _ in range(2))
        """Output-head input and next-row hidden state of each of the head's rows."""
        self._last_states = torch.zeros(max_requests, size, dtype=dtype, device=device)
        """Hidden state that the next row of each request reads."""
        self._last_drafts = last_tokens[1:]
        """[drafts, rows of the page tables]: the drafts being verified, then overwritten by the next ones."""
        self._hosts = [torch.zeros(num_drafts * max_requests, dtype=torch.int64, pin_memory=is_cuda) for _ in range(3)]
        """Host buffers for drafts in flight: drafts that a step verifies, and the drafts that follow that
        step."""
        self._graphs = _ChainGraphs(self._chain, model, buffers, self.sizes, numerics, stream=stream)

    def capture(self) -> None:
        """Capture the graphs."""
        self._graphs.capture()

    def release(self) -> None:
        """Destroy the graphs."""
        self._graphs.release()

    def size_of(self, num_requests: int) -> int | None:
        """Return the batch size of the graph that drafts for ``num_requests`` requests; None if it was not captured."""
        size = next((size for size in self.sizes if size >= num_requests), None)
        return size if size is not None and self._graphs.has(size) else None

    def launch(
        self, plan: StepPlan, spans: Sequence[tuple[int, int]], ids: Sequence[int], rows: HeadRows
    ) -> LaunchedDrafts:
        """Launch the drafts of each request of ``plan``, which has one row per request.

        Each row is at the position after the request's first row in the verifying step. ``spans``: each request's first
        row and number of drafts in that step; ``ids``: token ids of all rows of that step. The result must be read
        before the launch after the next.
        """
        count, size = len(spans), self.size_of(len(spans))
        assert size is not None, "the caller has asked for the size"
        for kept, given in ((self._sampled, rows.sampled), (self._outputs, rows.outputs), (self._states, rows.states)):
            kept[: len(given)].copy_(given)
        padding = [0] * (size - count)
        first, num_drafts = zip(*spans, strict=True)
        self._vectors.load(((*first, *padding), (*num_drafts, *padding), ids))
        self._buffers.fill(plan, size)
        drafts = self._graphs.replay_size(size)
        host = self._hosts[0][: drafts.numel()].view(drafts.shape)
        self._hosts.append(self._hosts.pop(0))
        host.copy_(drafts, non_blocking=True)
        if not drafts.is_cuda:
            return LaunchedDrafts(host, count, None)
        copied = cuda.Event()
        copied.record()
        return LaunchedDrafts(host, count, copied)

    def _chain(self, size: int) -> Tensor:
        """Compute the drafts [drafts, size] of each request, and store them for the target."""
        drafts = [self._begin(size)]
        while len(drafts) < self._num_drafts:
            drafts.append(self._advance(size, self._buffers.single_rows(size)))
        chain = torch.stack(drafts)
        self._last_drafts.index_copy_(1, self._buffers.rows_of(size), chain)
        return chain

    def _begin(self, size: int) -> Tensor:
        """Compute the first draft [size] of each request, after its last accepted row."""
        first, num_drafts, ids = self._vectors.views([size, size, len(self._sampled)])
        each = torch.arange(self._num_drafts, device=first.device)
        rows = first.unsqueeze(1) + each
        drafts = ids[rows + 1]
        drafts = torch.where(drafts < 0, self._last_drafts[:, self._buffers.rows_of(size)].t(), drafts)
        is_right = (self._sampled[rows] == drafts) & (each < num_drafts.unsqueeze(1))
        accepted = is_right.long().cumprod(1).sum(1)
        last = first + accepted
        self._buffers.advance(size, accepted)
        return self._draw(size, self._outputs[last], self._states[last])

    def _advance(self, size: int, inputs: StepInputs) -> Tensor:
        """Compute the next draft [size] of each request, after the draft computed last."""
        output = self._model.decoder(
            inputs.input_ids,
            position_ids=inputs.position_ids,
            past_key_values=inputs.cache,
            hidden_states=self._last_states[:size],
        )
        self._buffers.advance(size, 1)
        states = self._model.last_hidden_state
        assert states is not None, "a head has one after each step"
        return self._draw(size, output.last_hidden_state, states)

    def _draw(self, size: int, outputs: Tensor, states: Tensor) -> Tensor:
        """Sample a draft [size] from ``outputs``, and set the next rows' inputs; ``states`` are [size, hidden]."""
        tokens = greedy(self._model.head(outputs))
        self._buffers.set_tokens(tokens, size)
        self._last_states[:size].copy_(states)
        return tokens


class _ChainGraphs(DecodeGraphs):
    """CUDA graphs of a function of the number of requests, whose inputs are in static memory."""

    def __init__(self, compute: Callable[[int], Tensor], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._compute, self._holders = compute, []

    def has(self, size: int) -> bool:
        """Return whether there is a graph for ``size`` requests."""
        return size in self._graphs

    def replay_size(self, size: int) -> Tensor:
        """Return the function's result for ``size`` requests, valid until the next call."""
        captured = self._graphs[size]
        captured.graph.replay()
        return captured.hidden

    def _decode(self, inputs: StepInputs, observer: GraphObserver | None) -> Tensor:
        with self._numerics(), in_one_launch():
            return self._compute(len(inputs.input_ids))
