"""Llama 4: chunked attention, checkpoints with vision, sites, batch-invariant mode."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import reference_logits
from engine_observers import Memory
from moe_checkpoints import make_moe
from safetensors.torch import load_file, save_file

from tapscope.cli import main
from tapscope.comparator import Verdict, compare
from tapscope.engine import LLM
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers import paged_attention
from tapscope.engine.layers.paged_attention import AttentionSpec
from tapscope.kernels import triton
from tapscope.sources import open_run

PROMPT = [(11 * i + i // 3) % 500 for i in range(50)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_moe(tmp_path_factory.mktemp("llama4") / "model", "llama4", seed=3)


def _greedy(path: Path, prompt: list[int], tokens: tuple[int, ...]) -> list[int]:
    return reference_logits(path, [*prompt, *tokens][:-1]).argmax(-1)[-len(tokens) :].tolist()


@pytest.mark.parametrize("rows", [4, 9, 64])
def test_chunked_attention_after_prefix_hits_equals_transformers(path: Path, rows: int) -> None:
    """Attention chunks of 9 positions begin inside pages of 4, inside steps and inside cached prefixes."""
    settings: dict[str, Any] = {"page_size": 4, "max_num_batched_tokens": rows, "check_invariants": True}
    with LLM(path, **settings) as llm:
        llm.generate([PROMPT], max_new_tokens=2)
        for length in (7, 20, 39):
            prompt = [*PROMPT[:length], 7, 9]
            (generation,) = llm.generate([prompt], max_new_tokens=12, ignore_eos=True)
            assert list(generation.token_ids) == _greedy(path, prompt, generation.token_ids)


def test_chunked_attention_by_the_kernel_equals_transformers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the GPU kernel in Triton's interpreter: decoding rows in one call, in the same step as prompt rows."""
    if triton.why_not(torch.device("cpu")) is not None:
        pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1 and a CPU")
    from tapscope.kernels.triton.paged_decode import paged_decode

    counts = set()

    def attend_pages(query: Any, layer: int, cache: StepCache, spec: AttentionSpec) -> Any:
        counts.add((len(query), len(cache.segments)))
        tables = cache.page_table_of(layer)[: len(query)], cache.lengths[: len(query)]
        return paged_decode(query, *cache.pools(layer), *tables, spec.scale, chunk=spec.chunk)  # type: ignore[misc]

    monkeypatch.setattr(paged_attention, "_attend_pages", attend_pages)
    prompts = [PROMPT[:3], PROMPT[:30]]
    with LLM(path, page_size=4, max_num_batched_tokens=10) as llm:
        made = llm.generate(prompts, max_new_tokens=8, ignore_eos=True)
    for prompt, generation in zip(prompts, made, strict=True):
        assert list(generation.token_ids) == _greedy(path, prompt, generation.token_ids)
    assert {(1, 2), (2, 2)} <= counts


def test_chunked_attention_in_batch_invariant_mode_does_not_depend_on_steps(path: Path) -> None:
    found = []
    for rows in (5, 64):
        with LLM(path, batch_invariant=True, observer=Memory, logits="all", max_num_batched_tokens=rows) as llm:
            llm.generate([PROMPT, PROMPT[:13]], max_new_tokens=2, ignore_eos=True)
            found.append(llm.observer.logits_of("0"))
    assert torch.equal(*found)
    assert (found[0][: len(PROMPT)] - reference_logits(path, PROMPT)).abs().max() <= 1e-4


def test_text_part_of_a_checkpoint_with_vision_loads(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "vision"
    folder.mkdir()
    tensors = load_file(path / "model.safetensors")
    stored = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(stored | {"vision_model.x": torch.zeros(2)}, folder / "model.safetensors", {"format": "pt"})
    text = json.loads((path / "config.json").read_text())
    config = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    with LLM(folder) as llm:
        (generation,) = llm.generate([PROMPT], max_new_tokens=6, ignore_eos=True)
    assert list(generation.token_ids) == _greedy(path, PROMPT, generation.token_ids)


def test_llama4_dump_equals_transformers(path: Path, tmp_path: Path) -> None:
    """With a single prompt: transformers counts padding as positions in the scaling of queries."""
    base, target = str(tmp_path / "base"), str(tmp_path / "target")
    prompt = ["--prompt", "def main():", "--max-new-tokens", "3", "-q"]
    assert main(["dump", str(path), "-o", base, "--backend", "hf", *prompt]) == 0
    assert main(["dump", str(path), "-o", target, "--tokens-from", base, "-q"]) == 0
    with open_run(base) as one, open_run(target) as two:
        verdicts = {finding.site: finding.verdict for finding in compare(one, two).findings}
    for site in ("feed_forward:out[0]", "feed_forward.router:out[0]", "self_attn:out[0]"):
        assert verdicts[f"model.layers.0.{site}"] in (Verdict.SAME, Verdict.CLOSE)
    assert not {site for site, verdict in verdicts.items() if verdict in (Verdict.DIFFERS, Verdict.SHAPE)}
