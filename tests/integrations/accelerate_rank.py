"""A rank of test_accelerate.py, which torchrun starts. Writes each scenario's results to a file.

Argument: a folder, for checkpoints and for `<rank>.json`.
"""

import gc
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import scenarios
import torch
from accelerate import Accelerator
from scenarios import ALGORITHMS, FOLDER, STEPS, STOP, error_of, optimizer_for, threads_since, weights_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from torchbagua.integrations.accelerate import attach


def model_and_optimizer(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer, the same on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 30), nn.BatchNorm1d(30), nn.Tanh(), nn.Linear(30, 1))
    return model, optimizer_for(name, model)


def batches(rank: int, steps: Sequence[int]) -> Iterator[torch.Tensor]:
    """Yield data that differ by rank and step."""
    for step in steps:
        yield torch.randn(8, 10, generator=torch.Generator().manual_seed(100 * rank + step))


def prepare(name: str, scaler: torch.amp.GradScaler | None = None, **options: Any) -> Any:
    """Return an accelerator, the model and optimizer that it prepared, and the raw optimizer."""
    accelerator = Accelerator(cpu=True, **{"gradient_accumulation_steps": 1, **options})
    accelerator.scaler = scaler
    raw_model, raw_optimizer = model_and_optimizer(name)
    model, optimizer = accelerator.prepare(raw_model, raw_optimizer)
    return accelerator, model, optimizer, raw_optimizer


def train(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int]) -> None:
    """Train in a loop as in accelerate's documentation."""
    for x in batches(accelerator.process_index, steps):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def plain_loop(name: str) -> dict[str, Any]:
    """Train in the same loop without accelerate."""
    raw_model, optimizer = model_and_optimizer(name)
    model = DistributedDataParallel(raw_model)
    with tb.attach(model, optimizer, ALGORITHMS[name](optimizer)):
        for x in batches(RANK, range(STEPS)):
            model(x).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(model)


def runs() -> dict[str, Any]:
    """Train with every algorithm, with and without accumulation, and in a plain loop."""
    found: dict[str, Any] = {}
    for name in ALGORITHMS:
        found[name] = {"plain": plain_loop(name)}
        for accumulation in (1, 2):
            accelerator, model, optimizer, raw = prepare(name, gradient_accumulation_steps=accumulation)
            counts = scenarios.Counts()
            with attach(accelerator, model, optimizer, ALGORITHMS[name](raw), observers=[counts.recorder]):
                train(accelerator, model, optimizer, range(STEPS))
                during = weights_of(model)
            run = {**counts.result(), "during": during, "weights": weights_of(model)}
            found[name][f"accumulation {accumulation}"] = run
    return found


def resumed() -> dict[str, Any]:
    """Save every algorithm's run in the middle, and resume it."""
    found = {}
    for name in ALGORITHMS:
        folder = FOLDER / name
        accelerator, model, optimizer, raw = prepare(name)
        with attach(accelerator, model, optimizer, ALGORITHMS[name](raw)):
            train(accelerator, model, optimizer, range(STOP))
            saved = weights_of(model)
            accelerator.save_state(str(folder))
            applied = weights_of(model)  # with a round that has ended since the last step; the file may lack it
            accelerator.wait_for_everyone()
            train(accelerator, model, optimizer, range(STOP, STEPS))
            straight = weights_of(model)
        accelerator, model, optimizer, raw = prepare(name)
        with attach(accelerator, model, optimizer, ALGORITHMS[name](raw)):
            train(accelerator, model, optimizer, range(1))
            accelerator.load_state(str(folder))
            loaded = weights_of(model)
            train(accelerator, model, optimizer, range(STOP, STEPS))
            again = weights_of(model)
        own = torch.load(folder / f"torchbagua_{RANK}.pt", weights_only=True)
        found[name] = {"saved": saved, "loaded": loaded, "straight": straight, "again": again, "keys": sorted(own)}
        found[name]["applied"] = applied
    return found


def overflow() -> dict[str, Any]:
    """Train with a GradScaler; only rank 1 has an Inf, in step 2."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    accelerator, model, optimizer, _ = prepare("decentralized", scaler)
    skipped = []
    with attach(accelerator, model, optimizer, "decentralized"):
        for step, x in enumerate(batches(RANK, range(STEPS))):
            optimizer.zero_grad()
            accelerator.backward(model(x).square().mean() * (float("inf") if (RANK, step) == (1, 2) else 1.0))
            optimizer.step()
            skipped.append(optimizer.step_was_skipped)
        scale = scaler.get_scale()
    return {"skipped": skipped, "scale": scale, "weights": weights_of(model)}


def forced_sync() -> dict[str, Any]:
    """Run backward with and without trigger_sync_in_backward, with a weight algorithm."""
    found = {}
    for is_forced in (False, True):
        accelerator, model, optimizer, _ = prepare("decentralized")
        with attach(accelerator, model, optimizer, "decentralized"):
            first, second = batches(RANK, range(2))
            with accelerator.no_sync(model):
                losses = [model(x).square().mean() for x in (first, second)]
            accelerator.backward(losses[0])
            with accelerator.trigger_sync_in_backward(model) if is_forced else nullcontext():
                accelerator.backward(losses[1])
            found[str(is_forced)] = {key: p.grad.flatten().tolist() for key, p in model.module.named_parameters()}
    return found


def switched() -> dict[str, Any]:
    """Train two models in one accelerator, each with its algorithm; one model switches to another algorithm."""
    accelerator, model, optimizer, _ = prepare("decentralized")
    second, second_optimizer = accelerator.prepare(*model_and_optimizer("bytegrad"))
    attach(accelerator, model, optimizer, "bytegrad").detach()
    with (
        attach(accelerator, model, optimizer, "decentralized"),
        attach(accelerator, second, second_optimizer, "decentralized"),
    ):
        train(accelerator, model, optimizer, range(2))
        train(accelerator, second, second_optimizer, range(3))
        saved = [weights_of(model), weights_of(second)]
        accelerator.save_state(str(FOLDER / "two"))
        accelerator.wait_for_everyone()
        train(accelerator, model, optimizer, range(2))
        accelerator.load_state(str(FOLDER / "two"))
        loaded = [weights_of(model), weights_of(second)]
    files = sorted(path.name for path in (FOLDER / "two").glob("*"))
    return {"saved": saved, "loaded": loaded, "files": files}


def freed() -> dict[str, Any]:
    """Prepare another model after free_memory, as find_executable_batch_size does, with a separate GradScaler."""
    accelerator, model, optimizer, raw = prepare("decentralized")
    module = weakref.ref(model.module)
    with attach(accelerator, model, optimizer, "decentralized"):
        train(accelerator, model, optimizer, range(1))
    del model, optimizer, raw
    accelerator.free_memory()
    gc.collect()
    found: dict[str, Any] = {"is freed": module() is None}
    model, optimizer = accelerator.prepare(*model_and_optimizer("decentralized"))
    accelerator.save_state(str(FOLDER / "freed"))
    accelerator.wait_for_everyone()
    accelerator.load_state(str(FOLDER / "freed"))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with attach(accelerator, model, optimizer, "decentralized", grad_scaler=scaler) as attachment:
        found["scaler is taken"] = attachment.rank_state_dict()["grad_scaler"] == scaler.state_dict()
        train(accelerator, model, optimizer, range(1))
        accelerator.save_state(str(FOLDER / "freed"))
        found["saved"] = weights_of(model)
        accelerator.wait_for_everyone()
    accelerator, model, optimizer, _ = prepare("decentralized")
    with attach(accelerator, model, optimizer, "decentralized"):
        accelerator.load_state(str(FOLDER / "freed"))
        found["loaded"] = weights_of(model)
    return found


def install_own_files(accelerator: Accelerator) -> None:
    """Store the models by hooks, as diffusers' scripts do: accelerate then has none left."""

    def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        if accelerator.is_main_process:
            while weights:
                torch.save(models[len(weights) - 1].state_dict(), Path(folder) / f"own{len(weights)}.pt")
                weights.pop()

    def load(models: list[nn.Module], folder: str) -> None:
        while models:
            number = len(models)
            models.pop().load_state_dict(torch.load(Path(folder) / f"own{number}.pt"))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def own_files() -> dict[str, Any]:
    """Save and resume runs with hooks that store the models themselves, registered before and after attach."""
    found: dict[str, Any] = {}
    for name in ("gradient_allreduce", "bytegrad", "decentralized", "diloco"):
        for is_before in (True, False):
            folder = FOLDER / f"own {name} {is_before}"
            outcomes = []
            for is_resumed in (False, True):
                accelerator, model, optimizer, raw = prepare(name)
                if is_before:
                    install_own_files(accelerator)
                with attach(accelerator, model, optimizer, ALGORITHMS[name](raw)) as attachment:
                    if not is_before:
                        install_own_files(accelerator)
                    if is_resumed:
                        train(accelerator, model, optimizer, range(1))
                        accelerator.load_state(str(folder))
                    else:
                        train(accelerator, model, optimizer, range(STOP))
                        with attachment.averaged_weights():
                            mean = weights_of(model)
                        accelerator.save_state(str(folder))
                        accelerator.wait_for_everyone()
                    loaded = [weights_of(model), repr(optimizer.state_dict()), repr(attachment.state_dict())]
                    train(accelerator, model, optimizer, range(STOP, STEPS))
                    outcomes.append([*loaded, weights_of(model)])
            own = {key: value.double().flatten().tolist() for key, value in torch.load(folder / "own1.pt").items()}
            found[f"{name} {is_before}"] = {"outcomes": outcomes, "own": own, "mean": mean}
    return found


def main_process_alone() -> dict[str, Any]:
    """Save on the main process alone, as scripts of diffusers do, and resume; a weight algorithm must not hang."""

    def run(name: str) -> None:
        is_async = name == "async"
        accelerator, model, optimizer, raw = prepare(name)
        timeout = timedelta(seconds=1 if is_async else 20)
        with attach(accelerator, model, optimizer, ALGORITHMS[name](raw), timeout=timeout):
            train(accelerator, model, optimizer, range(2))
            if accelerator.is_main_process:
                accelerator.save_state(str(FOLDER / f"alone {name}"))
            elif is_async:
                time.sleep(2)  # as a barrier after the last step does
            train(accelerator, model, optimizer, range(2, 4))
        accelerator.wait_for_everyone()
        if not is_async:
            accelerator, model, optimizer, raw = prepare(name)
            with attach(accelerator, model, optimizer, ALGORITHMS[name](raw)):
                accelerator.load_state(str(FOLDER / f"alone {name}"))

    found = {}
    for name in ("gradient_allreduce", "bytegrad", "decentralized", "async"):
        found[name] = error_of(lambda name=name: run(name))  # type: ignore[misc]
        if name == "async" and found[name] != "nothing":
            torch.distributed.barrier()
        torch.distributed.barrier()
    return found


def refusals() -> dict[str, str]:
    """Return the errors of refused calls."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = None
    raw_model, raw_optimizer = model_and_optimizer("bytegrad")
    found = {"before prepare": error_of(lambda: attach(accelerator, raw_model, raw_optimizer, "bytegrad"))}
    model, optimizer = accelerator.prepare(raw_model, raw_optimizer)
    _, foreign = model_and_optimizer("bytegrad")
    plain = FOLDER / "plain"
    accelerator.save_state(str(plain))
    accelerator.wait_for_everyone()
    found["no accelerator"] = error_of(lambda: attach(model, model, optimizer, "bytegrad"))
    found["unwrapped"] = error_of(lambda: attach(accelerator, accelerator.unwrap_model(model), optimizer, "bytegrad"))
    found["optimizer"] = error_of(lambda: attach(accelerator, model, foreign, "bytegrad"))
    detached = FOLDER / "detached"
    with attach(accelerator, model, [optimizer], "bytegrad"):
        found["twice"] = error_of(lambda: attach(accelerator, model, optimizer, "bytegrad"))
        found["saved without"] = error_of(lambda: accelerator.load_state(str(plain)))
    accelerator.save_state(str(detached))
    accelerator.wait_for_everyone()
    accelerator.load_state(str(detached))
    with attach(accelerator, model, raw_optimizer, "decentralized"):
        found["saved detached"] = error_of(lambda: accelerator.load_state(str(detached)))
    return found


def exception() -> list[str]:
    """Return the threads that are left after training raises on all ranks."""
    accelerator, model, optimizer, _ = prepare("async")
    before = set(threading.enumerate())
    with suppress(KeyboardInterrupt), attach(accelerator, model, optimizer, ALGORITHMS["async"](optimizer)):
        train(accelerator, model, optimizer, range(2))
        raise KeyboardInterrupt
    return threads_since(before)


if __name__ == "__main__":
    torch.set_num_threads(1)
    RANK = Accelerator(cpu=True).process_index
    first = (runs, resumed, own_files, main_process_alone, overflow, forced_sync)
    scenarios.run(RANK, (*first, switched, freed, refusals, exception))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
