"""Errors of the values at which attention's derivative is evaluated: the last layer of a vision transformer."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from tapscope import Dumper
from tapscope.comparator import CompareOptions, compare


def capture(path: Path, dtype: torch.dtype) -> Path:
    """Capture a forward and a backward of one image; attention is inlined, not a module."""
    torch.manual_seed(6)
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    config = transformers.ViTConfig(
        image_size=32,
        patch_size=8,
        num_labels=10,
        attn_implementation="eager",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **sizes,
    )
    model = transformers.ViTForImageClassification(config).train()
    image, label = torch.randn(1, 3, 32, 32), torch.randint(0, 10, (1,))
    model, image = model.to(dtype), image.to(dtype)
    with Dumper(model, path, keep="full", grads=True, params=True) as dumper, dumper.step():
        nn.functional.cross_entropy(model(image).logits.float(), label).backward()
    return path


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_derivative_values_explain_a_common_scale_of_a_gradient(tmp_path: Path) -> None:
    runs = capture(tmp_path / "a", torch.float32), capture(tmp_path / "b", torch.bfloat16)
    report = compare(*runs)
    assert report.exit_code == 0, report.first_divergence
    assert compare(*runs, CompareOptions(disabled=frozenset({"derivative_values"}))).exit_code == 1
