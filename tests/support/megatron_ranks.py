"""Imports of a rank of examples/megatron_team.py; ranks are forked from a process with these imports.

Megatron decorates functions with `torch.compile` at import, which makes torch import its compiler (3 s). Here the
decorator is replaced by a no-op.
"""

import importlib
import warnings
from unittest.mock import patch

with warnings.catch_warnings(), patch("torch.compile", lambda function, **_: function):
    warnings.simplefilter("ignore")  # as megatron_team.py
    for name in (
        "megatron.core.dist_checkpointing",
        "megatron.core.models.gpt.gpt_model",
        "megatron_llama",
        "megatron_steps",
        "tapscope.dumper.recording.recording",
    ):
        importlib.import_module(name)
