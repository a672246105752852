"""One process or many: `torchrun` sets the world, DDP or FSDP2 spreads the model over it."""

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
    """Who this process is among how many, and the device it works on."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all processes.

        Hosts tell each other, so no device is waited for; so do `any` and `barrier`.
        """
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        sums: list[float] = total.tolist()
        return sums

    def any(self, flag: bool) -> bool:
        """Whether any process says so; all of them get the same answer."""
        return self.sum(float(flag))[0] > 0.0

    def barrier(self) -> None:
        """Waits until every process is here."""
        self.any(False)


@contextmanager
def join_world(device: str) -> Iterator[World]:
    """This process's place in the world that `torchrun` set up, or alone without it."""
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    chosen = find_device(device)
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if size > 1:
        # gradients travel by nccl, and what hosts tell each other by gloo
        dist.init_process_group("cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield World(rank, size, chosen)
    finally:
        if size > 1:
            dist.destroy_process_group()


def spread(model: Transformer, config: TrainConfig, world: World, half: bool) -> nn.Module:
    """The model as all processes train it together; with one process, the model itself."""
    if config.parallel == "fsdp" and world.size > 1:
        if config.optimizer == "adafactor":
            raise ConfigError(
                "Adafactor factors whole tensors, which FSDP splits; use parallel=ddp, or "
                "optimizer=adamw"
            )
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if half else None, reduce_dtype=torch.float32
        )
        for module in model.modules():
            if isinstance(module, Layer):
                cross = getattr(module, "cross", None)
                if isinstance(cross, Attention):  # these work before their layer does
                    fully_shard([cross.P_k, cross.P_v], mp_policy=policy)
                fully_shard(module, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        return model
    if world.size > 1:
        index = [world.device.index] if world.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=index)
    return model
