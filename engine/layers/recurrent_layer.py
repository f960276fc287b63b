"""RecurrentLayer: base class of layers with a recurrent state, whose value after each step is a site.

A state is the window of a short convolution and, in most layers, a matrix. A subclass calls ``convolve`` and ``scan``,
and defines how the matrix changes: ``scan_row`` for one row, ``scan_rows`` for several rows of one request.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tapscope.engine.distributed.sharding import Shard
from tapscope.engine.kv_cache.state_cache import StepStates
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.probe import STATES, TapProbe, is_watched
from tapscope.engine.layers.short_conv import ConvWeight, causal_conv, windows_after


@dataclass(slots=True, eq=False)
class RequestGroup:
    """Requests that are computed together, with their states: several with one row each, or one with several rows."""

    requests: slice
    rows: slice
    num_drafts: int
    """Number of trailing rows that are drafts of speculative decoding; the state after each draft is stored."""
    window: Tensor
    """[requests, channels, positions]; with drafts [1 + drafts, ...], see :meth:`.StepStates.write`."""
    matrix: Tensor
    """[requests, heads, key, value]; with drafts [1 + drafts, ...]."""


class RecurrentLayer(nn.Module):
    """Base class; ``tap[conv_state]`` and ``tap[recurrent_state]`` have one row per request."""

    layer: int
    is_batch_invariant = False
    """Whether each request is computed alone and row by row, so that its bits do not depend on chunking or on other
    requests."""

    def add_state_taps(self, channels: dict[str, Shard], tp_size: int, matrix: str | None) -> None:
        """Create the probes of the layer's states.

        ``channels``: parts of the convolution window [requests, channels, positions]. ``matrix``: dims of the matrix
        state after the requests' axis; None for a layer that has only a window.
        """
        if len(channels) == 1:
            axis = "h[tp]"
        else:
            sizes = {
                name: f"{part.total}x{tp_size}" if part.is_whole and tp_size > 1 else str(part.total)
                for name, part in channels.items()
            }
            axis = f"({'+'.join(f'{name}={size}' for name, size in sizes.items())})[tp]"
        self.conv_state = TapProbe("conv_state", f"t {axis} positions", STATES)
        self.recurrent_state = None if matrix is None else TapProbe("recurrent_state", f"t {matrix}", STATES)

    def convolve(self, rows: Tensor, conv: ConvWeight, cache: StepCache) -> tuple[Tensor, list[RequestGroup]]:
        """Convolve the rows of all requests, [tokens, channels] -> the same shape, and return the request groups.

        The groups hold the windows after the step and the matrices before the step, for :meth:`scan` or :meth:`store`.
        """
        outputs, groups = [], self._groups(cache)
        for group in groups:
            own = rows[group.rows]
            batch = own.view(len(group.window), -1, rows.shape[1])
            output, window = causal_conv(batch, group.window, conv.weight[:, 0], conv.bias)
            if group.num_drafts:
                window = windows_after(own, group.window[0])[-1 - group.num_drafts :]
            group.window = window
            outputs.append(output.flatten(0, 1))
        return torch.cat(outputs), groups

    def scan(self, parts: tuple[Tensor, ...], groups: list[RequestGroup], cache: StepCache) -> Tensor:
        """Run the recurrence of all requests, parts [tokens, ...] -> [tokens, ...], and store the new states."""
        outputs = []
        for group in groups:
            own, matrix = tuple(part[group.rows] for part in parts), group.matrix
            num_rows = len(own[0])
            if num_rows == len(matrix):
                output, group.matrix = self.scan_row(own, matrix)
            elif self.is_batch_invariant or group.num_drafts:
                output, group.matrix = self._scan_in_turn(own, matrix, num_states=1 + group.num_drafts)
            else:
                output, after = self.scan_rows(own, matrix[0])
                group.matrix = after.unsqueeze(0)
            outputs.append(output)
        self.store(groups, cache)
        return torch.cat(outputs)

    def scan_row(self, parts: tuple[Tensor, ...], matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Compute one row of each of n requests: parts and matrices [n, ...] -> output [n, ...] and new matrices."""
        raise NotImplementedError(f"{type(self).__name__} has no recurrence")

    def scan_rows(self, parts: tuple[Tensor, ...], matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Compute n rows of one request: parts [n, ...] and its matrix -> output [n, ...] and the new matrix."""
        raise NotImplementedError(f"{type(self).__name__} has no recurrence")

    def store(self, groups: list[RequestGroup], cache: StepCache) -> None:
        """Store the states after the step in the cache, and pass them to their taps."""
        assert cache.states is not None, "the cache has no recurrent states"
        for group in groups:
            cache.states.write(self.layer, group.requests, group.window, group.matrix)
        self._show_states(cache.states)

    def _groups(self, cache: StepCache) -> list[RequestGroup]:
        """Return one group of all requests with one row, and one group per other request; states precede the step."""
        states = cache.states
        assert states is not None, "the cache has no recurrent states"
        single = 0 if self.is_batch_invariant else cache.num_single
        groups = []
        if single:
            requests = slice(0, single)
            groups.append(RequestGroup(requests, requests, 0, *states.read(self.layer, requests)))
        for segment in cache.segments[single:]:
            requests = slice(segment.index, segment.index + 1)
            rows = slice(segment.slot, segment.slot + segment.count)
            num_drafts = len(states.draft_slots.get(segment.index, ()))
            groups.append(RequestGroup(requests, rows, num_drafts, *states.read(self.layer, requests)))
        return groups

    def _scan_in_turn(self, parts: tuple[Tensor, ...], matrix: Tensor, num_states: int) -> tuple[Tensor, Tensor]:
        """Scan one request row by row -> outputs [n, ...], and the matrices after the last ``num_states`` rows."""
        outputs, last = [], deque[Tensor](maxlen=num_states)
        for row in range(len(parts[0])):
            output, matrix = self.scan_row(tuple(part[row : row + 1] for part in parts), matrix)
            outputs.append(output)
            last.append(matrix)
        return torch.cat(outputs), torch.cat(tuple(last))

    def _show_states(self, states: StepStates) -> None:
        """Pass the states after the step to their taps; without taps, nothing is read."""
        probes = [probe for probe in (self.conv_state, self.recurrent_state) if probe is not None]
        if not any(map(is_watched, probes)):
            return
        for probe, value in zip(probes, states.written(self.layer), strict=False):
            probe(value)
