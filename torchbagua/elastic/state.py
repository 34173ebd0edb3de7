"""The state with which all ranks of a new generation train on: compared, and sent to the ranks that lack it.

Execution order of `synchronize`, on all ranks:

1. Each rank writes its number of steps and digests of its state to the store of the generation, and reads the others'.
2. The lowest of the ranks that have taken the most steps is the *source*.
3. The source sends its state to the ranks whose steps or digest differ, and its buffers to those whose buffers differ.
   Ranks that a weight algorithm trains keep their own weights, except those that have none yet. Nobody else sends.

Of the algorithm's state, ranks compare and send what is equal on all of them, see torchbagua.runtime.rank_state.
"""

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torchbagua.runtime.rank_state import OF_WEIGHTS, of_all_ranks, remaining
from torchbagua.transport.base import bytes_of
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.store_requests import StoreRequests

_TAG = 32_766  # another than that of broadcasts


class Stateful(Protocol):
    """An object with a state: a scheduler, a GradScaler, a running mean of the weights."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


@dataclass
class TrainingState:
    """What ranks have in common: the model, its optimizers, and further objects.

    Attributes:
        model: without a DDP.
        optimizers: of its parameters.
        objects: by name, of the user, and the sampler.
        averages_weights: whether ranks have different weights.
        num_steps: the optimizer steps that this rank has taken; -1 before it has the state of the job.
        algorithm: what remains of the algorithm's state on this rank after its last generation; None before.
    """

    model: torch.nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    objects: Mapping[str, Stateful]
    averages_weights: bool
    num_steps: int = -1
    algorithm: Mapping[str, Any] | None = None

    def keep_algorithm(self, state: Mapping[str, Any]) -> None:
        """Keep what remains of the algorithm's state when the ranks change."""
        self.algorithm = remaining(state) or None

    def forget(self) -> None:
        """Receive the state of the job instead of continuing from this one."""
        self.num_steps, self.algorithm = -1, None

    def begin(self) -> None:
        """Begin a training, instead of receiving the state of one."""
        self.num_steps = 0

    def count_step(self) -> None:
        """Count a step of all optimizers."""
        self.num_steps += 1

    def summary(self) -> "Summary":
        """Return what ranks compare."""
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        return Summary(
            self.num_steps,
            "" if self.averages_weights else digest([*self.model.parameters(), *_tensors_of(optimizers)]),
            "" if self.averages_weights else digest(self.model.buffers()),
            "" if self.algorithm is None else digest_of_tree(of_all_ranks(self.algorithm)),
        )

    def save(self) -> dict[str, Any]:
        """Return the state; its tensors are no copies."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "of weights": {name: value for name, value in (self.algorithm or {}).items() if name in OF_WEIGHTS},
            **self.save_objects(),
        }

    def save_objects(self) -> dict[str, Any]:
        """Return the state without weights, buffers and optimizers."""
        return {
            "objects": {name: each.state_dict() for name, each in self.objects.items()},
            "algorithm": None if self.algorithm is None else of_all_ranks(self.algorithm),
            "num_steps": self.num_steps,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `save` or `save_objects` has returned on another rank."""
        if "model" in state:
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        for name, each in self.objects.items():
            each.load_state_dict(state["objects"][name])
        if state["algorithm"] is None:
            self.algorithm = None
        else:
            self.algorithm = {**(self.algorithm or {}), **state.get("of weights", {}), **state["algorithm"]}
        self.num_steps = state["num_steps"]


@dataclass(frozen=True)
class Summary:
    """What ranks compare of their states: the steps, and digests of weights with optimizers, buffers and algorithm."""

    num_steps: int
    weights: str
    buffers: str
    algorithm: str


@dataclass(frozen=True)
class Plan:
    """Who sends what. The same on all ranks.

    Attributes:
        source: the rank that sends.
        of_all: the ranks that need its whole state.
        of_objects: the ranks that need all but weights and optimizers.
        of_buffers: the ranks that need its buffers.
    """

    source: int
    of_all: tuple[int, ...]
    of_objects: tuple[int, ...]
    of_buffers: tuple[int, ...]

    @classmethod
    def of(cls, summaries: Sequence[Summary]) -> "Plan":
        """Return the plan for the summaries of all ranks."""
        newest = max(summary.num_steps for summary in summaries)
        source = next(rank for rank, summary in enumerate(summaries) if summary.num_steps == newest)
        best = summaries[source]
        of_all, of_objects, of_buffers = list[int](), list[int](), list[int]()
        for rank, summary in enumerate(summaries):
            if summary.num_steps < 0 < newest + 1 or summary.weights != best.weights:
                of_all.append(rank)
            elif summary.num_steps != newest:
                (of_objects if not best.weights else of_all).append(rank)
            else:
                if summary.algorithm != best.algorithm:
                    of_objects.append(rank)
                if summary.buffers != best.buffers:
                    of_buffers.append(rank)
        return cls(source, tuple(of_all), tuple(of_objects), tuple(of_buffers))


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of the bytes of tensors, which are on the CPU."""
    hashed = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        values: Any = bytes_of(tensor.detach().contiguous()).numpy()
        hashed.update(values)
    return hashed.hexdigest()


def digest_of_tree(tree: Any) -> str:
    """Return a digest of a tree of tensors and other values."""
    shape = _map_leaves(tree, torch.Tensor, lambda tensor: _Place(tuple(tensor.shape), tensor.dtype))
    return digest([torch.tensor(list(repr(shape).encode()), dtype=torch.uint8), *_tensors_of(tree)])


def synchronize(
    state: TrainingState, requests: StoreRequests, rank: int, size: int, connect: Callable[[], Communicator]
) -> int:
    """Give all ranks the state of the one that has taken the most steps. Return the bytes that this rank has sent.

    Args:
        state: of this rank.
        requests: to the store of the generation.
        rank, size: of this rank in the generation.
        connect: connects all ranks; called only if anything is sent. Collective.
    """
    requests.set(f"state/{rank}", json.dumps(vars(state.summary())))
    summaries = [Summary(**json.loads(text)) for text in requests.read_texts([f"state/{r}" for r in range(size)])]
    plan = Plan.of(summaries)
    parts: list[tuple[tuple[int, ...], Callable[[], Any], Callable[[Any], object]]] = [
        (plan.of_all, state.save, state.load),
        (plan.of_objects, state.save_objects, state.load),
        (plan.of_buffers, lambda: list(state.model.buffers()), lambda buffers: _copy(state.model.buffers(), buffers)),
    ]
    if not any(receivers for receivers, _, _ in parts):
        return 0
    world, num_sent = connect(), 0
    for receivers, save, load in parts:
        if rank == plan.source and receivers:
            num_sent += _send(world, receivers, save())
        elif rank in receivers:
            load(_receive(world, plan.source))
    return num_sent


def _copy(targets: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor in a tree."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _tensors_of(tree: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    _map_leaves(tree, torch.Tensor, lambda tensor: tensors.append(tensor))
    return tensors


def _map_leaves(tree: Any, kind: type, replace: Callable[[Any], Any]) -> Any:
    """Return a tree of dicts, lists and tuples with `replace(leaf)` in place of each leaf of a kind, in order."""
    if isinstance(tree, kind):
        return replace(tree)
    if isinstance(tree, Mapping):
        return {key: _map_leaves(value, kind, replace) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_map_leaves(value, kind, replace) for value in tree)
    return tree


def _send(world: Communicator, receivers: Sequence[int], tree: Any) -> int:
    """Send a tree to each of several ranks. Return the number of bytes."""
    tensors = [tensor.detach().contiguous() for tensor in _tensors_of(tree)]
    header = io.BytesIO()
    torch.save(_map_leaves(tree, torch.Tensor, lambda tensor: _Place(tuple(tensor.shape), tensor.dtype)), header)
    content = torch.frombuffer(bytearray(header.getvalue()), dtype=torch.uint8)
    num_sent = 0
    for values in (torch.tensor([content.numel()]), content, *tensors):
        for peer in receivers:
            _transfer(world, "sending to", peer, values)
            num_sent += values.nbytes
    return num_sent


def _receive(world: Communicator, source: int) -> Any:
    """Receive a tree that the source sends."""
    length = torch.zeros(1, dtype=torch.int64)
    _transfer(world, "receiving from", source, length)
    content = torch.empty(int(length), dtype=torch.uint8)
    _transfer(world, "receiving from", source, content)
    tree = torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=False)

    def receive(place: _Place) -> torch.Tensor:
        tensor = torch.empty(place.shape, dtype=place.dtype)
        _transfer(world, "receiving from", source, tensor)
        return tensor

    return _map_leaves(tree, _Place, receive)


def _transfer(world: Communicator, direction: Any, peer: int, values: torch.Tensor) -> None:
    purpose = "the transfer of the training state"
    world.connect([peer], purpose)
    world.post(direction, peer, bytes_of(values), tag=_TAG, purpose=purpose)
    world.wait(direction, peer, tag=_TAG, purpose=purpose)
