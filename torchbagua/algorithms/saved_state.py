"""The saved state of an attachment: the algorithm's state, and the values that must match when it is loaded."""

import json
from collections.abc import Mapping
from typing import Any

from torchbagua.algorithms.base import Algorithm
from torchbagua.runtime.rank_state import check_rank_state
from torchbagua.runtime.runner import AlgorithmImpl, Runner
from torchbagua.runtime.weight_runner import WeightRunner
from torchbagua.version import __version__

# Increment it when earlier releases must not read the new format. Earlier releases ignore additional keys.
FORMAT_VERSION = 1

_OWNER = "Attachment.load_state_dict"


def save_state(runner: Runner, loop: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that `load_state` loads: plain tensors, numbers and strings.

    "impl" is the state of the runner. "algorithm" is a JSON string of the format version, the name of the algorithm's
    class, the arguments that the state depends on (`Algorithm.state_arguments`), the names of the averaged parameters,
    and `loop`: facts about the training loop, which `load_state` returns.
    """
    described = {
        "version": FORMAT_VERSION,
        "algorithm": type(runner.algorithm).__qualname__,
        "arguments": runner.algorithm.state_arguments(runner.process_group) if _depends_on_arguments(runner) else {},
        "averaged": _averaged_names(runner),
        "loop": loop,
    }
    # A single string, because torch.distributed.checkpoint loads into the current keys of a state and refuses a
    # checkpoint that lacks one of them. A key added by a release would make it refuse checkpoints of earlier releases.
    return {"algorithm": json.dumps(described), "impl": runner.state_dict()}


def _averaged_names(runner: Runner) -> list[str] | None:
    weights = runner.weights if isinstance(runner, WeightRunner) else None
    return None if weights is None else weights.parameter_names


def load_state(runner: Runner, state: Mapping[str, Any]) -> dict[str, Any]:
    """Load into `runner` the state that `save_state` returned. Return its argument `loop`."""
    loop = check_saved(runner, state)
    averaged = json.loads(state["algorithm"]).get("averaged")
    if averaged is not None and isinstance(runner, WeightRunner):
        runner.average_as_saved(averaged)
    runner.load_state_dict(state["impl"])
    return loop


def check_saved(runner: Runner, state: Mapping[str, Any]) -> dict[str, Any]:
    """Check the return value of `save_state` before it is loaded. Return its argument `loop`.

    Four functions check it, in this order:

    1. this function: its structure, the format version and the name of the algorithm;
    2. `Algorithm.check_state`: the arguments that the state depends on;
    3. `check_rank_state`: which rank saved it;
    4. during the load, the owner of each part, such as `ParameterState.load_state_dict`: the names and shapes.
    """
    if not isinstance(state, Mapping) or not {"algorithm", "impl"} <= state.keys():
        raise ValueError(
            f"{_OWNER}: state must be what Attachment.state_dict returned, with the keys algorithm and impl, got "
            f"{sorted(state) if isinstance(state, Mapping) else state!r}"
        )
    described = _parse(str(state["algorithm"]))
    if described is None:
        raise ValueError(
            f"{_OWNER}: state must be what Attachment.state_dict returned, with JSON under the key algorithm, got "
            f"{state['algorithm']!r}"
        )
    if described["version"] > FORMAT_VERSION:
        raise ValueError(
            f"{_OWNER}: state must be of format version {FORMAT_VERSION} or earlier, which torchbagua {__version__} "
            f"reads, got {described['version']}; load it with the release that saved it, or a later release"
        )
    own_name = type(runner.algorithm).__qualname__
    if described["algorithm"] != own_name:
        raise ValueError(
            f"{_OWNER}: the state was saved by {described['algorithm']}, but {own_name} is attached; attach "
            f"{described['algorithm']}, or load only the weights, before attach"
        )
    if _depends_on_arguments(runner):
        runner.algorithm.check_state(described["arguments"], state["impl"], runner.process_group)
    if "rank" in state["impl"]:
        check_rank_state(runner.name, state["impl"], (), runner.process_group)
    loop: dict[str, Any] = described.get("loop", {})
    return loop


def _depends_on_arguments(runner: Runner) -> bool:
    """Return whether the algorithm has a state, or overrides `state_arguments`.

    An algorithm without state has nothing to compare.
    """
    has_state = runner.parameter_state is not None or type(runner.impl).state_dict is not AlgorithmImpl.state_dict
    return has_state or type(runner.algorithm).state_arguments is not Algorithm.state_arguments


def _parse(text: str) -> dict[str, Any] | None:
    """Return the dict that `save_state` wrote as JSON, or None if `save_state` did not write `text`."""
    try:
        described = json.loads(text)
    except json.JSONDecodeError:
        return None
    return described if isinstance(described, dict) and "version" in described else None
