"""EMA and SWA of weights that differ between ranks are averaged over them."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torchbagua as tb
from ranks import run_ranks
from training import build

ALGORITHMS: dict[str, tb.Algorithm] = {
    "decentralized": tb.DecentralizedAlgorithm(),
    "low_precision": tb.LowPrecisionDecentralizedAlgorithm(),
    "async": tb.AsyncModelAverageAlgorithm(sync_interval_ms=5),
    "diloco": tb.DiLoCoAlgorithm(inner_steps=3),
}


class Normed(nn.Sequential):
    """A model with buffers, and with shapes that no other test uses."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(7, 13), nn.BatchNorm1d(13), nn.Linear(13, 3))


class Loop:
    """The training loop of a rank."""

    def __init__(self, group: dist.ProcessGroup, model: nn.Module) -> None:
        self.group = group
        self.ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        self.data = torch.Generator().manual_seed(group.rank())

    def attach(self, algorithm: tb.Algorithm | str) -> tb.Attachment:
        return tb.attach(self.ddp, self.optimizer, algorithm, process_group=tb.BaguaProcessGroup(self.group))

    def ema(self) -> AveragedModel:
        return AveragedModel(self.ddp.module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.ddp(torch.randn(8, 7, generator=self.data)).square().mean().backward()
        self.optimizer.step()


def values_of(module: nn.Module) -> torch.Tensor:
    tensors = [*module.parameters(), *(buffer for buffer in module.buffers() if buffer.is_floating_point())]
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_average_also_gives_the_mean_over_ranks(name: str) -> None:
    model = build(Normed)

    @dataclass
    class Seen:
        own: torch.Tensor
        within: torch.Tensor
        after: torch.Tensor
        last_own: torch.Tensor
        last: torch.Tensor

    def body(group: dist.ProcessGroup) -> Seen:
        loop = Loop(group, model)
        ema = loop.ema()
        with loop.attach(ALGORITHMS[name]) as attachment:
            attachment.average_also(ema)
            for _ in range(3):
                loop.step()
                ema.update_parameters(loop.ddp.module)
            own = values_of(ema).clone()
            with attachment.averaged_weights():
                within = values_of(ema).clone()
            after = values_of(ema).clone()
            loop.step()
            ema.update_parameters(loop.ddp.module)
            last_own = values_of(ema).clone()
        return Seen(own, within, after, last_own, values_of(ema))

    seen = run_ranks(3, body)
    assert not torch.equal(seen[0].own, seen[1].own)
    for values in seen:
        # The expected sums are in float32 and in rank order, too.
        assert torch.equal(values.within, (seen[0].own + seen[1].own + seen[2].own) / 3)
        assert torch.equal(values.after, values.within)
        assert torch.equal(values.last, (seen[0].last_own + seen[1].last_own + seen[2].last_own) / 3)
    assert not torch.equal(seen[0].last_own, seen[1].last_own)


@pytest.mark.parametrize("name", ["decentralized", "async"])
def test_ranks_that_give_different_modules_raise(name: str) -> None:
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> str:
        loop = Loop(group, model)
        attachment = loop.attach(ALGORITHMS[name])
        try:
            attachment.average_also(nn.Linear(2, 2 + group.rank()))
        except RuntimeError as error:
            return str(error)
        finally:
            attachment.__exit__(RuntimeError, None, None)
        return ""

    for message in run_ranks(2, body):
        assert "the fingerprint of the other tensors to average" in message


def test_refused() -> None:
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, model)
        module: Any = "ema"
        with loop.attach("decentralized") as attachment:
            with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module or an .*, got str"):
                attachment.average_also(module)
            with attachment.averaged_weights(), pytest.raises(RuntimeError, match="within averaged_weights"):
                attachment.average_also(loop.ema())
        with pytest.raises(RuntimeError, match="was detached"):
            attachment.average_also(loop.ema())

    run_ranks(2, body)
