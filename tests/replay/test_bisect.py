"""Bisect finds the responsible modules within the bound on runs, and the changed weights of a real checkpoint."""

import json
import math
import random
import sys

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tapscope.bisect import BisectState, attention_modules, bisect, check_related, differing_modules, switched_weights
from tapscope.cli import main
from tapscope.core.errors import ConfigError, DataError, UsageError
from tapscope.kernel_switch import Kernel, find_kernels, switched_kernels


@pytest.mark.parametrize("size", [8, 57, 300])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_bisect_finds_the_set_within_the_bound(size, count):
    names = [f"m{i}" for i in range(size)]
    for seed in range(20):
        wanted = set(random.Random(seed).sample(names, count))
        calls = []
        found = bisect(names, lambda switched: calls.append(1) or wanted <= switched)  # noqa: B023
        assert set(found) == wanted
        assert len(calls) <= count * (math.ceil(math.log2(size)) + 1) + 2
        assert len(calls) <= 2 * count * math.log2(size) + 2


def test_bisect_of_agreeing_models_needs_one_run():
    assert bisect(["a", "b"], lambda switched: True, max_runs=1) == ()


def test_bisect_reports_a_cause_elsewhere():
    with pytest.raises(DataError, match="differ even with every module switched"):
        bisect(["a", "b"], lambda switched: False)


def test_bisect_stops_at_the_budget():
    with pytest.raises(DataError, match=r"^no answer after 3 runs; found so far: none; raise --max-runs$"):
        bisect([str(i) for i in range(64)], lambda switched: "40" in switched, max_runs=3)


def test_bisect_resumes_a_search_that_was_stopped(tmp_path):
    names, file, calls = [str(i) for i in range(64)], tmp_path / "state", []
    for _ in range(20):
        state = BisectState(file, {"model": "m"})

        def agrees(switched):
            calls.append(switched)
            state.add(switched, {"7", "40"} <= switched)  # noqa: B023
            return {"7", "40"} <= switched

        try:
            found = bisect(names, agrees, max_runs=2, known=state.answers)
            break
        except DataError:
            with file.open("a") as torn:
                torn.write('{"switched": ["1"')
    assert found == ("7", "40")
    assert len(calls) == len(set(calls))
    with pytest.raises(UsageError, match=r"holds another search \(not the same model\)"):
        BisectState(file, {"model": "other"})
    file.write_text("[]\nno JSON\n")
    with pytest.raises(DataError, match="not a state file of bisect"):
        BisectState(file, {"model": "m"})


def build():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_switched_weights_are_restored():
    one, two = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Sequential(torch.nn.Linear(2, 2))
    before = one[0].weight.clone()
    with switched_weights(one, two, frozenset(differing_modules(one, two))):
        assert torch.equal(one[0].weight, two[0].weight)
    assert torch.equal(one[0].weight, before)
    with pytest.raises(ConfigError, match=r"no parameter 0.weight of shape \[2, 2\]"):
        differing_modules(one, torch.nn.Sequential(torch.nn.Linear(3, 2)))


def test_bisect_refuses_unrelated_checkpoints_before_it_computes_anything(tmp_path, capsys):
    build().save_pretrained(tmp_path / "model")
    torch.manual_seed(1)
    LlamaForCausalLM(build().config).save_pretrained(tmp_path / "unrelated")
    words = ["dump", str(tmp_path / "model"), "-o", str(tmp_path / "base"), "--backend", "hf", "--input-ids", "3,4"]
    assert main([*words, "--max-new-tokens", "1"]) == 0
    capsys.readouterr()
    words = ["bisect", str(tmp_path / "base"), "--reference", str(tmp_path / "model")]
    assert main([*words, "--model", str(tmp_path / "unrelated")]) == 3
    error = capsys.readouterr().err
    assert "weight matrices have nothing in common with the reference's" in error
    assert error.count("\n") == 1


def test_differing_modules_leaves_out_equal_weights():
    one, two = build(), build()
    assert differing_modules(one, two) == []
    two.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1
    assert differing_modules(one, two) == ["model.layers.1.mlp.up_proj"]
    two.to(torch.bfloat16)
    check_related(one.float(), two)
    assert len(differing_modules(one, two)) > 10


def test_bisect_command_finds_the_changed_weights(tmp_path, capsys):
    model = build()
    model.save_pretrained(tmp_path / "model")
    model.model.layers[1].self_attn.q_proj.weight.data *= 1.5
    model.model.layers[0].mlp.down_proj.weight.data *= 1.5
    model.save_pretrained(tmp_path / "changed")
    from tapscope.cli import reference
    from tapscope.cli.prompts import Workload
    from tapscope.dumper import Dumper

    right = reference.load(str(tmp_path / "model"), "auto")
    with Dumper(right, tmp_path / "base", keep="full") as dumper:
        reference.generate(right, [[3, 14, 15, 92]], Workload((), ("0",), (2,), ((7,),)), dumper)
    words = ["bisect", str(tmp_path / "base"), "--reference", str(tmp_path / "model"), "-q", "--json"]
    assert main([*words, "--model", str(tmp_path / "changed")]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["modules"] == ["model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj"]
    assert found["num_runs"] <= 2 * 2 * math.log2(found["num_modules"])
    assert main([*words, "--model", str(tmp_path / "model")]) == 0
    state = ["--model", str(tmp_path / "changed"), "--state", str(tmp_path / "state")]
    assert main([*words, *state, "--max-runs", "3"]) == 3
    capsys.readouterr()
    assert main([*words, *state]) == 1
    assert json.loads(capsys.readouterr().out) == found | {"num_runs": found["num_runs"] - 3}
    assert main([*words, *state, "--rtol", "1e-3"]) == 2  # different options invalidate the stored results
    assert "not the same options" in capsys.readouterr().err
    assert main([*words, "--model", str(tmp_path / "changed"), "--max-runs", "0"]) == 2


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """Return a checkpoint whose second MLP overflows float16, and its float32 run."""
    model, path = build(), tmp_path_factory.mktemp("dumped")
    mlp = model.model.layers[1].mlp
    mlp.gate_proj.weight.data *= 1000
    mlp.up_proj.weight.data *= 1000
    mlp.down_proj.weight.data *= 1e-6
    model.save_pretrained(path / "model")
    words = ["dump", str(path / "model"), "-o", str(path / "base"), "--backend", "hf", "-q", "--keep", "full"]
    prompts = ["--input-ids", "3,14,15,92", "--input-ids", "65,35"]  # the second prompt is padded
    assert main([*words, *prompts, "--max-new-tokens", "2"]) == 0
    return path


def test_bisect_command_finds_the_block_that_overflows_in_float16(dumped, capsys):
    words = ["bisect", str(dumped / "base"), "--model", str(dumped / "model"), "--reference-dtype", "float32"]
    capsys.readouterr()
    assert main([*words, "--dtype", "float16", "-q", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["switched"], found["modules"]) == ("dtype", ["model.layers.1.mlp"])
    assert found["num_modules"] == 11  # 4 per layer, the embedding, the final norm and the head
    assert found["num_runs"] <= math.ceil(math.log2(11)) + 3
    assert main([*words, "--dtype", "bfloat16", "-q"]) == 0


def test_bisect_command_finds_the_layer_whose_attention_is_wrong(dumped, capsys, monkeypatch):
    def wrong(module, *args, scaling=None, **kwargs):
        return sdpa_attention_forward(module, *args, scaling=scaling * (3 if module.layer_idx == 1 else 1), **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "wrong", wrong)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "wrong", sdpa_mask)
    words = ["bisect", str(dumped / "base"), "--model", str(dumped / "model"), "--reference-attention", "eager", "-q"]
    capsys.readouterr()
    assert main([*words, "--attention", "wrong"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("what      attention of model.layers.1.self_attn\nruns      ")
    assert out.endswith(", for 1 of 2 attention modules\n")
    assert main([*words, "--attention", "sdpa"]) == 0
    assert main([*words, "--attention", "nonsense"]) == 3
    error = capsys.readouterr().err
    assert "nonsense" in error
    assert error.count("\n") == 1


SILU = "torch.nn.functional:silu"
NORM = "transformers.models.llama.modeling_llama:LlamaRMSNorm.forward"


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """Write a file with kernels in the current directory, the only place it can be imported from."""
    (tmp_path / "own_kernels.py").write_text("""
from torch.nn.functional import silu as plain

def silu(x, inplace=False):  # overflows above 88, as the gates of the second MLP do
    return x * x.exp() / (1 + x.exp())

def scaled(x, inplace=False):
    return plain(x)

def norm(self, x):
    return self.weight * x / (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).sqrt()

def raising(x, inplace=False):
    raise IndexError("no such block")

number = 1
""")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(tmp_path))])
    yield
    sys.modules.pop("own_kernels", None)


def test_bisect_command_finds_the_module_whose_kernel_overflows(dumped, kernels, capsys):
    words = ["bisect", str(dumped / "base"), "--model", str(dumped / "model"), "-q", "--json"]
    wrong = ["--kernel", f"{SILU}=own_kernels:silu", "--reference-kernel", SILU]
    right = ["--kernel", f"{NORM}=own_kernels:norm", "--reference-kernel", NORM]
    capsys.readouterr()
    assert main([*words, *wrong]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["switched"], found["modules"]) == ("kernels", ["model.layers.1.mlp.act_fn"])
    assert found["num_modules"] == 2
    assert main([*words, *right, *wrong]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["modules"] == ["model.layers.1.mlp.act_fn"]
    assert found["num_modules"] == 2 + 5
    assert main([*words, *right]) == 0
    assert (
        main([*words, "--kernel", f"{SILU}=own_kernels:silu", "--reference-kernel", f"{SILU}=own_kernels:scaled"]) == 1
    )
    assert torch.nn.functional.silu(torch.tensor(100.0)) == 100


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--kernel", f"{SILU}=own_kernels:silu", "--reference", "x"], 2, "--kernel needs --reference-kernel"),
        (["--reference-kernel", SILU], 2, f"tested and reference are both {SILU}"),
        (["--reference-kernel", f"{SILU}=own_kernels:nothing"], 2, "'own_kernels' has no attribute 'nothing'"),
        (["--reference-kernel", f"{SILU}=nowhere:silu"], 2, "nowhere:silu: cannot import nowhere"),
        (["--reference-kernel", f"{SILU}=own_kernels:number"], 2, "own_kernels:number is not a function"),
        (["--reference-kernel", "silu"], 2, "a kernel is named MODULE:FUNCTION"),
        (["--reference-kernel", SILU, "--kernel", f"{NORM}=own_kernels:norm"], 2, f"{NORM}: no reference"),
        (["--reference-kernel", SILU, "--reference-kernel", SILU], 2, f"{SILU} is named twice"),
        (["--reference-kernel", "torch.nn.functional:gelu=own_kernels:silu"], 3, "calls torch.nn.functional:gelu"),
        (["--kernel", f"{SILU}=own_kernels:raising", "--reference-kernel", SILU], 3,
         "own_kernels:raising, called by model.layers.0.mlp.act_fn: IndexError: no such block"),
    ],
)  # fmt: skip
def test_bisect_command_names_what_is_wrong_with_a_kernel(dumped, kernels, capsys, flags, code, message):
    capsys.readouterr()
    assert main(["bisect", str(dumped / "base"), "--model", str(dumped / "model"), "-q", *flags]) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


class Doubled(torch.nn.Module):
    """A module that calls a static method, a library function imported by name, and an operator."""

    @staticmethod
    def double(x):
        return 2 * x

    def forward(self, x):
        return torch.ops.aten.neg(torch_relu(self.double(x)))


torch_relu = torch.relu


def triple(x):
    return 3 * x


def triple_in(_module, x):
    return 3 * x


@pytest.mark.parametrize(
    ("function", "other", "value"),
    [
        (f"{__name__}:Doubled.double", "triple", -6.0),
        (f"{__name__}:Doubled.forward", "triple_in", 6.0),
        ("torch:relu", "triple", -12.0),
        ("torch.ops:aten.neg", "triple", 12.0),
    ],
)
def test_switched_kernels_replace_a_function_however_it_is_named(function, other, value):
    model = torch.nn.Sequential(Doubled(), torch.nn.Identity())
    wanted = find_kernels([], [f"{function}={__name__}:{other}"])
    assert wanted == [Kernel(function, function, f"{__name__}:{other}")]
    before = vars(Doubled).copy()
    for paths, expected in ((frozenset(), -4.0), (frozenset({"0"}), value)):
        with switched_kernels(model, wanted, paths) as callers:
            assert model(torch.tensor(2.0)) == expected
        assert callers == {function: ["0"]}
    assert model(torch.tensor(2.0)) == -4
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.relu is torch_relu
    assert vars(Doubled) == before


def test_bisect_command_switches_one_thing(capsys):
    words = ["bisect", "base", "--model", "model"]
    assert main(words) == 2
    assert main([*words, "--reference-dtype", "float32", "--reference-attention", "sdpa"]) == 2
    assert "not allowed with argument" in capsys.readouterr().err


def test_attention_is_named_by_the_innermost_module_with_a_mask():
    masks = dict.fromkeys(["", "model", "model.layers.0", "model.layers.0.attn", "model.layers.0.attn.core"])
    assert attention_modules(masks) == ["model.layers.0.attn.core"]
    with pytest.raises(ConfigError, match="its attention cannot be switched"):
        attention_modules({"": []})
