"""Record explicit values with the process-wide dumper: `from tapscope import dumper`."""

import sys
from pathlib import Path

import torch
from torch import nn

from tapscope import dumper, open_run


class Layer(nn.Module):
    """A user-defined layer with intermediate values that no module returns."""

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id, self.proj = layer_id, nn.Linear(16, 16)

    @dumper.ctx(lambda self: {"layer_id": self.layer_id})
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend over ``x``: [t, h], returning a tensor of the same shape."""
        scores = self.proj(x) @ x.T / 4
        dumper.dump("scores", scores, dims="t k")  # layers.N:tap[scores]
        dumper.dump("entropy", lambda: -(scores.softmax(-1) * scores.log_softmax(-1)).sum(-1), dims="t", grad=False)
        return x + scores.softmax(-1) @ x


def main(folder: str = "explicit-runs") -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(number) for number in range(3)))
    x = torch.randn(8, 16)

    with dumper.capture_output(rules=["layers.1:tap[scores]=full"], keep="off") as seen:  # in memory; no run is written
        model(x)
    print("in memory:", seen.sites, tuple(seen.values("scores")[0].shape))

    dumper.start(dir=folder, keep="stats", rules=["layers.1:*=full", "*:tap[scores].grad=stats"], cleanup_previous=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dumper.dump("loss", loss)
        dumper.step()  # ends the iteration
    path = Path(dumper.get_state()["run"])
    dumper.close()

    run = open_run(path)
    for record in run.select(["*:tap*"], steps=[0]):
        print(record.key.site, record.key.pass_, record.shape, f"mean {record.stats.mean:.3f}", record.dims or "")
    print(f"next: tapscope view {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
