"""A rank of test_accelerate.py, which torchrun starts. Writes each scenario's results to a file.

Argument: a folder, for checkpoints and for `<rank>.json`.
"""

import gc
import json
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from torchbagua.integrations.accelerate import attach

STEPS, STOP = 6, 3
FOLDER = Path(sys.argv[1])

ALGORITHMS: dict[str, Callable[[torch.optim.Optimizer], tb.Algorithm]] = {
    "gradient_allreduce": lambda optimizer: tb.GradientAllReduceAlgorithm(),
    "bytegrad": lambda optimizer: tb.ByteGradAlgorithm(error_feedback=True),
    "qadam": lambda optimizer: tb.QAdamAlgorithm(optimizer, error_feedback=True),
    "decentralized": lambda optimizer: tb.DecentralizedAlgorithm(peer_selection_mode="shift_one"),
    "low_precision_decentralized": lambda optimizer: tb.LowPrecisionDecentralizedAlgorithm(),
    "diloco": lambda optimizer: tb.DiLoCoAlgorithm(2, delay=1),
    "async": lambda optimizer: tb.AsyncModelAverageAlgorithm(sync_interval_ms=5),
}


def model_and_optimizer(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer, the same on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 30), nn.BatchNorm1d(30), nn.Tanh(), nn.Linear(30, 1))
    if name == "qadam":
        return model, tb.QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def batches(rank: int, steps: Sequence[int]) -> Iterator[torch.Tensor]:
    """Yield data that differ by rank and step."""
    for step in steps:
        yield torch.randn(8, 10, generator=torch.Generator().manual_seed(100 * rank + step))


def weights_of(model: nn.Module) -> dict[str, list[float]]:
    """Return all tensors of the state dict as numbers that JSON stores exactly."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {key: value.double().flatten().tolist() for key, value in inner.state_dict().items()}


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
    found = {}
    for name in ALGORITHMS:
        found[name] = {"plain": plain_loop(name)}
        for accumulation in (1, 2):
            accelerator, model, optimizer, raw = prepare(name, gradient_accumulation_steps=accumulation)
            recorder, threads = tb.observe.Recorder(), set(threading.enumerate())
            with attach(accelerator, model, optimizer, ALGORITHMS[name](raw), observers=[recorder]):
                train(accelerator, model, optimizer, range(STEPS))
                during = weights_of(model)
            found[name][f"accumulation {accumulation}"] = {
                "steps": sum(event.phase == "step" for event in recorder.events),
                "buckets": sum(event.phase == "bucket" for event in recorder.events),
                "during": during,
                "weights": weights_of(model),
                "threads": [thread.name for thread in threading.enumerate() if thread not in threads],
            }
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
            if is_forced:
                with accelerator.trigger_sync_in_backward(model):
                    accelerator.backward(losses[1])
            else:
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


class OwnFiles:
    """Hooks with which a program stores its models itself, as diffusers' scripts do: accelerate then has none left."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.install()

    def install(self) -> None:
        self._accelerator.register_save_state_pre_hook(self.save)
        self._accelerator.register_load_state_pre_hook(self.load)

    def save(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        if self._accelerator.is_main_process:
            while weights:
                torch.save(models[len(weights) - 1].state_dict(), Path(folder) / f"own{len(weights)}.pt")
                weights.pop()

    def load(self, models: list[nn.Module], folder: str) -> None:
        while models:
            number = len(models)
            models.pop().load_state_dict(torch.load(Path(folder) / f"own{number}.pt"))


def own_files() -> dict[str, Any]:
    """Save and resume runs with hooks that store the models themselves, registered before and after attach."""
    found: dict[str, Any] = {}
    for name in ("gradient_allreduce", "bytegrad", "decentralized", "diloco"):
        for is_before in (True, False):
            folder = FOLDER / f"own {name} {is_before}"
            outcomes = []
            for is_resumed in (False, True):
                accelerator, model, optimizer, raw = prepare(name)
                hooks = OwnFiles(accelerator) if is_before else None
                with attach(accelerator, model, optimizer, ALGORITHMS[name](raw)) as attachment:
                    hooks = hooks or OwnFiles(accelerator)
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
    found = {}
    for name in ("gradient_allreduce", "bytegrad", "decentralized", "async"):
        folder = FOLDER / f"alone {name}"
        accelerator, model, optimizer, raw = prepare(name)
        is_async = name == "async"
        try:
            with attach(
                accelerator, model, optimizer, ALGORITHMS[name](raw), timeout=timedelta(seconds=1 if is_async else 20)
            ):
                train(accelerator, model, optimizer, range(2))
                if accelerator.is_main_process:
                    accelerator.save_state(str(folder))
                elif is_async:
                    time.sleep(2)  # as a barrier after the last step does
                train(accelerator, model, optimizer, range(2, 4))
            accelerator.wait_for_everyone()
            if not is_async:
                accelerator, model, optimizer, raw = prepare(name)
                with attach(accelerator, model, optimizer, ALGORITHMS[name](raw)):
                    accelerator.load_state(str(folder))
            found[name] = "ok"
        except (RuntimeError, FileNotFoundError) as error:
            found[name] = f"{type(error).__name__}: {error}"
            if is_async:
                accelerator.wait_for_everyone()
        accelerator.wait_for_everyone()
    return found


def error_of(call: Callable[[], Any]) -> str:
    """Return the error that the call raises, as text."""
    try:
        call()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


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
    try:
        with attach(accelerator, model, optimizer, ALGORITHMS["async"](optimizer)):
            train(accelerator, model, optimizer, range(2))
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    return [thread.name for thread in threading.enumerate() if thread not in before]


if __name__ == "__main__":
    torch.set_num_threads(1)
    RANK = Accelerator(cpu=True).process_index
    found = {}
    for scenario in (
        *(runs, resumed, own_files, main_process_alone, overflow, forced_sync),
        *(switched, freed, refusals, exception),
    ):
        print(f"rank {RANK}: {scenario.__name__}", flush=True)
        found[scenario.__name__] = scenario()
    (FOLDER / f"{RANK}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
