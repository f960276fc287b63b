"""TokenCounts: token counts of each request's prompt and output, and the penalties computed from these counts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tapscope.engine.requests.request import Request
from tapscope.engine.sampling.device_copy import to_device


class TokenCounts:
    """Token counts on the device, with one row per live request with penalties.

    Counts depend only on ``Request.tokens``: each call adds the tokens since the last call. They are therefore
    independent of chunking, prefix hits and preemption.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._rows: dict[str, int] = {}
        self._counted: dict[str, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, requests: Sequence[Request], drafts: Sequence[Sequence[int]] = ()) -> tuple[Tensor, Tensor]:
        """Return counts in the output [requests, vocab] int32, and presence in prompt or output [requests, vocab] bool.

        ``drafts``: tokens of each request that are counted as output, without being stored.
        """
        for request in requests:
            if request.id not in self._rows:
                self._enter(request)
        self._catch_up(requests)
        index = to_device([self._rows[request.id] for request in requests], self._output.device)
        counts, seen = self._output[index], self._seen[index]
        ahead = [(row, token) for row, tokens in enumerate(drafts) for token in tokens]
        if ahead:
            places = to_device(ahead, index.device).unbind(1)
            counts.index_put_(places, counts.new_ones(()), accumulate=True)
            seen.index_put_(places, seen.new_ones(()))
        return counts, seen

    def forget(self, request: Request) -> None:
        """Remove a finished request; a no-op if the request has no row."""
        row = self._rows.pop(request.id, None)
        if row is not None:
            self._free.append(row)
            del self._counted[request.id]

    def _enter(self, request: Request) -> None:
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._output[row] = 0
        self._seen[row] = False
        self._seen[row].index_fill_(0, to_device(request.prompt_ids, self._seen.device), True)
        self._rows[request.id] = row
        self._counted[request.id] = len(request.prompt_ids)

    def _catch_up(self, requests: Sequence[Request]) -> None:
        """Count the tokens added to ``requests`` since the last call."""
        rows, tokens = [], []
        for request in requests:
            new = request.tokens[self._counted[request.id] :]
            rows += [self._rows[request.id]] * len(new)
            tokens += new
            self._counted[request.id] = len(request.tokens)
        if tokens:
            index = to_device([rows, tokens], self._output.device).unbind(0)
            self._output.index_put_(index, self._output.new_ones(len(tokens)), accumulate=True)
            self._seen.index_put_(index, self._seen.new_ones(()))

    def _grow(self) -> None:
        """Double the number of rows, to at least 4."""
        old = len(self._output)
        added = max(4, old)
        self._output = torch.cat([self._output, self._output.new_zeros(added, self._output.shape[1])])
        self._seen = torch.cat([self._seen, self._seen.new_zeros(added, self._seen.shape[1])])
        self._free += range(old + added - 1, old - 1, -1)


def apply_penalties(
    scores: Tensor, counts: Tensor, seen: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Return scores [rows, vocab] after penalties [rows] float32, as a new tensor.

    Repetition (transformers' RepetitionPenaltyLogitsProcessor): the score of a seen token is divided by the penalty if
    positive, otherwise multiplied. Then OpenAI's: score - count * frequency - (count > 0) * presence, over the output.
    """
    factor = repetition.unsqueeze(1)
    repeated = torch.where(scores < 0, scores * factor, scores / factor)
    scores = torch.where(seen, repeated, scores)
    return scores - counts * frequency.unsqueeze(1) - (counts > 0) * presence.unsqueeze(1)
