"""One checkpoint in transformers and Megatron-core, TP1 and TP2, forward and backward: they agree, bugs are named."""

import importlib.util
import io
import os
import pickle
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any

import forkserver_pool as warm
import pytest
import torch
from checkpoints import make_llama
from compare_runs import diff
from soak_cases import mostly_soak

from tapscope import Dumper
from tapscope.cli import main
from tapscope.comparator import Report, Verdict

if importlib.util.find_spec("megatron") is None:
    pytest.skip("needs megatron-core (the dev extra has it)", allow_module_level=True)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BUGS = Path(__file__).resolve().parents[1] / "support/megatron_bugs.py"
FAMILIES = ("llama", "qwen2", "qwen3")


class Lab:
    """Checkpoints, the runs of transformers that are the baselines, and a team of ranks a size."""

    def __init__(self, folder: Path, teams: dict[int, Any]) -> None:
        self.folder, self.teams = folder, teams
        self.bases: dict[str, Path] = {}

    def checkpoint(self, family: str) -> Path:
        path = self.folder / family
        if not path.exists():
            make_llama(path) if family == "llama" else _make_qwen(path, family)
        return path

    def base(self, family: str) -> Path:
        if family not in self.bases:
            from megatron_team import Job, run_transformers

            self.bases[family] = self.folder / f"base-{family}"
            run_transformers(Job(checkpoint=str(self.checkpoint(family)), out=str(self.bases[family]), backward=True))
        return self.bases[family]

    def compare(self, family: str, tp: int, *, bug: str | None = None, **options: Any) -> Report:
        from megatron_team import Job

        patch = f"{BUGS}:{bug}" if bug else None
        out = self.folder / f"{family}-{tp}-{bug}-{'-'.join(options)}"
        job = Job(checkpoint=str(self.checkpoint(family)), out=str(out), backward=True, patch=patch, **options)
        return diff(self.base(family), self.teams[tp].capture(job))


def _make_qwen(path: Path, family: str) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        qwen3 = family == "qwen3"
        model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=24)) if qwen3 else Qwen2ForCausalLM(Qwen2Config(**shape))
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                torch.nn.init.normal_(parameter, float("norm" in name), 0.1)
    model.save_pretrained(path)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.syspath_prepend(str(EXAMPLES))
        import megatron_team

        patch.setenv("OMP_NUM_THREADS", "1")
        ranks = stack.enter_context(warm.forked_with("megatron_ranks", EXAMPLES))
        patch.setattr(megatron_team, "multiprocessing", ranks)
        teams = {tp: stack.enter_context(megatron_team.Team(tp)) for tp in (1, 2)}
        yield Lab(tmp_path_factory.mktemp("megatron"), teams)


@pytest.mark.parametrize(
    ("family", "tp"),
    mostly_soak(product(FAMILIES, (1, 2)), default=[("llama", 1), *((family, 2) for family in FAMILIES)]),
)
def test_megatron_agrees_with_transformers_forward_and_backward(lab: Lab, family: str, tp: int) -> None:
    report = lab.compare(family, tp)
    assert report.exit_code == 0, (report.divergences, report.coverage.partial)
    matched = {f.site for f in report.findings if not f.verdict.is_orphan}
    layer = "model.layers.1"
    for site in (
        *(f"{layer}.self_attn.{name}_proj:out" for name in "qkvo"),
        *(f"{layer}.mlp.{name}_proj:out" for name in ("gate", "up", "down")),
        *(f"{layer}.mlp.{name}_proj:param[weight].grad" for name in ("gate", "up", "down")),
        *(f"{layer}.self_attn.{name}_proj:param[weight].grad" for name in "qkvo"),
        *(f"{layer}.{name}:param[weight].grad" for name in ("input_layernorm", "post_attention_layernorm")),
        "model.embed_tokens:out",
        "model.embed_tokens:param[weight].grad",
        "model.norm:out",
        f"{layer}:out.grad",
        f"{layer}.mlp.down_proj:in[input].grad",
    ):
        assert site in matched
    if family == "qwen3":
        assert f"{layer}.self_attn.k_norm:param[weight].grad" in matched
    if family == "qwen2":
        assert f"{layer}.self_attn.k_proj:param[bias].grad" in matched


def test_megatron_sequence_parallel_and_bf16_agree(lab: Lab) -> None:
    assert lab.compare("llama", 2, sequence_parallel=True).exit_code == 0
    report = lab.compare("llama", 2, dtype="bfloat16")
    assert not [f.site for f in report.findings if f.verdict.is_bad and not f.site.endswith("param[weight].grad")]
    # Megatron masks float32 scores in place, and casts bfloat16 first: both have the gradient of what came in.
    report = diff(*(lab.folder / f"llama-2-None-{each}" for each in ("sequence_parallel", "dtype")))
    assert report.exit_code == 0, report.divergences


@pytest.mark.parametrize(
    ("family", "tp", "bug", "site"),
    [
        pytest.param("llama", 1, "rope_theta", "model.layers.0.self_attn", marks=pytest.mark.soak),
        ("llama", 2, "rope_theta", "model.layers.0.self_attn"),
        ("llama", 2, "missing_all_reduce", "model.layers.1.mlp.down_proj"),
        pytest.param("llama", 1, "gate_up_swapped", "model.layers.2.mlp", marks=pytest.mark.soak),
        ("llama", 2, "gate_up_swapped", "model.layers.2.mlp"),
        ("llama", 2, "missing_grad_all_reduce", "model.layers.1"),
        ("llama", 1, "gradient_scaled", "model.layers.1.self_attn"),
        ("llama", 2, "norm_eps", "model.norm"),
        ("qwen2", 2, "bias_dropped", "model.layers.0.self_attn"),
        ("qwen3", 2, "key_norm_dropped", "model.layers.1.self_attn.k_norm"),
    ],
)
def test_megatron_bug_is_named(lab: Lab, family: str, tp: int, bug: str, site: str) -> None:
    report = lab.compare(family, tp, bug=bug)
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.module.startswith(site)


@pytest.mark.soak
def test_megatron_example_shows_the_output_of_diff(lab: Lab) -> None:
    words = [sys.executable, EXAMPLES / "06_megatron.py", lab.checkpoint("llama"), lab.folder / "example", "--tp", "1"]
    said = subprocess.run(words, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert "agrees" in said.stdout


def saved(lab: Lab, family: str, tp: int, how: str = "save_to") -> Path:
    """A checkpoint that the ranks saved as Megatron-LM does."""
    from megatron_team import Job

    out = lab.folder / f"{how}-{family}-{tp}"
    if not out.exists():
        patch = lab.folder / f"{how}_{family}_{tp}.py"  # Python would run an earlier file of this name and size again
        patch.write_text(f"""
from pathlib import Path
from save_megatron import {how}

def save(model):
    {how}(Path({str(out)!r}), model)
""")
        job = Job(checkpoint=str(lab.checkpoint(family)), out=str(lab.folder / "unused"), patch=f"{patch}:save")
        lab.teams[tp].capture(job)
    return out


def _loaded(file: Path) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Megatron, which its enums import
        return torch.load(file, weights_only=False)


def changed(folder: Path, change: Callable[[dict[str, Any]], None], rank: str = "mp_rank_01") -> None:
    file = folder / "iter_0000010" / rank / "model_optim_rng.pt"
    content = _loaded(file)
    change(content)
    torch.save(content, file)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_shards_agree_with_the_checkpoint_they_were_made_of(lab: Lab, family: str) -> None:
    report = diff(lab.checkpoint(family), saved(lab, family, 2))
    assert (report.exit_code, report.coverage.num_sites_matched, {f.verdict for f in report.findings}) == (
        0,
        len(report.findings),
        {Verdict.SAME},
    )
    assert report.target.mesh == {"pp": 1, "tp": 2, "ep": 1}


def test_a_changed_shard_is_named(lab: Lab, tmp_path: Path) -> None:
    folder = shutil.copytree(saved(lab, "qwen2", 2), tmp_path / "changed")

    def change(content: dict[str, Any]) -> None:
        content["model"]["decoder.layers.1.mlp.linear_fc1.weight"][60] *= 1.1  # of [gate | up], 48 rows each

    changed(folder, change)
    report = diff(lab.checkpoint("qwen2"), folder)
    bad = [finding.site for finding in report.findings if finding.verdict.is_bad]
    assert (report.exit_code, bad) == (1, ["model.layers.1.mlp.up_proj:param[weight]"])


def test_pipeline_stages_and_fused_norms_are_read(lab: Lab, tmp_path: Path) -> None:
    """A checkpoint of one rank, split into two stages with their own numbers and with Transformer Engine's names."""
    report = diff(lab.checkpoint("llama"), staged(saved(lab, "llama", 1), tmp_path / "staged", [[[0, 1]], [[2]]]))
    assert (report.exit_code, {f.verdict for f in report.findings}) == (0, {Verdict.SAME})
    assert report.coverage.num_sites_matched == len(report.findings) == 30


def staged(source: Path, out: Path, layers: list[list[list[int]]]) -> Path:
    """The checkpoint of one rank as stages: the layers of each of their virtual stages, perhaps none."""
    content = _loaded(source / "iter_0000010/mp_rank_00/model_optim_rng.pt")
    model = content.pop("model")
    content["args"].pipeline_model_parallel_size = len(layers)
    names = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    for stage, chunks in enumerate(layers):
        parts: list[dict[str, Any]] = [{} for _ in chunks]
        for name, tensor in model.items():
            layer = re.search(r"layers\.(\d)", name)
            if layer is None:
                is_here = stage == (0 if name.startswith("embedding") else len(layers) - 1)
                at, local = (0 if name.startswith("embedding") else -1), name
            else:
                at = next((i for i, chunk in enumerate(chunks) if int(layer[1]) in chunk), 0)
                is_here = int(layer[1]) in chunks[at]
                local = name.replace(layer[0], f"layers.{chunks[at].index(int(layer[1])) if is_here else 0}")
            if is_here:
                parts[at][reduce(lambda text, pair: text.replace(*pair), names.items(), local)] = tensor
        folder = out / f"mp_rank_00_{stage:03d}"
        folder.mkdir(parents=True)
        keys = ["model"] if len(parts) == 1 else [f"model{i}" for i in range(len(parts))]
        torch.save({**content, **dict(zip(keys, parts, strict=True))}, folder / "model_optim_rng.pt")
    return out


def test_virtual_pipeline_stages_are_read_by_their_global_layers(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, original = saved(lab, "llama", 1), lab.checkpoint("llama")
    report = diff(original, staged(source, tmp_path / "right", [[[0], [2]], [[1], []]]))
    assert (report.exit_code, {f.verdict for f in report.findings}) == (0, {Verdict.SAME})
    assert report.coverage.num_sites_matched == len(report.findings) == 30
    assert report.target.mesh == {"pp": 2, "tp": 1, "ep": 1}
    # Layer 1 where the order of Megatron has layer 2.
    report = diff(original, staged(source, tmp_path / "swapped", [[[0], [1]], [[2], []]]))
    assert {f.site.split(".")[2] for f in report.findings if f.verdict.is_bad} == {"1", "2"}
    shutil.rmtree(tmp_path / "right/mp_rank_00_001")
    assert main(["diff", str(original), str(tmp_path / "right")]) != 0
    out, err = capsys.readouterr()
    assert "model1) depend on the file of an earlier stage, which is missing" in out + err


def virtual_stages(*arguments: object) -> None:
    """Run support/megatron_virtual.py."""
    script = Path(__file__).resolve().parents[1] / "support/megatron_virtual.py"
    command = [sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_interleaved_schedule_of_megatron_is_captured_by_one_dumper(tmp_path: Path) -> None:
    """Two ranks of two virtual stages each: numbers of layers and microbatches come from Megatron."""
    from megatron_virtual import MICROBATCHES
    from transformers import AutoModelForCausalLM

    original = make_llama(tmp_path / "original", num_hidden_layers=4)
    model = AutoModelForCausalLM.from_pretrained(original, attn_implementation="eager")
    whole = Dumper(model, tmp_path / "whole", keep="full", grads=True, params=True)
    with whole as dumper, dumper.step(phase="train"):
        for number, tokens in enumerate(MICROBATCHES):
            ids = torch.tensor([tokens])
            with dumper.micro(number):
                logits = model(input_ids=ids).logits
                loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
                (loss / len(MICROBATCHES)).backward()
    virtual_stages(original, tmp_path / "clean", "--capture")
    report = diff(tmp_path / "whole", tmp_path / "clean")
    assert (report.exit_code, report.coverage.num_sites_matched) == (0, 286)
    virtual_stages(original, tmp_path / "bug", "--capture", 2)
    report = diff(tmp_path / "whole", tmp_path / "bug")
    assert report.first_divergence is not None
    assert report.first_divergence.module == "model.layers.2.mlp.down_proj"


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_virtual_pipeline_stages_of_megatron_are_read(tmp_path: Path) -> None:
    original = make_llama(tmp_path / "original", num_hidden_layers=4)
    virtual_stages(original, tmp_path / "saved")
    report = diff(original, tmp_path / "saved")
    assert (report.exit_code, {f.verdict for f in report.findings}) == (0, {Verdict.SAME})
    assert report.coverage.num_sites_matched == len(report.findings) == 39
    changed(
        tmp_path / "saved",
        lambda content: content["model1"]["decoder.layers.0.mlp.linear_fc2.weight"].mul_(1.1),
        "mp_rank_00_000",
    )
    report = diff(original, tmp_path / "saved")
    bad = [f.site for f in report.findings if f.verdict.is_bad]
    assert bad == ["model.layers.2.mlp.down_proj:param[weight]"]


def test_checkpoints_that_are_not_read_are_one_sentence(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoilt(name: str) -> Path:
        return shutil.copytree(saved(lab, "llama", 2), tmp_path / name)

    missing, gone = map(spoilt, ("missing", "gone"))
    shutil.rmtree(missing / "iter_0000010/mp_rank_01")
    (gone / "latest_checkpointed_iteration.txt").write_text("20")
    words = {
        gone: "latest_checkpointed_iteration.txt names iter_0000020, which is missing",
    }
    capsys.readouterr()
    for folder, sentence in words.items():
        assert main(["diff", str(lab.checkpoint("llama")), str(folder)]) == 3
        out, err = capsys.readouterr()
        assert (out, err.count("\n"), sentence in err) == ("", 1, True), err
    assert main(["diff", str(lab.checkpoint("llama")), str(missing)]) == 1
    assert "mp_rank_01 is missing, and with it its shards" in capsys.readouterr().out


def test_distributed_checkpoint_is_put_together_of_its_chunks(lab: Lab, tmp_path: Path) -> None:
    """``torch_dist`` of two ranks by megatron.core.dist_checkpointing, whole and with one element changed."""
    from torch.distributed.checkpoint import FileSystemReader

    whole = saved(lab, "qwen2", 2, "save_distributed")
    report = diff(lab.checkpoint("qwen2"), whole)
    assert (report.exit_code, {f.verdict for f in report.findings}) == (0, {Verdict.SAME})
    assert report.coverage.num_sites_matched == len(report.findings) == 27

    folder = shutil.copytree(whole, tmp_path / "changed") / "iter_0000010"
    places = FileSystemReader(folder).read_metadata().storage_data
    name = "decoder.layers.mlp.linear_fc1.weight"  # [layer, gate of both ranks then up, hidden]
    found = next(place for at, place in places.items() if at.fqn == name and tuple(at.offset) == (1, 96 + 48, 0))
    file, content = folder / found.relative_path, io.BytesIO()
    written = file.read_bytes()
    before, archive = written[: found.offset], written[found.offset : found.offset + found.length]
    shard = torch.load(io.BytesIO(archive))
    shard[0, 7] *= 1.1
    torch.save(shard, content)
    assert len(content.getvalue()) == found.length
    file.write_bytes(before + content.getvalue() + written[found.offset + found.length :])
    report = diff(lab.checkpoint("qwen2"), tmp_path / "changed")
    bad = [finding.site for finding in report.findings if finding.verdict.is_bad]
    assert (report.exit_code, bad) == (1, ["model.layers.1.mlp.up_proj:param[weight]"])

    flipped = content.getvalue().replace(shard.numpy().tobytes(), bytes(shard.nbytes))
    file.write_bytes(before + flipped + written[found.offset + found.length :])
    report = diff(lab.checkpoint("qwen2"), tmp_path / "changed")
    assert report.exit_code == 3
    assert any("layers.1.mlp.linear_fc1" in each and "CRC-32" in each for each in report.coverage.partial)


def test_damaged_distributed_checkpoint_is_one_sentence(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoilt(name: str) -> Path:
        return shutil.copytree(saved(lab, "qwen2", 2, "save_distributed"), tmp_path / name) / "iter_0000010"

    unfinished, damaged, hostile, missing, cut = map(spoilt, ("unfinished", "damaged", "hostile", "missing", "cut"))
    (unfinished / ".metadata").unlink()
    (damaged / ".metadata").write_bytes((damaged / ".metadata").read_bytes()[:-500])
    witness = tmp_path / "witness"

    class Hostile:
        def __reduce__(self) -> Any:
            return Path.touch, (witness,)

    (hostile / ".metadata").write_bytes(pickle.dumps(Hostile()))
    (missing / "__1_0.distcp").unlink()
    os.truncate(cut / "__1_0.distcp", 50_000)
    words = {
        unfinished: "has .distcp files but no .metadata: its save did not finish",
        damaged: ".metadata: its pickle is damaged",
        hostile: ".metadata: not the metadata of torch.distributed.checkpoint",
    }
    capsys.readouterr()
    for folder, sentence in words.items():
        assert main(["diff", str(lab.checkpoint("qwen2")), str(folder.parent)]) == 3
        out, err = capsys.readouterr()
        assert (out, err.count("\n"), sentence in err) == ("", 1, True), err
    assert not witness.exists()
    for folder, sentence in {missing: "__1_0.distcp is missing", cut: "__1_0.distcp: is cut off"}.items():
        assert main(["diff", str(lab.checkpoint("qwen2")), str(folder.parent)]) == 3
        assert sentence in capsys.readouterr().out


def test_objects_in_a_saved_file_are_not_executed(lab: Lab, tmp_path: Path) -> None:
    folder, witness = shutil.copytree(saved(lab, "llama", 2), tmp_path / "hostile"), tmp_path / "witness"

    class Hostile:
        def __reduce__(self) -> Any:
            return Path.touch, (witness,)

    changed(folder, lambda content: content.update(opt_param_scheduler=Hostile()))
    assert diff(lab.checkpoint("llama"), folder).exit_code == 0
    assert not witness.exists()
