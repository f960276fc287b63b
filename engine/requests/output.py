"""Output: the result of one step for one request; OutputAssembler: accumulates outputs. Torch-free."""

from math import prod
from typing import Any, TypedDict

import msgspec
from msgspec.structs import replace

from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.requests.drafts import NOTHING_DRAFTED, DraftCounts
from tapscope.engine.requests.per_token_outputs import HiddenStates, PerTokenOutputs, RoutedExperts, joined
from tapscope.engine.requests.request import Generation
from tapscope.engine.requests.token_logprob import TokenLogprob
from tapscope.engine.text.detokenizer import Detokenizer
from tapscope.engine.text.tokenizer import Tokenizer


class OutputValues(TypedDict, total=False):
    """Wire format of :meth:`Output.plain`, typed so that msgspec decodes a million logprobs without Python calls."""

    request: str
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...]
    prompt_head: int
    finish_reason: str
    matched: int | str
    reason: str
    embedding: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    queue_time_s: float
    draft_counts: DraftCounts
    dp_rank: int
    routed_experts: tuple[tuple[int, ...], str]
    hidden_states: tuple[tuple[int, ...], str]


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens and values of one request."""

    request: str
    """Request id."""
    token_ids: tuple[int, ...] = ()
    """New tokens, including an end token."""
    text: str = ""
    """New text; held back while a stop string or a character may be incomplete. Set by runners, not by Engine."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One entry for each of :attr:`token_ids`; None unless requested."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One entry for each prompt token, in the request's first output; None unless requested. The entry of the first
    token, which is not predicted, is None."""
    prompt_head: int | None = None
    """First token of the prompt; only set with :attr:`prompt_logprobs`."""
    finish_reason: str | None = None
    """``stop``, ``length`` or ``abort``; None while the request is unfinished."""
    matched: int | str | None = None
    """The token or stop string that ended the request."""
    reason: str = ""
    """One sentence that explains why the request was aborted."""
    embedding: tuple[float, ...] | None = None
    """Embedding of the prompt, normalized to norm 1; None unless requested."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Number of leading prompt tokens served from the prefix cache."""
    queue_time_s: float | None = None
    """Seconds that the request waited to run, in its first output; None in later outputs."""
    draft_counts: DraftCounts = NOTHING_DRAFTED
    dp_rank: int = 0
    """DP replica that computed the output."""
    routed_experts: RoutedExperts | None = None
    """Expert ids of the positions computed since the last output; None unless requested."""
    hidden_states: HiddenStates | None = None
    """Hidden states of the positions computed since the last output; None unless requested."""

    @property
    def num_values(self) -> int:
        """Number of log-probabilities and hidden state elements."""
        hidden = 0 if self.hidden_states is None else prod(self.hidden_states.shape)
        return hidden + sum(item.num_values for item in (*(self.logprobs or ()), *(self.prompt_logprobs or ())) if item)

    def plain(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, for msgspec to encode."""
        values: dict[str, Any] = {"request": self.request}
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value != default:
                values[name] = value
        for name in _PER_TOKEN:
            value = getattr(self, name)
            if value is not None:
                values[name] = [value.shape, value.text]
        return values

    @classmethod
    def build(cls, values: OutputValues) -> "Output":
        """Build an output from decoded :class:`OutputValues`; the inverse of :meth:`plain`."""
        given: dict[str, Any] = dict(values)
        for name in _PER_TOKEN.keys() & given.keys():
            given[name] = _PER_TOKEN[name].from_base64(*given[name])
        return cls(**given)

    def followed_by(self, later: "Output") -> "Output":
        """Merge this output and a ``later`` one of the same request."""
        return replace(
            later,
            token_ids=self.token_ids + later.token_ids,
            text=self.text + later.text,
            logprobs=None if later.logprobs is None else (self.logprobs or ()) + later.logprobs,
            prompt_logprobs=self.prompt_logprobs or later.prompt_logprobs,
            prompt_head=later.prompt_head if self.prompt_head is None else self.prompt_head,
            routed_experts=joined(self.routed_experts, later.routed_experts),
            hidden_states=joined(self.hidden_states, later.hidden_states),
            embedding=self.embedding or later.embedding,
            queue_time_s=later.queue_time_s if self.queue_time_s is None else self.queue_time_s,
        )

    def generation(self, prompt_ids: tuple[int, ...], *, has_text: bool) -> Generation:
        """Convert this output, which must be the merge of all outputs of a request, to the request's result."""
        return Generation(
            request=self.request,
            prompt_ids=prompt_ids,
            token_ids=self.token_ids,
            text=self.text if has_text else None,
            finish_reason=self.finish_reason or "abort",
            matched=self.matched,
            reason=self.reason,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            cached_tokens=self.cached_tokens,
            routed_experts=self.routed_experts,
            hidden_states=self.hidden_states,
            dp_rank=self.dp_rank,
        )


_PER_TOKEN: dict[str, type[PerTokenOutputs]] = {"routed_experts": RoutedExperts, "hidden_states": HiddenStates}
_DEFAULTS: dict[str, Any] = {
    each.name: each.default for each in msgspec.structs.fields(Output) if each.name not in ("request", *_PER_TOKEN)
}


class OutputAssembler:
    """Detokenizer and accumulator for the outputs of one live request."""

    def __init__(
        self, request: str, prompt_ids: tuple[int, ...], tokenizer: Tokenizer | None, params: SamplingParams
    ) -> None:
        self.request, self.prompt_ids = request, prompt_ids
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, params, prompt_ids)
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self._routed: RoutedExperts | None = None
        self._hidden: HiddenStates | None = None
        self._last = Output(request=request)

    def add(self, output: Output) -> Output:
        """Add an output and return it with its text.

        If a stop string ends the text, the returned output is final, and the caller must abort the request.
        """
        output = self._with_text(output)
        if output.prompt_logprobs is not None:
            output = replace(output, prompt_head=self.prompt_ids[0])
        self._token_ids += output.token_ids
        self._texts.append(output.text)
        self._logprobs += output.logprobs or ()
        self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs
        if output.routed_experts is not None:
            self._routed = joined(self._routed, output.routed_experts)
        if output.hidden_states is not None:
            self._hidden = joined(self._hidden, output.hidden_states)
        self._last = output
        return output

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Generated token ids so far."""
        return tuple(self._token_ids)

    def generation(self) -> Generation:
        """Return the result of the request from all outputs so far."""
        whole = replace(
            self._last,
            token_ids=tuple(self._token_ids),
            text="".join(self._texts),
            logprobs=tuple(self._logprobs) or None,
            prompt_logprobs=self._prompt_logprobs,
            routed_experts=self._routed,
            hidden_states=self._hidden,
        )
        return whole.generation(self.prompt_ids, has_text=self._detokenizer is not None)

    def _with_text(self, output: Output) -> Output:
        if self._detokenizer is None:
            return output
        end = output.matched if isinstance(output.matched, int) else None
        delta = self._detokenizer.push(output.token_ids, final=output.finish_reason is not None, end_token=end)
        if delta.matched is None:
            return replace(output, text=delta.text)
        return replace(
            output,
            text=delta.text,
            token_ids=output.token_ids[: delta.num_tokens],
            logprobs=None if output.logprobs is None else output.logprobs[: delta.num_tokens],
            finish_reason="stop",
            matched=delta.matched,
        )
