"""Token text: decode the tokens at the places of a report, if a tokenizer is known.

The tokenizer is the ``tokenizer.json`` of ``--tokenizer``, or of a local checkpoint that either run names as its model.
Decoding needs the ``tokenizers`` package; without the package and without ``--tokenizer``, a report has no token text.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from tapscope.comparator.facts import Place
from tapscope.core.errors import ConfigError
from tapscope.core.extras import requiring
from tapscope.core.regular_files import read_small
from tapscope.run_format.run import Run

if TYPE_CHECKING:
    from tapscope.comparator.report.report import Report

FILE = "tokenizer.json"
_MAX_BYTES = 64 << 20
"""Maximum size of a file that is read; the file of a 256,000-token vocabulary has 33 MB."""
_MAX_TEXT = 40
"""Maximum number of characters shown per token."""
_PARTIAL = "\ufffd"
"""A token that is part of a character decodes to this; its name in the vocabulary is shown instead."""


class TokenText:
    """Decodes single tokens."""

    def __init__(self, path: Path) -> None:
        """Load ``path``: a ``tokenizer.json``, or a directory that contains one.

        Raises OSError, ValueError for an invalid file, and MissingExtraError without the ``tokenizers`` package.
        """
        with requiring("decoding tokens", "engine"):
            from tokenizers import Tokenizer
        data = read_small(path / FILE if path.is_dir() else path, _MAX_BYTES)
        try:
            self._tokenizer: Any = Tokenizer.from_str(data.decode())
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - a panic of the Rust library is not an Exception
            raise ValueError(f"{path} is not a tokenizer: {error}") from None

    def of(self, token: int) -> str:
        """Return the text of a token; empty for an id outside the vocabulary."""
        name = self._tokenizer.id_to_token(token) if 0 <= token < 1 << 32 else None
        if name is None:
            return ""
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return str(name if not text or _PARTIAL in text else text)[:_MAX_TEXT]


def with_token_text(report: "Report", runs: tuple[Run, Run], path: Path | None) -> "Report":
    """Return the report with ids and text of the tokens at its divergences and forks, if a tokenizer is found.

    ``path`` is the value of ``--tokenizer``. Raises ConfigError if it cannot be used, and MissingExtraError.
    """
    if not report.divergences and not report.coverage.forks:
        return report
    text = find_tokenizer(runs, path)
    if text is None:
        return report
    ids = runs[1].tokens() | runs[0].tokens()

    def named(place: Place) -> Place:
        token = ids.get(place.request or "", {}).get(-1 if place.position is None else place.position)
        return place if token is None else structs.replace(place, token_id=token, token_text=text.of(token))

    divergences = tuple(
        structs.replace(
            one,
            place=one.place and named(one.place),
            tokens=tuple(structs.replace(row, place=named(row.place)) for row in one.tokens),
        )
        for one in report.divergences
    )
    forks = tuple(
        structs.replace(fork, baseline_text=text.of(fork.baseline_token), target_text=text.of(fork.target_token))
        for fork in report.coverage.forks
    )
    return structs.replace(report, divergences=divergences, coverage=structs.replace(report.coverage, forks=forks))


def find_tokenizer(runs: Sequence[Run], path: Path | None = None) -> TokenText | None:
    """Return the tokenizer of ``path``, or else of the first local checkpoint that a run names as its model; None
    without either.

    Raises like :func:`with_token_text`.
    """
    if path is not None:
        try:
            return TokenText(path)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"--tokenizer {path}: expected a {FILE}, or a directory with one: {reason}") from None
    for folder in _checkpoints(run.manifest for run in runs):
        try:
            return _loaded(folder, (folder / FILE).stat().st_mtime_ns)
        except (ImportError, OSError, ValueError):
            continue
    return None


@lru_cache(maxsize=2)
def _loaded(folder: Path, changed_ns: int) -> TokenText:
    """Return the tokenizer of a checkpoint, cached until its file changes."""
    return TokenText(folder)


def _checkpoints(manifests: Iterable[Mapping[str, Any]]) -> Iterable[Path]:
    """Return the local directories with a tokenizer that the runs name as their model."""
    names = dict.fromkeys(str(manifest.get("model") or "") for manifest in manifests)
    return (Path(name) for name in names if name and "\0" not in name and (Path(name) / FILE).is_file())
