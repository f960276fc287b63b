"""TokenLogprob: the log-probability of one token. Torch-free."""

import msgspec


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Log-probability of one token, and of alternatives at the same position."""

    token_id: int
    logprob: float
    """Natural logarithm of the probability."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the most likely tokens, most likely first."""
    chosen: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the tokens in ``token_ids_logprob``, in that order."""
    full: tuple[float, ...] | None = None
    """Log-probability of every token of the vocabulary, with ``full_logprobs``."""

    @property
    def num_values(self) -> int:
        """Number of log-probabilities in this entry."""
        return 1 + len(self.top) + len(self.chosen) + len(self.full or ())
