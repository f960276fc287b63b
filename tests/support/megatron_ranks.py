"""What a rank of examples/megatron_team.py imports; its ranks are forked off a process that has.

Megatron decorates functions by `torch.compile` when it is imported, for which torch imports its compiler (3 s). Here
they stay as they are written.
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
