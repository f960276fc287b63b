"""A small residual network of convolutions, batch norms and ReLUs, and its training; contains no tests."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from tapscope import Dumper


class Block(nn.Module):
    """Two convolutions around a shortcut; the second ReLU is a function, not a module."""

    def __init__(self, num_inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_inputs, channels, 3, stride, 1, bias=False)
        self.bn1, self.act = nn.BatchNorm2d(channels), nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)
        self.down: nn.Module = nn.Identity()
        if stride > 1 or num_inputs != channels:
            self.down = nn.Sequential(nn.Conv2d(num_inputs, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.act(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.down(x))


class ResidualNet(nn.Module):
    """An image classifier; each block after the first doubles the channels and halves the size."""

    def __init__(self, channels: Sequence[int]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels[0], 3, 1, 1, bias=False)
        self.bn, self.relu = nn.BatchNorm2d(channels[0]), nn.ReLU()
        sizes = zip([channels[0], *channels], channels, strict=False)
        self.blocks = nn.ModuleList(Block(one, two, 1 if one == two else 2) for one, two in sizes)
        self.fc = nn.Linear(channels[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.fc(x.mean((2, 3)))
        return found


def train_residual_net(
    out: Path,
    seed: int,
    *,
    channels: Sequence[int] = (16, 32, 64),
    shape: tuple[int, int] = (16, 16),
    mean: float = 0.0,
    channels_last: bool = False,
    patch: Callable[[ResidualNet], None] | None = None,
) -> Path:
    """Record a forward and a backward pass on random images, ``shape`` = (number, size).

    ``channels_last`` changes the order of sums; ``patch`` modifies the model first. Runs on one thread, because the
    order of sums determines which activations change sign.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, count, size = ResidualNet(channels).train(), *shape
    images, labels = torch.randn(count, 3, size, size) + mean, torch.randint(0, 10, (count,))
    if channels_last:
        model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    if patch is not None:
        patch(model)
    with Dumper(model, out, keep="full", grads=True, params=True) as dumper, dumper.step():
        nn.functional.cross_entropy(model(images), labels).backward()
    torch.set_num_threads(threads)
    return out
