"""The processes that `torchrun` starts, and DDP or FSDP2 to train one model on all of them."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from writehead.config import TrainConfig
from writehead.errors import ConfigError
from writehead.model.attention import Attention
from writehead.model.layers import Layer
from writehead.model.transformer import Transformer
from writehead.util.devices import find_device


@dataclass(frozen=True)
class World:
    """The rank and device of this process, and the number of processes.

    Reductions run on the host, so they do not synchronize with the device.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes files."""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Sums each value over all processes."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return list(map(float, total))

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true in any process."""
        return self.sum(float(flag))[0] > 0.0

    def barrier(self) -> None:
        """Waits for all processes."""
        self.any(False)


@contextmanager
def join_world(device: str) -> Iterator[World]:
    """Joins the process group of `torchrun`; without torchrun, the world is this process.

    Models of `parallelize` refer to the group, so they must not be used afterwards.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    chosen = find_device(device)
    if chosen.type == "cuda":
        if chosen.index is None:
            chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(chosen)
    if size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield World(rank, size, chosen)
    finally:
        if size > 1:
            dist.destroy_process_group()
            # a thread of gloo that needs the interpreter while it exits aborts the process; the
            # threads end with the last reference to the group, which parallelized models have
            gc.collect()


def parallelize(
    model: Transformer, config: TrainConfig, world: World, dtype: torch.dtype
) -> nn.Module:
    """Wraps the model in DDP or FSDP2; a single process trains the model itself."""
    if world.size == 1:
        return model
    if config.parallel == "ddp":
        index = [world.device.index] if world.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=index)
    if config.optimizer == "adafactor":
        raise ConfigError(
            "parallel=fsdp does not support Adafactor; use parallel=ddp or optimizer=adamw"
        )
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in [module for module in model.modules() if isinstance(module, Layer)]:
        cross = getattr(layer, "cross", None)
        if isinstance(cross, Attention):  # the model projects the source before it calls the layer
            fully_shard([cross.P_k, cross.P_v], mp_policy=policy)
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model
