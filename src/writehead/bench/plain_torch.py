"""A decoder in plain PyTorch, written for speed: `torch.compile`, and one CUDA graph per step.

Shapes are fixed: all rows are at the same position of a padded KV cache. The read-heads of a
write-head are queries of one head, so K and V are not repeated.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from writehead.bench.timing import Call, capture
from writehead.config import ModelConfig
from writehead.errors import BackendError
from writehead.model import TranslationModel
from writehead.model.attention import Attention
from writehead.model.layers import Layer

MAX_AUTOTUNED_ROWS = 32  # cuBLAS computes larger products: autotuning takes a minute

# what the decoder expects of a config
PLAIN = {"norm_place": "pre", "positions": "learned", "position_offset": 0}
PLAIN |= {"embedding_scale": None, "attention_scale": None, "output_bias": False}

Cache = list[tuple[Tensor, Tensor]]  # K [rows, g, m, k] and V [rows, g, m, v] of each layer


def check_plain(config: ModelConfig) -> None:
    """Raises BackendError if `PlainDecoder` does not support a model of this config."""
    for name, value in PLAIN.items():
        if getattr(config, name) != value:
            raise BackendError(f"the plain decoder needs {name}={value!r}")


class PlainDecoder:
    """Greedy or beam search for a fixed number of tokens; no hypothesis ends early."""

    @torch.no_grad()
    def __init__(self, model: TranslationModel, source: Tensor, length: int, beam: int = 1) -> None:
        self.model, self.batch, self.length, self.beam = model, len(source), length, beam
        c, rows, size = model.config, len(source) * beam, min(length, model.config.window or length)
        self.layers = [layer for layer in model.decoder.layers if isinstance(layer, Layer)]
        self.qkv = [_join(layer.attention) for layer in self.layers]
        self.memories: Cache = []  # K and V of the encoder
        self.encode(source)
        zeros = partial(torch.zeros, device=model.device, dtype=torch.long)
        empty = partial(zeros, rows, c.g, size, dtype=model.dtype)
        self.caches: list[Cache] = [  # beams are reordered from one to the other
            [(empty(c.k), empty(c.v)) for _ in self.layers] for _ in range(1 if beam == 1 else 2)
        ]
        self.slots = torch.arange(size, device=model.device).view(1, 1, 1, size)
        self.position, self.tokens, self.parents = zeros(1), zeros(rows), zeros(rows)
        self.scores, self.output = zeros(rows, dtype=torch.float32), zeros(rows, length)
        self.steps = self._make_steps()

    @torch.no_grad()
    def encode(self, source: Tensor) -> None:
        """Encodes source [b, m], once for all steps and beams."""
        memories = self.model.decoder.project_memory(self.model.encode(source))
        if not self.memories:
            self.memories = [(K.contiguous(), V.contiguous()) for K, V in memories]
        for own, projected in zip(self.memories, memories, strict=True):
            for stored, new in zip(own, projected, strict=True):
                stored.copy_(new)

    @torch.no_grad()
    def run(self) -> Tensor:
        """Decodes; returns the best tokens [b, length]."""
        self._reset()
        for i in range(self.length):
            self.steps[i % len(self.steps)]()
        return self.output[:: self.beam].cpu()

    def _reset(self) -> None:
        self.position.zero_()
        self.tokens.fill_(self.model.config.bos)
        self.scores.fill_(float("-inf"))  # all beams start equal: only the first continues
        self.scores[:: self.beam] = 0.0

    def _make_steps(self) -> list[Call]:
        """Returns one step per cache: compiled and captured on a GPU, eager on a CPU."""
        device, advance = self.model.device, self._advance
        pairs = [*zip(self.caches, reversed(self.caches), strict=True)]
        if device.type != "cuda":
            return [partial(self._step, advance, *pair) for pair in pairs]
        torch.compiler.reset()  # recompilations are limited
        few = len(self.tokens) <= MAX_AUTOTUNED_ROWS
        mode = "max-autotune-no-cudagraphs" if few else "default"
        advance = torch.compile(self._advance, fullgraph=True, dynamic=False, mode=mode)
        steps: list[Call] = []
        for pair in pairs:
            self._reset()
            steps.append(capture(partial(self._step, advance, *pair), device).replay)
        return steps

    def _step(self, advance: Callable[[Cache], None], cache: Cache, other: Cache) -> None:
        advance(cache)
        if self.beam > 1:
            for (K, V), (next_K, next_V) in zip(cache, other, strict=True):
                torch.index_select(K, 0, self.parents, out=next_K)
                torch.index_select(V, 0, self.parents, out=next_V)

    def _advance(self, cache: Cache) -> None:
        """Feeds a token per row; chooses the next tokens and the rows that they continue."""
        logits, eos = self._logits(cache), self.model.config.eos
        if self.beam == 1:
            logits[:, eos] = float("-inf")
            self.tokens.copy_(logits.argmax(dim=1))
        else:
            norm = logits.float().logsumexp(dim=1, keepdim=True)
            logits[:, eos] = float("-inf")
            best, tokens = logits.topk(self.beam)  # [rows, beam]
            totals = (self.scores.unsqueeze(1) + best.float() - norm).view(self.batch, -1)
            scores, chosen = totals.topk(self.beam)  # [b, beam], of beam × beam
            first = torch.arange(self.batch, device=chosen.device).unsqueeze(1) * self.beam
            self.scores.copy_(scores.flatten())
            self.parents.copy_((first + chosen // self.beam).flatten())
            self.tokens.copy_(tokens.view(self.batch, -1).gather(1, chosen).flatten())
            self.output.copy_(self.output[self.parents])
        self.output.index_copy_(1, self.position, self.tokens.unsqueeze(1))
        self.position.add_(1)

    def _logits(self, cache: Cache) -> Tensor:
        """Feeds the tokens, writes K and V to the cache; returns logits [rows, vocab_size]."""
        model, c = self.model, self.model.config
        x = model.tokens(self.tokens) + model.decoder.positions(self.position)  # [rows, d]
        slot, mask = self.position % self.slots.shape[3], self.slots <= self.position
        for i, layer in enumerate(self.layers):
            qkv, (K, V) = linear(layer.norm_attention(x), *self.qkv[i]), cache[i]
            q, k, v = torch.split(qkv, [c.h * c.k, c.g * c.k, c.g * c.v], dim=1)
            K.index_copy_(2, slot, k.view(-1, c.g, 1, c.k))
            V.index_copy_(2, slot, v.view(-1, c.g, 1, c.v))
            x = x + layer.attention.P_o(_attend(q, K, V, mask))
            q = layer.cross.P_q(layer.norm_cross(x))
            x = x + layer.cross.P_o(_attend(q, *self.memories[i]))
            x = x + layer.feed_forward(layer.norm_feed_forward(x))
        assert model.decoder.norm is not None
        x = model.decoder.norm(x) * c.effective_logit_scale
        return linear(x, model.tokens.weight if c.tied else model.output.weight)


def _attend(q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of q [rows, h k] over K [b, g, m, k] and V [b, g, m, v]: o [rows, h v]."""
    (b, g, _, k), beam = K.shape, len(q) // len(K)
    Q = q.reshape(b, beam, g, -1, k).transpose(1, 2).flatten(2, 3)  # [b, g, beam h/g, k]
    O = scaled_dot_product_attention(Q, K, V, attn_mask=mask)  # noqa: E741
    return O.view(b, g, beam, -1, V.shape[3]).transpose(1, 2).reshape(b * beam, -1)


def _join(attention: Attention) -> tuple[Tensor, Tensor | None]:
    """Joins the weights and biases of P_q, P_k and P_v for one product."""
    projections = (attention.P_q, attention.P_k, attention.P_v)
    bias = torch.cat([P.bias for P in projections]) if attention.config.bias else None
    return torch.cat([P.weight for P in projections]), bias
