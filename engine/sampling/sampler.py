"""Sampler: samples the tokens of a step on rank 0. A token depends only on its own request, never on the batch."""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tapscope.core.errors import UsageError
from tapscope.core.formatting import short
from tapscope.engine.params.sampling_params import SamplingParams, derive_seed
from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import NO_TOKEN
from tapscope.engine.sampling.device_copy import to_device
from tapscope.engine.sampling.filters import keep_min_p, keep_top_k, keep_top_p
from tapscope.engine.sampling.gumbel import gumbel
from tapscope.engine.sampling.penalties import TokenCounts, apply_penalties
from tapscope.engine.sampling.sampling_batch import SamplingBatch
from tapscope.engine.structured_output.grammar import Grammars
from tapscope.kernels import triton

_MANY_ROWS = 8
"""Number of rows from which the Triton argmax is faster than torch's, which has less launch overhead on the host."""
_TOKEN_IDS = ("logit_bias", "allowed_token_ids", "stop_token_ids", "token_ids_logprob")
"""Parameters whose token ids must be within the vocabulary."""


class Sampler:
    """Sampler of one engine; a request without a seed gets a seed derived from ``seed`` and its order of arrival."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Collection[int],
        seed: int,
        device: torch.device,
        grammars: Grammars | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos = tuple(eos_token_ids)
        self._seed = seed
        self._device = device
        self._grammars = grammars
        self._num_entered = 0
        self._counts = TokenCounts(vocab_size, device)
        self._requests: Sequence[Request] = ()
        """Requests of :attr:`_batch`."""
        self._batch = SamplingBatch((), device)

    @torch.no_grad()
    def compile_kernels(self, dtype: torch.dtype) -> None:
        """Compile the GPU kernels that sample from logits of ``dtype``, so that no request waits for compilation.

        Logits after penalties and biases are float32, so that dtype is covered too.
        """
        with triton.compiled_ahead(self._device):
            self._launch_all_variants(dtype)
        self._launch_all_variants(dtype)  # loads the compiled kernels

    def _launch_all_variants(self, dtype: torch.dtype) -> None:
        """Launch every variant of the kernels that sample from logits of ``dtype``."""
        kernel = device_draw(self._device)
        if kernel is None:
            return
        number, index = torch.ones(1, device=self._device), torch.ones(1, dtype=torch.int64, device=self._device)
        every = {"top_k": index.int(), "top_p": number / 2, "min_p": number / 2}
        words = torch.full((1, -(-self._vocab_size // 32)), -1, dtype=torch.int32, device=self._device)
        for logits_type in {dtype, torch.float32}:
            logits = torch.zeros(1, self._vocab_size, dtype=logits_type, device=self._device)
            greedy(logits.expand(_MANY_ROWS, -1).contiguous())
            for mask in (None, words):
                for filters in ({}, every):
                    kernel(logits, number, seeds=index, positions=index, mask=mask, **filters)

    def add_request(self, request: Request) -> None:
        """Set the seed and the grammar state of a new request.

        Raises UsageError for token ids beyond the vocabulary, for n > 1, and for an invalid constraint.
        """
        params = request.params
        if params.n > 1:
            raise UsageError(f"request {request.id!r} asks for n={params.n}; submit a request for each params.child(i)")
        last = self._vocab_size - 1
        token_ids = {name: getattr(params, name) or () for name in _TOKEN_IDS}
        token_ids["bad_words_ids"] = tuple(chain.from_iterable(params.bad_words_ids))
        for name, tokens in token_ids.items():
            wrong = next((token for token in tokens if token > last), None)
            if wrong is not None:
                raise UsageError(f"invalid token id {wrong} in {name}: expected 0 to {last}")
        self._check_allowed(params)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self._vocab_size:
                raise UsageError(f"{name}={count}: the vocabulary has {self._vocab_size} tokens")
        if params.constraint is not None:
            if request.forced_token_ids:
                raise UsageError(f"request {request.id!r} has forced_token_ids and a constraint; use only one of them")
            if self._grammars is None:
                raise UsageError("the checkpoint has no tokenizer.json; a constrained output needs one")
            request.constraint = self._grammars.start(params)
        request.seed = derive_seed(self._seed, self._num_entered) if params.seed is None else params.seed
        self._num_entered += 1

    def _check_allowed(self, params: SamplingParams) -> None:
        """Raise UsageError if other masks could exclude all of ``allowed_token_ids``."""
        if params.allowed_token_ids is None:
            return
        ends = _end_tokens(params, self._eos) if params.min_new_tokens else set()
        if len(set(params.allowed_token_ids) - ends) <= len(params.bad_words_ids):
            by = "bad_words_ids" if params.bad_words_ids else "min_new_tokens, which masks end tokens,"
            raise UsageError(f"allowed_token_ids={short(params.allowed_token_ids)}: {by} could mask all of them")

    def remove_request(self, request: Request) -> None:
        """Remove a finished request; safe to call more than once."""
        self._counts.forget(request)

    @torch.no_grad()
    def draw(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        positions: Sequence[int] | None = None,
        drafts: Sequence[Sequence[int]] = (),
    ) -> tuple[Tensor, Tensor]:
        """Sample each request's next token from logits [rows, vocab]; return tokens [rows] int64 and scores.

        ``positions`` are those of the sampled tokens; None: the position after each request's last token. ``drafts``
        are draft tokens between each request's last token and its row's sampled token, if any.

        The scores [rows, vocab] float32 are the logits after penalties, masks, temperature and filters; if every row is
        a plain argmax, the scores are the logits themselves. A row whose drafts leave a grammar without a next token
        gets NO_TOKEN.
        """
        kernel = device_draw(logits.device)
        batch = self._batch_of(requests)
        if batch.is_plain:
            return greedy(logits), logits
        if kernel is None:
            noisy, scores, dead = self.noisy_scores(logits, requests, positions, drafts)
            tokens = noisy.argmax(-1)
        else:
            drafts = drafts or [()] * len(requests)
            mask, dead = self._grammar_mask(requests, drafts, logits)
            seeds, places = self._seeds_and_positions(requests, positions)
            scores = self._process(logits, requests, drafts, batch)
            tokens, scores = kernel(scores, seeds=seeds, positions=places, mask=mask, **batch.filters)
        if dead:
            tokens.index_fill_(0, to_device(dead, tokens.device), NO_TOKEN)
        return tokens, scores

    @torch.no_grad()
    def noisy_scores(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        positions: Sequence[int] | None = None,
        drafts: Sequence[Sequence[int]] = (),
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Return the scores with noise, the scores [rows, vocab], and the rows without a next token.

        The argmax of the scores with noise is the token that :meth:`draw` returns.
        """
        batch = self._batch_of(requests)
        if batch.is_plain:
            return logits, logits, []
        drafts = drafts or [()] * len(requests)
        scores, dead = self._mask_grammars(logits.float(), requests, drafts)
        scores = self._process(scores, requests, drafts, batch)
        scores = batch.drawn.apply(scores, lambda rows, temperature: rows / temperature.unsqueeze(1))
        for rows, keep in ((batch.top_k, keep_top_k), (batch.top_p, keep_top_p), (batch.min_p, keep_min_p)):
            scores = rows.apply(scores, keep)
        noisy = batch.drawn.apply(scores, lambda rows, _: rows + self._noise(requests, positions, batch))
        return noisy, scores, dead

    def may_mask(self, requests: Sequence[Request]) -> bool:
        """Return whether a bias, penalty, mask or grammar may exclude a token of any of ``requests``."""
        return self._batch_of(requests).may_mask

    def _batch_of(self, requests: Sequence[Request]) -> SamplingBatch:
        if requests != self._requests:  # by identity
            self._requests = requests
            params = [request.params for request in requests]
            if not self._batch.is_of(params):
                self._batch = SamplingBatch(params, self._device)
        return self._batch

    def _process(
        self, scores: Tensor, requests: Sequence[Request], drafts: Sequence[Sequence[int]], batch: SamplingBatch
    ) -> Tensor:
        """Apply bias, penalties and all masks but a grammar's to the scores, in the order of transformers' processors.

        Returns a new float32 tensor, or ``scores`` itself if there is no change.
        """
        if not batch.changes_logits:
            return scores
        scores = scores.float()
        if batch.bias is not None:
            rows, tokens, values = batch.bias
            scores = scores.index_put((rows, tokens), values, accumulate=True)
        if batch.penalised.index:
            index = batch.penalised.index
            counts, seen = self._counts.rows([requests[row] for row in index], [drafts[row] for row in index])
            scores = batch.penalised.apply(scores, lambda rows, *by: apply_penalties(rows, counts, seen, *by))
        if batch.limited:
            scores = self._keep_allowed(scores, batch)
        masked = list(self._end_masks(requests, drafts))
        if batch.has_bad_words:
            masked += _bad_word_masks(requests, drafts)
        if masked:
            places = to_device(masked, scores.device).unbind(1)
            scores = scores.index_put(places, scores.new_full((), -torch.inf))
        return scores

    def _keep_allowed(self, scores: Tensor, batch: SamplingBatch) -> Tensor:
        """Mask every token outside ``allowed_token_ids``, in rows with that parameter."""
        kept = torch.full((len(batch.limited), scores.shape[1]), -torch.inf, device=scores.device)
        for row, index in enumerate(batch.limited):
            tokens = to_device(batch.params[index].allowed_token_ids or (), scores.device)
            kept[row, tokens] = scores[index, tokens]
        return scores.index_copy(0, to_device(batch.limited, scores.device), kept)

    def _end_masks(self, requests: Sequence[Request], drafts: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
        """Yield (row, token) for the end tokens of rows that have not yet generated ``min_new_tokens``."""
        for row, (request, ahead) in enumerate(zip(requests, drafts, strict=True)):
            if request.num_generated + len(ahead) < request.params.min_new_tokens:
                yield from ((row, token) for token in _end_tokens(request.params, self._eos))

    def _grammar_words(
        self, requests: Sequence[Request], drafts: Sequence[Sequence[int]]
    ) -> tuple[list[int], NDArray[np.int32], list[int]]:
        """Return the rows restricted by grammars, their masks [rows, words] with one bit per token, and the dead rows.

        A dead row has no allowed token after its drafts; it stays unmasked.
        """
        each = zip(requests, drafts, strict=True)
        constraints = [(row, r.constraint, ahead) for row, (r, ahead) in enumerate(each) if r.constraint is not None]
        masks = [(row, constraint.mask_after(ahead)) for row, constraint, ahead in constraints]
        given = [(row, mask) for row, mask in masks if mask is not None]
        dead = [row for row, mask in masks if mask is None]
        words = np.stack([mask for _, mask in given]) if given else np.zeros((0, 0), dtype=np.int32)
        return [row for row, _ in given], words, dead

    def _grammar_mask(
        self, requests: Sequence[Request], drafts: Sequence[Sequence[int]], logits: Tensor
    ) -> tuple[Tensor | None, list[int]]:
        """Return grammar masks [rows, vocab / 32] int32, one bit per token, and the rows without a next token.

        The masks are None without grammars.
        """
        rows, words, dead = self._grammar_words(requests, drafts)
        if not rows:
            return None, dead
        mask = np.full((len(requests), -(-logits.shape[1] // 32)), -1, dtype=np.int32)
        mask[rows] = words[:, : mask.shape[1]]
        return to_device(mask, logits.device), dead

    def _mask_grammars(
        self, scores: Tensor, requests: Sequence[Request], drafts: Sequence[Sequence[int]]
    ) -> tuple[Tensor, list[int]]:
        """Mask tokens that a grammar does not allow next; return the scores and the rows without a next token."""
        rows, packed, dead = self._grammar_words(requests, drafts)
        if not rows:
            return scores, dead
        words = to_device(packed, scores.device)
        bits = (words.unsqueeze(-1) >> torch.arange(32, device=scores.device, dtype=torch.int32)) & 1
        allowed = bits.flatten(1)[:, : scores.shape[1]].bool()
        index = to_device(rows, scores.device)
        return scores.index_copy(0, index, scores[index].masked_fill(~allowed, -torch.inf)), dead

    def _seeds_and_positions(
        self, requests: Sequence[Request], positions: Sequence[int] | None
    ) -> tuple[Tensor, Tensor]:
        """Return seeds and positions on the device, [rows] int64 each."""
        count = len(requests)
        both = np.zeros((2, count + count % 2), dtype=np.int64)  # aligns the second row to 16 bytes, too
        both[0, :count].view(np.uint64)[:] = [request.seed & 0xFFFFFFFFFFFFFFFF for request in requests]
        both[1, :count] = _positions(requests, positions)
        seeds, places = to_device(both, self._device)[:, :count].unbind()
        return seeds, places

    def _noise(self, requests: Sequence[Request], positions: Sequence[int] | None, batch: SamplingBatch) -> Tensor:
        each = _positions(requests, positions)
        rows = batch.drawn.index
        seeds, drawn = [requests[row].seed for row in rows], [each[row] for row in rows]
        return gumbel(seeds, drawn, self._vocab_size, self._device)


def _positions(requests: Sequence[Request], positions: Sequence[int] | None) -> Sequence[int]:
    return [len(request.tokens) for request in requests] if positions is None else positions


@functools.lru_cache(maxsize=64)
def device_draw(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return :func:`tapscope.kernels.triton.sampling.draw` on a GPU that Triton supports; otherwise None."""
    if device.type != "cuda" or triton.why_not(device) is not None:
        return None
    from tapscope.kernels.triton import sampling  # imports Triton

    return sampling.draw


def greedy(logits: Tensor) -> Tensor:
    """Return the argmax of each row of [rows, vocab], int64."""
    if len(logits) < _MANY_ROWS or device_draw(logits.device) is None:
        return logits.argmax(-1)
    from tapscope.kernels.triton import sampling

    return sampling.greedy(logits)


def _bad_word_masks(requests: Sequence[Request], drafts: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yield (row, token) for tokens that would complete one of ``bad_words_ids`` begun by generated tokens."""
    for row, (request, ahead) in enumerate(zip(requests, drafts, strict=True)):
        for *begin, last in request.params.bad_words_ids:
            first = max(len(request.prompt_ids), len(request.tokens) - len(begin))
            known = [*request.tokens[first:], *ahead]
            if known[max(0, len(known) - len(begin)) :] == begin:
                yield row, last


def _end_tokens(params: SamplingParams, eos: Iterable[int]) -> set[int]:
    """Return the tokens that end the request; with a grammar only stop tokens, because it decides on EOS itself."""
    if params.constraint is not None:
        return set(params.stop_token_ids)
    return {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
