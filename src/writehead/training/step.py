"""One optimizer step: forward, backward, clip, update, on this process's rows of a batch."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from writehead.config import ModelConfig, TrainConfig
from writehead.data.batches import Batch
from writehead.model.runs import make_model
from writehead.training.distributed import World, spread
from writehead.training.loss import Loss, batch_loss
from writehead.training.optimizer import learning_rate, make_optimizer, set_learning_rate
from writehead.training.replay import Replay
from writehead.util.devices import warn_if_emulated


class Stepper:
    """A model and its optimizer, spread over the world, with the config's precision.

    On a GPU the weights are float32 and the work is bfloat16, compiled, unless the config says
    otherwise. Compiled work on one GPU is also captured: after a few steps the whole of a step is
    one launch, and the host has time to make the next batch.
    """

    def __init__(self, model: ModelConfig, config: TrainConfig, world: World) -> None:
        self.config, self.world = config, world
        cuda = world.device.type == "cuda"
        self.half = config.precision == "bfloat16" or (config.precision == "auto" and cuda)
        if self.half and world.device.type == "cpu":
            warn_if_emulated()
        compiled = config.compile == "yes" or (config.compile == "auto" and cuda)
        torch.manual_seed(config.seed)  # all processes begin with the same weights
        raw = make_model(model).to(world.device).train()
        self.model = spread(raw, config, world, self.half)
        self.optimizer = make_optimizer(self.model, config, compiled=compiled)
        self._loss = torch.compile(batch_loss) if compiled else batch_loss
        self._scale = torch.ones((), device=world.device)
        self._do: Callable[[list[Batch]], Tensor] = self._step
        if compiled and cuda and world.size == 1:
            self._do = Replay(self._step)

    def update(self, batch: Batch, step: int) -> Tensor:
        """Trains on a batch as the step-th, from 0.

        Returns, of this process, the summed loss and negative log-likelihood, and the norm of
        everyone's gradient: [3], on the device, until the next update.
        """
        config, world = self.config, self.world
        # dropout differs from step to step and from process to process, and from nothing else
        torch.manual_seed(((config.seed * 1_000_003 + step) * 4_099 + world.rank) % (1 << 63))
        set_learning_rate(self.optimizer, learning_rate(config, step))
        # processes average their gradients, and here they are to be summed
        self._scale.fill_(world.size / world.sum(batch.tokens)[0])
        return self._do([part.to(world.device) for part in batch.split(config.accumulate)])

    def _step(self, parts: list[Batch]) -> Tensor:
        """One update by the batch in its parts; all that differs between steps is on the device."""
        config = self.config
        sums = torch.zeros(2, device=self.world.device)
        for i, part in enumerate(parts):
            with self._synchronised(i + 1 == len(parts)):
                with self.autocast():
                    loss: Loss = self._loss(self.model, part, config.label_smoothing, config.z_loss)
                (loss.objective * self._scale).backward()  # type: ignore[no-untyped-call]
            sums += torch.stack([loss.objective.detach(), loss.nll.detach()])
        limit = float("inf") if config.clip is None else config.clip
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.cat([sums, norm.reshape(1).float()])

    def autocast(self) -> AbstractContextManager[object]:
        """The precision of the work."""
        if self.half:
            return torch.autocast(self.world.device.type, torch.bfloat16)
        return nullcontext()

    def _synchronised(self, last: bool) -> AbstractContextManager[object]:
        """Gradients travel between processes with the last part of a batch only."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        if isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return nullcontext()
