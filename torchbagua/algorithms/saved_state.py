"""What an attachment saves: the algorithm's state, and beside it what has to be the same where that is loaded."""

import json
from collections.abc import Mapping
from typing import Any

from torchbagua.algorithms.base import Algorithm
from torchbagua.runtime.impl import AlgorithmImpl
from torchbagua.runtime.rank_state import check_rank_state
from torchbagua.runtime.runner import Runner
from torchbagua.version import __version__

# Grows where an earlier release must not read what is saved. What a release adds beside it the earlier ones ignore.
FORMAT_VERSION = 1

_OWNER = "Attachment.load_state_dict"


def save_state(runner: Runner) -> dict[str, Any]:
    """Return what `load_state` takes: plain tensors and numbers, and strings.

    "impl" is the state of the runner. "algorithm" is JSON of the format's version, the algorithm's class by name, and
    the arguments that the state depends on (`Algorithm.state_arguments`).
    """
    described = {
        "version": FORMAT_VERSION,
        "algorithm": type(runner.algorithm).__qualname__,
        "arguments": runner.algorithm.state_arguments(runner.process_group) if _depends_on_arguments(runner) else {},
    }
    # In one string: torch.distributed.checkpoint loads into the keys that a state has now, and refuses a checkpoint
    # that lacks one of them: a key that a release adds would make it refuse those of the releases before.
    return {"algorithm": json.dumps(described), "impl": runner.state_dict()}


def load_state(runner: Runner, state: Mapping[str, Any]) -> None:
    """Have `runner` take over what `save_state` returned.

    Raises:
        ValueError: as `check_saved`; or its tensors are not those of this module.
    """
    check_saved(runner, state)
    runner.load_state_dict(state["impl"])


def check_saved(runner: Runner, state: Mapping[str, Any]) -> None:
    """Look at what `save_state` returned before it is loaded.

    Four places check it, in this order: here its form, the format's version and the algorithm's name;
    `Algorithm.check_state` the arguments that it depends on; `check_rank_state` whose it is; and, when it is loaded,
    what is kept, `ParameterState.load_state_dict` say, the names and shapes in it.

    Raises:
        ValueError: it is nothing of the kind, of a later format, of another algorithm, or of other arguments where the
            state depends on them.
    """
    if not isinstance(state, Mapping) or not {"algorithm", "impl"} <= state.keys():
        raise ValueError(
            f"{_OWNER}: state must be what Attachment.state_dict returned, with the keys algorithm and impl, got "
            f"{sorted(state) if isinstance(state, Mapping) else state!r}"
        )
    described = _read(str(state["algorithm"]))
    if described is None:
        raise ValueError(
            f"{_OWNER}: state must be what Attachment.state_dict returned, got one whose algorithm is not described in "
            f"JSON: {state['algorithm']!r}"
        )
    if described["version"] > FORMAT_VERSION:
        raise ValueError(
            f"{_OWNER}: state must be of format version {FORMAT_VERSION} or earlier, which torchbagua {__version__} "
            f"reads, got {described['version']}; load it with the release that has saved it, or a later one"
        )
    own_name = type(runner.algorithm).__qualname__
    if described["algorithm"] != own_name:
        raise ValueError(
            f"{_OWNER}: the state is of {described['algorithm']}, attached is {own_name}; attach "
            f"{described['algorithm']}, or load the weights before attach, and no state"
        )
    if _depends_on_arguments(runner):
        runner.algorithm.check_state(described["arguments"], state["impl"], runner.process_group)
    if "rank" in state["impl"]:
        check_rank_state(runner.name, state["impl"], (), runner.process_group)


def _depends_on_arguments(runner: Runner) -> bool:
    """Return whether there is a state, or the algorithm says itself what one depends on.

    Without state there is nothing to compare.
    """
    has_state = runner.parameter_state is not None or type(runner.impl).state_dict is not AlgorithmImpl.state_dict
    return has_state or type(runner.algorithm).state_arguments is not Algorithm.state_arguments


def _read(text: str) -> dict[str, Any] | None:
    """Return what `save_state` described; None if it did not write `text`."""
    try:
        described = json.loads(text)
    except json.JSONDecodeError:
        return None
    return described if isinstance(described, dict) and "version" in described else None
