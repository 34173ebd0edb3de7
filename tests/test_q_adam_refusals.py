"""QAdam with ranks or arguments that do not fit, and with an impl that was deleted."""

import copy
import gc
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from q_adam_life import NUM_WARM, Trainer
from ranks import run_ranks
from torchbagua._torch import forget_active_ddp
from training import Tower, build


def test_refusals() -> None:
    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, build(Tower))
        with pytest.raises(ValueError, match="q_adam_optimizer must be a QAdamOptimizer, got SGD"):
            tb.QAdamAlgorithm(torch.optim.SGD(trainer.ddp.parameters()))
        unattached = tb.QAdamOptimizer(trainer.ddp.parameters())
        with pytest.raises(ValueError, match="q_adam_optimizer must be the attached optimizer, got another optimizer"):
            tb.attach(trainer.ddp, trainer.optimizer, tb.QAdamAlgorithm(unattached))
        with (
            tb.attach(trainer.ddp, trainer.optimizer, tb.QAdamAlgorithm(trainer.optimizer)),
            pytest.raises(ValueError, match="q_adam_optimizer is already attached; detach it first"),
        ):
            tb.QAdamAlgorithm(trainer.optimizer).reify(group)
        assert not trainer.optimizer.has_averager
        with pytest.raises(ValueError, match=r"needs exactly one QAdamOptimizer, got \['SGD'\]"):
            tb.attach(trainer.ddp, torch.optim.SGD(trainer.ddp.parameters()), "qadam")
        with tb.attach(trainer.ddp, trainer.optimizer, "qadam") as attachment:
            assert attachment.algorithm == tb.QAdamAlgorithm(trainer.optimizer)

    run_ranks(1, body)


def test_ranks_with_different_warm_ups() -> None:
    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, build(Tower), warmup_steps=3 + group.rank())
        with pytest.raises(ValueError, match=r"disagree on QAdamAlgorithm's argument q_adam_optimizer \(warmup_steps"):
            tb.QAdamAlgorithm(trainer.optimizer).reify(group)

    run_ranks(2, body)


def test_ranks_with_different_numbers_of_updates() -> None:
    """As if only rank 0 had loaded the optimizer's state."""

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, build(Tower))
        if group.rank() == 0:
            for parameter in trainer.named.values():
                parameter.grad = torch.ones_like(parameter)
            trainer.optimizer.step()
        with pytest.raises(ValueError, match=r"q_adam_optimizer \(updates of its parameters so far\)"):
            tb.QAdamAlgorithm(trainer.optimizer).reify(group)

    run_ranks(2, body)


def test_a_rank_that_skips_a_step_in_the_warm_up() -> None:
    """It would send gradients while others send momenta; messages of different lengths would end the process."""

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, build(Tower))
        with tb.attach(trainer.ddp, trainer.optimizer, tb.QAdamAlgorithm(trainer.optimizer)):
            for step in range(NUM_WARM - 1):
                trainer.optimizer.zero_grad()
                trainer.ddp(torch.ones(6, 10), 0).sum().backward()
                if (group.rank(), step) != (1, NUM_WARM - 2):
                    trainer.optimizer.step()
            message = f"after {NUM_WARM - 1} optimizer steps; rank 1 .* after {NUM_WARM - 2} optimizer steps"
            with pytest.raises(RuntimeError, match=message):
                trainer.ddp(torch.ones(6, 10), 0).sum().backward()

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("saved_after", "message"),
    [
        (1, r"parameters past their warm-up: rank 0 has 0, rank 1 has 6\."),
        (NUM_WARM, r"updates of parameters past their warm-up: rank 0 has 18, rank 1 has 30\."),
    ],
)
def test_a_state_that_one_rank_alone_has_loaded_after_the_warm_up(saved_after: int, message: str) -> None:
    """From the warm-up: it would send gradients while others send momenta. From a later step: its momenta are old."""
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, model)
        with tb.attach(trainer.ddp, trainer.optimizer, tb.QAdamAlgorithm(trainer.optimizer)):
            for step in range(NUM_WARM + 2):
                if step == saved_after:
                    state = copy.deepcopy(trainer.optimizer.state_dict())
                trainer.step()
            if group.rank() == 0:
                trainer.optimizer.load_state_dict(state)
            with pytest.raises(RuntimeError, match=message):
                trainer.step()

    run_ranks(2, body)


def test_nothing_keeps_the_impl_of_a_deleted_hook_alive() -> None:
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> bool:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        optimizer = tb.QAdamOptimizer(ddp.parameters(), warmup_steps=1)
        ddp.register_comm_hook(tb.QAdamAlgorithm(optimizer).reify(group), tb.comm_hook)
        ddp(torch.ones(2, 10), 0).sum().backward()
        assert optimizer.has_averager
        del ddp
        deadline_s = time.monotonic() + 20
        while optimizer.has_averager and time.monotonic() < deadline_s:  # until the lane's thread drops the last job
            forget_active_ddp()  # shared by all ranks, which are threads here (torch 2.13)
            gc.collect()
            time.sleep(0.01)
        return optimizer.has_averager

    assert run_ranks(2, body) == [False, False]
