"""The requests of a capture: prompts from flags or a file, or the recorded tokens of another run."""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from tapscope.core.deprecation import deprecated_flag
from tapscope.core.errors import DataError, UsageError

_MAX_NEW = 8


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests to run with greedy decoding; one entry per request in every field."""

    prompts: tuple[str | tuple[int, ...], ...]
    request_ids: tuple[str, ...]
    max_new_tokens: tuple[int, ...]
    forced: tuple[tuple[int, ...], ...]
    """Token ids to force as outputs of each request; empty: use the generated tokens."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--prompt``, ``--prompts``, ``--input-ids``, ``--max-new-tokens`` and ``--tokens-from``."""
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="prompt text (repeatable)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="text file with one prompt per line")
    parser.add_argument(
        "--input-ids", action="append", default=[], metavar="LIST", help="prompt as token ids: 1,2,3 (repeatable)"
    )
    max_new_tokens = parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", help=f"tokens to generate (default: {_MAX_NEW})"
    )
    deprecated_flag(parser, "--max-new", max_new_tokens)
    parser.add_argument(
        "--tokens-from", type=Path, metavar="RUN", help="replay the prompts and tokens of RUN instead of sampling"
    )


def workload(args: argparse.Namespace) -> Workload:
    """Return the requests defined by the flags. Raises UsageError, and the errors of :func:`tapscope.open_run`."""
    prompts = [*args.prompt, *_lines(args.prompts), *map(_ids, args.input_ids)]
    if args.tokens_from is not None:
        if prompts:
            raise UsageError("--tokens-from supplies the prompts; remove --prompt, --prompts and --input-ids")
        if args.max_new_tokens is not None:
            raise UsageError("--tokens-from determines the number of tokens; remove --max-new-tokens")
        return of_run(args.tokens_from)
    if not prompts:
        raise UsageError("nothing to run; give --prompt TEXT, --prompts FILE, --input-ids LIST or --tokens-from RUN")
    max_new = _MAX_NEW if args.max_new_tokens is None else args.max_new_tokens
    if max_new < 1:
        raise UsageError(f"--max-new-tokens {max_new}: must be at least 1")
    names = tuple(str(i) for i in range(len(prompts)))
    return Workload(tuple(prompts), names, (max_new,) * len(prompts), ((),) * len(prompts))


def _lines(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        return [line for line in file.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read --prompts {file}: {error}") from None


def _ids(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text, re.ASCII):
        raise UsageError(f"invalid --input-ids {text!r}: expected token ids separated by commas, such as 1,2,3")
    return tuple(map(int, text.split(",")))


def of_run(path: Path) -> Workload:
    """Return the requests of a recorded run with its tokens forced. Raises DataError and the errors of
    :func:`tapscope.open_run`."""
    from tapscope.sources import open_run

    with open_run(path) as run:
        prompts, tokens = run.prompts(), run.tokens()
    if not prompts or not any(prompts.values()):
        raise DataError(f"{path} has no token ids; --tokens-from needs a run with token ids")
    forced: list[tuple[int, ...]] = []
    for request, prompt in prompts.items():
        known = tokens[request]
        if sorted(known) != list(range(len(known))):
            raise DataError(f"request {request} of {path} lacks some positions; its tokens cannot be replayed")
        forced.append(tuple(known[position] for position in range(len(prompt), len(known))))
    # The last token of a request is sampled but never an input: generate one token more than the forced ones.
    counts = tuple(len(tokens_) + 1 for tokens_ in forced)
    return Workload(tuple(tuple(p) for p in prompts.values()), tuple(prompts), counts, tuple(forced))
