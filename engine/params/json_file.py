"""The JSON files of a checkpoint or adapter."""

import json
from pathlib import Path
from typing import Any

from tapscope.core.errors import CheckpointError


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises FileNotFoundError, and CheckpointError for anything else in it."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must contain a JSON object, not a {type(values).__name__}")
    return values
