"""Proposers for tests of speculative decoding; contains no tests."""

import random
from collections.abc import Mapping, Sequence

from tapscope.engine import LLM
from tapscope.engine.requests.drafts import Drafts
from tapscope.engine.requests.request import Request
from tapscope.engine.speculative.speculator import Speculator


class OracleProposer:
    """Proposes the known output of each prompt, with some wrong tokens."""

    def __init__(self, outputs: Mapping[tuple[int, ...], Sequence[int]], accuracy: float, vocab_size: int) -> None:
        self._outputs, self._accuracy, self._vocab_size = outputs, accuracy, vocab_size
        self._random = random.Random(0)

    def propose(self, requests: Sequence[tuple[Request, int]]) -> Mapping[str, Drafts]:
        return {request.id: Drafts(tuple(self._guess(request, count))) for request, count in requests if count}

    def _guess(self, request: Request, count: int) -> list[int]:
        known = self._outputs.get(request.prompt_ids, ())[request.num_generated :][:count]
        tokens = list(known) + [0] * (count - len(known))
        return [t if self._random.random() < self._accuracy else (t + 1) % self._vocab_size for t in tokens]

    def forget(self, request_id: str) -> None:
        pass


def speculate(llm: LLM, proposer: OracleProposer, num_drafts: int) -> Speculator:
    """Make the engine of ``llm`` verify the drafts of ``proposer``."""
    llm.engine.speculator = Speculator(proposer, num_drafts)
    return llm.engine.speculator
