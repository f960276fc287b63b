"""TokenLogprob: the log-probability of one token. Torch-free."""

import msgspec


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Log-probability of one token and of the most likely ones at its position."""

    token_id: int
    logprob: float
    """Natural logarithm."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), most likely first."""
    chosen: tuple[tuple[int, float], ...] = ()
    """The same for the tokens in ``token_ids_logprob``, in that order."""
    full: tuple[float, ...] | None = None
    """Of every token of the vocabulary, with ``full_logprobs``."""

    @property
    def num_values(self) -> int:
        """Number of log-probabilities."""
        return 1 + len(self.top) + len(self.chosen) + len(self.full or ())
