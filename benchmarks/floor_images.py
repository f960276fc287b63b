"""Verdicts on convolutional networks: float32 against bfloat16, healthy and with one bug.

    python -m benchmarks.floor_images --cache DIR [--models LIST] [--weights LIST] [--seeds LIST] [--bugs]
                                      [--without PART]

Needs torchvision for ResNet, MobileNet and others; the U-Net is defined here. Weights are random: ``init`` as
initialized by the constructor, ``train`` the same with batch statistics, ``calibrated`` with statistics of four batches
and scattered norm weights, ``wide`` with channels of very unequal size, as after training. Images have a 1/f spectrum.
``@128x1`` after a name means 128 pixels and a batch of 1; the default is 64 pixels and a batch of 2. Runs are recorded
once and kept in DIR, about 10 MB each. ``--without`` disables a part of the noise floor: ``pointwise_relu``,
``inherited_activations`` or ``norms_on_the_path``.
"""

import argparse
import copy
import json
import logging
import random
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tapscope import Dumper

Harm = Callable[[Any, random.Random], None]
HEALTHY = "healthy"


# ---- models


class Block(nn.Module):
    """Two convolutions, each with a batch norm and a ReLU."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width_in, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.act1, self.act2 = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - as torch defines it
        out: Tensor = self.act2(self.norm2(self.conv2(self.act1(self.norm1(self.conv1(x))))))
        return out


class UNet(nn.Module):
    """U-Net with three levels and concatenated skip connections."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 32, 64, 128)
        self.down = nn.ModuleList(Block(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.pool = nn.MaxPool2d(2)
        up = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in up)
        self.merge = nn.ModuleList(Block(2 * b, b) for _, b in up)
        self.head = nn.Conv2d(widths[0], 4, 1)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - as torch defines it
        skips = []
        for i, block in enumerate(self.down):
            x = block(self.pool(x) if i else x)
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, skips[-2::-1], strict=True):
            x = merge(torch.cat([skip, up(x)], 1))
        out: Tensor = self.head(x)
        return out


def pictures(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Return random images [count, 3, size, size] with a 1/f spectrum and a mean per channel."""
    frequency = torch.fft.fftfreq(size)
    radius = (frequency[:, None] ** 2 + frequency[None] ** 2).sqrt() + 1.0 / size
    noise = torch.fft.fft2(torch.randn(count, 3, size, size, generator=generator))
    x = torch.fft.ifft2(noise / radius).real
    return x / x.std((2, 3), keepdim=True) + 0.7 * torch.randn(count, 3, 1, 1, generator=generator)


def make(name: str, weights: str, seed: int) -> tuple[nn.Module, Tensor]:
    """Return a model and its input."""
    style, _, shape = weights.partition("@")
    size, batch = map(int, shape.split("x")) if shape else (64, 2)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    if name == "unet":
        model: nn.Module = UNet()
    else:
        from torchvision import models  # type: ignore[import-not-found,unused-ignore]

        model = models.get_model(name, weights=None)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    if style in ("calibrated", "wide"):
        for norm in norms:
            norm.momentum = None  # statistics are the mean over the batches
            nn.init.normal_(norm.weight, 1.0, 0.2)
            nn.init.normal_(norm.bias, 0.0, 0.3)
            if style == "wide":
                norm.weight.data = 0.5 * torch.exp(0.6 * torch.randn_like(norm.weight))
                nn.init.normal_(norm.bias, -0.15, 0.4)
        for conv in convolutions(model) if style == "wide" else ():
            conv.weight.data *= torch.exp(0.5 * torch.randn(len(conv.weight), 1, 1, 1))
        with torch.no_grad():
            for _ in range(4):
                model.train()(pictures(8, size, generator))
    return model.train(style == "train"), pictures(batch, size, generator)


def convolutions(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, CONVOLUTION)]


# ---- bugs

CONVOLUTION, NORM = (nn.Conv2d, nn.ConvTranspose2d), (nn.BatchNorm2d,)
ACTIVATION = (nn.ReLU, nn.ReLU6, nn.Hardswish, nn.SiLU)


def _channels(module: Any) -> Tensor:
    """Return a view of the weight with output channels first."""
    weight: Tensor = module.weight.data
    return weight.transpose(0, 1) if isinstance(module, nn.ConvTranspose2d) else weight


def _typical(module: Any) -> int:
    """Return the channel with the median weight norm."""
    sizes = _channels(module).flatten(1).norm(dim=1) if module.weight.dim() > 1 else module.weight.data.abs()
    return int(sizes.argsort()[len(sizes) // 2])


def _channel(factor: float) -> Harm:
    def harm(module: Any, rng: random.Random) -> None:
        _channels(module)[_typical(module)] *= factor

    return harm


def _noise(share: float) -> Harm:
    def harm(module: Any, rng: random.Random) -> None:
        module.weight.data += share * module.weight.data.std() * torch.randn_like(module.weight)

    return harm


def _weight(module: Any, rng: random.Random) -> None:
    module.weight.data *= 1.03


def _swap(module: Any, rng: random.Random) -> None:
    at = rng.randrange(len(module.weight) - 1)
    module.weight.data[[at, at + 1]] = module.weight.data[[at + 1, at]]


def _bias(module: Any, rng: random.Random) -> None:
    module.bias.data += 0.05


def _one_bias(module: Any, rng: random.Random) -> None:
    module.bias.data[_typical(module)] += 0.3


def _eps(module: Any, rng: random.Random) -> None:
    module.eps = 0.05


def _mean(module: Any, rng: random.Random) -> None:
    at = _typical(module)
    module.running_mean[at] += 0.3 * module.running_var[at].sqrt()


def _padding(module: Any, rng: random.Random) -> None:
    if not isinstance(module, nn.Conv2d) or not module.padding[0]:
        raise LookupError("no padding")
    module.padding_mode = "reflect"
    module._reversed_padding_repeated_twice = [module.padding[1]] * 2 + [module.padding[0]] * 2  # type: ignore[list-item]


def _leaky(module: Any, rng: random.Random) -> None:
    module.forward = lambda x: nn.functional.leaky_relu(x, 0.05)


def _tap(module: Any, rng: random.Random) -> None:
    if isinstance(module, nn.ConvTranspose2d) or module.kernel_size[0] < 3:
        raise LookupError("no taps")
    module.weight.data[:, :, 0, 0] = 0.0


BUGS: dict[str, tuple[tuple[Any, ...], Harm]] = {
    "channel x1.05": (CONVOLUTION, _channel(1.05)),
    "channel x1.15": (CONVOLUTION, _channel(1.15)),
    "channel dead": (CONVOLUTION, _channel(0.0)),
    "gamma x1.1": (NORM, _channel(1.1)),
    "weight x1.03": (CONVOLUTION, _weight),
    "noise 5%": (CONVOLUTION, _noise(0.05)),
    "noise 20%": (CONVOLUTION, _noise(0.2)),
    "swap": (CONVOLUTION, _swap),
    "bias +0.05": (NORM, _bias),
    "one bias +0.3": (NORM, _one_bias),
    "eps": (NORM, _eps),
    "mean off": (NORM, _mean),
    "padding": (CONVOLUTION, _padding),
    "leaky": (ACTIVATION, _leaky),
    "tap zeroed": (CONVOLUTION, _tap),
}


def harmed(model: nn.Module, bug: str, key: str) -> tuple[str, nn.Module] | None:
    """Return (path of the faulty module, model); None if no module can have the bug."""
    kinds, harm = BUGS[bug]
    rng = random.Random(f"{bug}{key}")
    other = copy.deepcopy(model)
    sites = [(name, module) for name, module in other.named_modules() if isinstance(module, kinds)]
    rng.shuffle(sites)
    for name, module in sites:
        try:
            with torch.no_grad():
                harm(module, rng)
        except LookupError:
            continue
        return name, other
    return None


# ---- recording and judging


def record(root: Path, name: str, weights: str, seed: int, *, bugs: bool) -> Iterator[dict[str, Any]]:
    """Record the missing runs of one model in DIR; yield its pairs."""
    key = f"{name}-{weights}-{seed}"
    known = root / key / f"pairs-{'bugs' if bugs else HEALTHY}.json"
    if known.exists():
        yield from json.loads(known.read_text())
        return
    pairs = list(_recorded(root, key, *make(name, weights, seed), (list(BUGS)[seed % 2 :: 2] if bugs else [])))
    known.write_text(json.dumps(pairs))
    yield from pairs


def _recorded(root: Path, key: str, model: nn.Module, x: Tensor, bugs: Sequence[str]) -> Iterator[dict[str, Any]]:
    if not (root / key / "base").exists():
        capture(model, x, root / key / "base", torch.float32)
    cases: list[tuple[str, str | None, nn.Module]] = [(HEALTHY, None, model)]
    for bug in bugs:
        if (made := harmed(model, bug, key)) is not None:
            cases.append((bug, *made))
    for what, expect, other in cases:
        target = root / key / ("bf16" if expect is None else "bug-" + what.replace(" ", "_").replace("%", ""))
        if not target.exists():
            try:
                capture(other, x, target, torch.bfloat16)
            except RuntimeError as error:  # the image may be smaller than the padding
                print(f"left out: {key}: {what}: {error}", flush=True)
                continue
        sides = {"base": str(root / key / "base"), "target": str(target)}
        yield {"name": f"{key}: {what}", **sides, "expect": expect}


def capture(model: nn.Module, x: Tensor, out: Path, dtype: torch.dtype) -> None:
    model = copy.deepcopy(model).to(dtype)
    torch.manual_seed(0)  # dropout
    with Dumper(model, out, keep="full", block_timeout_s=120.0), torch.no_grad():
        model(x.to(dtype))


def outcome(pair: dict[str, Any]) -> tuple[str, str]:
    """Return (outcome, description of the first divergence)."""
    from tapscope.comparator import compare

    report = compare(Path(pair["base"]), Path(pair["target"]))
    first = report.first_divergence
    said = "" if first is None else f"{first.module} {first.finding.test} {first.finding.ratio:.2f} x"
    if pair["expect"] is None:
        return ("flagged" if report.exit_code else "clean"), said
    if first is None:
        return "missed", said
    return ("named" if first.module == pair["expect"] else "misnamed"), said


PARTS = {
    "pointwise_relu": ("tapscope.comparator.noise_floor.node.Node.is_pointwise", property(lambda self: _old(self))),
    "inherited_activations": (
        "tapscope.comparator.explain.recomputed_activations.inherited_activations",
        lambda *_: frozenset(),
    ),
    "norms_on_the_path": ("tapscope.comparator.noise_floor.node.Node.subtracts_mean", False),
}


def _old(node: Any) -> bool:
    from tapscope.comparator.noise_floor.node import _is_pointwise

    return not node.has_params and "relu" not in node.cls.lower() and _is_pointwise(node.cls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, metavar="DIR", help="where the runs are kept")
    parser.add_argument("--models", default="unet,resnet18,resnet50,mobilenet_v2,mobilenet_v3_small", metavar="LIST")
    parser.add_argument("--weights", default="init,calibrated,wide", metavar="LIST")
    parser.add_argument("--seeds", default="0-2", metavar="LIST")
    parser.add_argument("--bugs", action="store_true", help="also inject half of the bugs into each model")
    parser.add_argument(
        "--without", choices=PARTS, action="append", default=[], help="disable a part of the noise floor"
    )
    args = parser.parse_args()
    from tapscope.core.site import parse_ranges

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    with ExitStack() as stack:
        stack.enter_context(mock.patch("tapscope.comparator.explain.explain.explain", lambda found, context: found))
        for part in args.without:
            stack.enter_context(mock.patch(*PARTS[part]))
        for name in args.models.split(","):
            for weights in args.weights.split(","):
                for seed in sorted(parse_ranges(args.seeds)):
                    for pair in record(args.cache, name, weights, seed, bugs=args.bugs):
                        result, said = outcome(pair)
                        print(json.dumps([pair["name"], pair["expect"], result, said]), flush=True)
                        for group in (f"{name}, {weights}", "all"):
                            counts[group][result] += 1
    print("\n| | healthy | flagged | bugs | named | missed |\n|---|---|---|---|---|---|")
    for group, n in counts.items():
        bugs = n["named"] + n["missed"] + n["misnamed"]
        print(f"| {group} | {n['clean'] + n['flagged']} | {n['flagged']} | {bugs} | {n['named']} | {n['missed']} |")


if __name__ == "__main__":
    main()
