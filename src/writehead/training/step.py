"""One optimizer step: forward and backward with gradient accumulation, clipping, update."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from writehead.config import ModelConfig, TrainConfig
from writehead.data.batches import Batch
from writehead.interop.pretrained import load_run
from writehead.model import make_model
from writehead.training.distributed import World, parallelize
from writehead.training.loss import Loss, SoftLabels, batch_logits, batch_loss
from writehead.training.optimizer import learning_rate, make_optimizer, set_learning_rate
from writehead.training.origin import Origin
from writehead.util.devices import warn_if_emulated

WARMUP_STEPS = 3  # steps before a CUDA graph is captured: they compile, tune and allocate


class Stepper:
    """A model and its optimizer; with one GPU, a compiled step is captured as a CUDA graph."""

    def __init__(
        self, model: ModelConfig, config: TrainConfig, world: World, origin: Origin | None = None
    ) -> None:
        self.model_config, self.config, self.world = model, config, world
        cuda = world.device.type == "cuda"
        bfloat16 = config.precision == "bfloat16" or (config.precision == "auto" and cuda)
        self.dtype = torch.bfloat16 if bfloat16 else torch.float32
        if bfloat16 and world.device.type == "cpu":
            warn_if_emulated()
        compiled = config.compile == "yes" or (config.compile == "auto" and cuda)
        torch.manual_seed(config.seed)  # the same initial weights in all processes
        whole, origin = make_model(model).to(world.device).train(), origin or Origin()
        if origin.init is not None:
            whole.load_state_dict(load_run(origin.init, dtype=torch.float32).model.state_dict())
        self.teacher = origin.read_teacher(world.device, self.dtype)
        self.model = parallelize(whole, config, world, self.dtype)
        self.optimizer = make_optimizer(self.model, config, compiled=compiled)
        self._loss = torch.compile(batch_loss) if compiled else batch_loss
        self._logits = torch.compile(batch_logits) if compiled else batch_logits
        self._scale = torch.ones((), device=world.device)
        self._run: Callable[[list[Batch]], Tensor] = self._step
        if compiled and cuda and world.size == 1:
            self._run = CapturedStep(self._step)

    def update(self, batch: Batch, step: int) -> Tensor:
        """Trains on a batch; `step` counts from 0.

        Returns a tensor [3], which the next update overwrites: this process's summed objective and
        negative log-likelihood, and the gradient norm over all processes.
        """
        config, world = self.config, self.world
        # dropout depends on the seed, the step and the process only, so that runs resume exactly
        torch.manual_seed(((config.seed * 1_000_003 + step) * 4_099 + world.rank) % (1 << 63))
        set_learning_rate(self.optimizer, learning_rate(config, step))
        # DDP and FSDP average gradients over processes; the mean over all tokens needs their sum
        self._scale.fill_(world.size / world.sum(batch.tokens)[0])
        return self._run([part.to(world.device) for part in batch.split(config.accumulate)])

    def _step(self, parts: list[Batch]) -> Tensor:
        config = self.config
        sums = torch.zeros(2, device=self.world.device)
        for i, part in enumerate(parts):
            with self._gradient_sync(i + 1 == len(parts)):
                soft = self._soft_labels(part)
                with self.autocast():
                    loss: Loss = self._loss(
                        self.model, part, config.label_smoothing, config.z_loss, soft
                    )
                (loss.objective * self._scale).backward()  # type: ignore[no-untyped-call]
            sums += torch.stack([loss.objective.detach(), loss.nll.detach()])
        norm = clip_grad_norm_(self.model.parameters(), config.clip or float("inf"))
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.cat([sums, norm.reshape(1).float()])

    @torch.no_grad()
    def _soft_labels(self, part: Batch) -> SoftLabels | None:
        """Returns the teacher's predictions, if there is a teacher."""
        if self.teacher is None:
            return None
        logits = self._logits(self.teacher, part)
        return SoftLabels(logits, self.config.distill, self.config.distill_temperature)

    def autocast(self) -> AbstractContextManager[object]:
        """Returns the autocast context of the forward pass."""
        enabled = self.dtype == torch.bfloat16
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=enabled)

    def _gradient_sync(self, enabled: bool) -> AbstractContextManager[object]:
        """Returns a context that reduces gradients over processes only if `enabled`."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(enabled)
        if isinstance(self.model, DistributedDataParallel) and not enabled:
            return self.model.no_sync()
        return nullcontext()


class CapturedStep:
    """Captures a step as a CUDA graph after `WARMUP_STEPS` calls, and replays it from then on.

    The step must not synchronize, and must read changing values from tensors that stay in place.
    """

    def __init__(self, step: Callable[[list[Batch]], Tensor]) -> None:
        self._step = step
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, parts: list[Batch]) -> Tensor:
        """Runs the step; the next call overwrites the output."""
        self._calls += 1
        if self._calls <= WARMUP_STEPS:  # on the stream of the capture, as autograd requires
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                output = self._step(parts)
            torch.cuda.current_stream().wait_stream(self._stream)
            return output
        if self._graph is None:
            self._inputs, self._graph = parts, torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._output = self._step(parts)
        else:
            for static, part in zip(self._inputs, parts, strict=True):
                static.copy_(part)
        self._graph.replay()
        return self._output
