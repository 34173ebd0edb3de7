"""The ranks and sizes that a launcher such as torchrun puts into the environment."""

import os

import torch.distributed as dist


def get_world_size() -> int:
    """Return the number of processes; 1 if no launcher started this process."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def get_rank() -> int:
    """Return the rank of this process, from 0; also before `init_process_group`."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def get_local_rank() -> int:
    """Return the rank of this process on its node, from 0; 0 if no launcher sets it."""
    return int(os.environ.get("LOCAL_RANK", 0))


def get_local_size() -> int:
    """Return the number of processes on this node; 1 if no launcher sets it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def get_node_rank() -> int:
    """Return the number of this node, from 0; 0 if no launcher sets it."""
    return int(os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", 0)))


def get_default_bucket_size() -> int:
    """Return the bucket size in bytes: BAGUA_DEFAULT_BUCKET_SIZE, by default 10 MiB."""
    return int(os.environ.get("BAGUA_DEFAULT_BUCKET_SIZE", 10 * 2**20))
