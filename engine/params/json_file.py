"""Read JSON files of a checkpoint or adapter, and detect Git LFS pointers in place of large files."""

import json
from pathlib import Path
from typing import Any

from tapscope.core.errors import CheckpointError

_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"


def lfs_pointer_error(path: Path) -> str | None:
    """Return an error message if ``path`` is a Git LFS pointer, left by a clone without git-lfs; None for another file.

    Raises OSError.
    """
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) != _LFS_POINTER:
            return None
    return f"{path} is a Git LFS pointer, not the file itself; download it with: git lfs pull"


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises FileNotFoundError, or CheckpointError if the file has any other content.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if text.startswith("\ufeff"):  # transformers and tokenizers reject such files, too
            raise CheckpointError(f"{path} begins with a byte order mark (BOM); save it as UTF-8 without one")
        values = json.loads(text)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must contain a JSON object, not a {type(values).__name__}")
    return values
