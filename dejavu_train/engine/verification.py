"""Lossless decoding on a GPU: sparse steps draft, one dense pass over eight slots verifies, all on the device.

Verification runs eight rows always. Slot s has the token at p + s. Slots behind the draft are copies of slot 0. So
shapes never change, and a matrix product takes the same kernel for any number of live slots. cuBLAS does not promise
that a row of it is independent of its neighbours, so that is looked at once (`check_rows_alone`). Attention has kernels
of its own (`kernels.verify`). Norms are row by row in plain torch.

A cycle is one CUDA graph for each length of a draft: the steps, verification, and what is kept of them. The host looks
once behind it. K and V of the whole draft are written by verification. Position, watermarks and the end of the row
follow from what was accepted.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dejavu_train.engine.draft import MOST_DRAFTED
from dejavu_train.engine.inputs import Sampling
from dejavu_train.engine.lossless import Pace, Pair, Verified
from dejavu_train.engine.prefill import dense_block
from dejavu_train.engine.step import DecodeStep
from dejavu_train.engine.weights import DecodeWeights
from dejavu_train.errors import UserError
from dejavu_train.families.block import forward_block
from dejavu_train.families.opt import POSITIONS_OFFSET
from dejavu_train.kernels.common.layer_norm import layer_norm_reference
from dejavu_train.kernels.sample.sampling import TokenState
from dejavu_train.kernels.verify.attend_slots import SLOTS, SlotScratch, attend_slots, attend_slots_reference
from dejavu_train.models.finite import not_finite

assert SLOTS == MOST_DRAFTED + 1
SHARED = ("known", "least", "limit", "stops", "temperature", "top_p", "top_k", "seed")


class EnginePair(Pair):
    """The draft is a step of an engine of one row, verification a dense pass over the same caches.

    Args:
        step: of the draft. dense: weights of the model, the step's own or others beside them.
        begin: starts a row of the engine whose caches the step shares, as `Session.begin`.
        kernels: attention by kernels, else by its reference.
    Raises:
        UserError: a guard, a policy other than backfill, or products whose rows depend on each other here.
    """

    def __init__(self, step: DecodeStep, dense: DecodeWeights, begin: Callable[..., None], kernels: bool) -> None:
        if step.guard is not None:
            raise UserError("lossless decoding has no guard, since acceptance measures the selection; pass guard=None")
        if step.plan.kv_policy != "backfill":
            raise UserError(f"lossless decoding needs kv_policy backfill, this engine has {step.plan.kv_policy}")
        self.step, self._begin, self._kernels = step, begin, kernels
        self.weights, device = dense, step.device
        check_rows_alone(self.weights)
        shape = self.weights.shape
        self.slots = TokenState.empty(SLOTS, step.state.tokens.shape[1], device)
        self.scratch = SlotScratch.empty(shape.n_heads, shape.head_dim, step.context, device)
        self.numbers = torch.arange(SLOTS, device=device)
        self.first = torch.zeros(1, dtype=torch.int32, device=device)
        self.report = torch.zeros(5, dtype=torch.int32, device=device)
        self.pace = Pace(MOST_DRAFTED if step.plan.selecting or dense is not step.weights else 0)

    def begin(self, prompt: Sequence[int], total: int, sampler: Sampling, least: int, stops: Sequence[int]) -> Verified:
        """See `Pair.begin`. The token behind the prompt is chosen as the engine chooses it, drafts or none."""
        n, state = len(prompt), self.step.state
        self.step.reset()
        self._begin([prompt], [total], [n], [n], sampler, least=[least], stops=stops)
        for name in SHARED:
            getattr(self.slots, name).copy_(getattr(state, name))
        self.slots.known.zero_()
        self.slots.limit.fill_(self.slots.tokens.shape[1] + 1)  # a row's end is decided where tokens are kept
        held = torch.stack((state.done, state.position, state.fault))[:, 0].tolist()
        return self._verified([0, 0, held[1], held[0], held[2]])

    def cycle(self, drafted: int, mode: str) -> Verified:
        """See `Pair.cycle`."""
        self.step.replay(("cycle", drafted, mode), partial(self._run, drafted, mode))
        return self._verified(self.report.tolist())

    def _verified(self, report: list[int]) -> Verified:
        drafted, accepted, position, done, fault = report
        if fault:
            what = f"the logits for the token at position {fault} hold NaN"
            error = not_finite(what, self.weights.embedding.dtype)
            error.tokens = self.step.state.tokens[0, :fault].tolist()
            raise error
        return Verified(drafted, accepted, position + 1, bool(done))

    @torch.no_grad()
    def _run(self, drafted: int, mode: str) -> None:
        self.first.copy_(self.step.state.position)
        for _ in range(drafted):
            self.step.eager(mode, False)
        self._keep(self._choices(mode))

    def _choices(self, mode: str) -> Tensor:
        """(8,) int32: the dense model's choice behind each slot."""
        state, slots, weights = self.step.state, self.slots, self.weights
        live = self.numbers <= state.position - self.first
        position = torch.where(live, self.first + self.numbers, self.first)
        slots.position.copy_(position)
        slots.done.zero_()
        slots.fault.zero_()
        token = state.tokens[0][position].long()
        x = weights.embedding[token].float() + weights.positions[position + POSITIONS_OFFSET].float()
        for layer, cache in zip(weights.layers, self.step.caches, strict=True):
            x = forward_block(dense_block(weights, layer), x[None], partial(self._attend, cache, position))[0][0]
        normed = layer_norm_reference(x, weights.final_norm, weights.embedding.dtype)
        logits = F.linear(normed, weights.lm_head.dense(weights.embedding.dtype)).float()
        self.step.ops.advance(logits, slots, mode)
        return slots.tokens.gather(1, position[:, None] + 1)[:, 0]

    def _attend(self, cache: Any, position: Tensor, _attn_in: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v (1, h, 8, e) -> the same of the heads' outputs. Copies of slot 0 write what it writes."""
        cache.k[0, :, position], cache.v[0, :, position] = k[0], v[0]
        q = q[0].transpose(0, 1).contiguous()
        out = torch.empty_like(q)
        if self._kernels:
            attend_slots(q, cache.k, cache.v, self.slots.position, out, self.scratch)
        else:
            attend_slots_reference(q, cache.k, cache.v, self.slots.position, out)
        return out.transpose(0, 1)[None]

    def _keep(self, choices: Tensor) -> None:
        """Write the choices up to the first that was not drafted, or that ends the row."""
        state, first, s = self.step.state, self.first, self.numbers
        drafted = state.position - first
        at = torch.where(s <= drafted, first + s, first) + 1
        same = (s < drafted) & (state.tokens[0][at] == choices)
        faulty = self.slots.fault > 0
        over = (choices[:, None] == state.stops).any(1) | faulty | (at + 1 >= state.limit)
        last = (same & ~over).int().cumprod(0).sum(0, keepdim=True)  # the slot whose choice is the last to be written
        written = s <= last
        state.tokens[0, torch.where(written, at, at[0]).long()] = torch.where(written, choices, choices[0])
        position, done = (first + last + 1).int(), over[last].int()
        state.position.copy_(position)
        state.done.copy_(done)
        state.row_state.copy_(1 - done)
        state.fault.copy_(self.slots.fault[last])
        self.step.watermark.copy_(position.expand_as(self.step.watermark))
        accepted = (same & written).sum(0, keepdim=True).int()
        self.report.copy_(torch.cat((drafted, accepted, position, done, state.fault)))


@torch.no_grad()
def check_rows_alone(weights: DecodeWeights) -> None:
    """Make sure that a row of a product of eight does not depend on the others, for each matrix of the first layer.

    Raises:
        UserError: it does, here.
    """
    dtype, layer = weights.embedding.dtype, weights.layers[0]
    down = layer.down.weight.dense(dtype)
    matrices = {
        "q/k/v": layer.qkv.weight.dense(dtype).flatten(0, 2),
        "the output projection": layer.whole_out(dtype),
        "up": layer.up.weight.dense(dtype),
        "down": down.T if layer.down_transposed else down,
        "the LM head": weights.lm_head.dense(dtype),
    }
    generator = torch.Generator(weights.embedding.device).manual_seed(0)
    for name, matrix in matrices.items():
        x = torch.randn(SLOTS, matrix.shape[1], device=matrix.device, generator=generator).to(dtype)
        together = F.linear(x, matrix)
        for i in range(SLOTS):
            other = torch.full_like(x, float("nan"))
            other[(i + 3) % SLOTS] = x[i]
            if not torch.equal(F.linear(other, matrix)[(i + 3) % SLOTS], together[i]):
                raise UserError(
                    f"lossless decoding cannot run here: a row of {name} depends on its neighbours in this version of"
                    " cuBLAS; leave lossless out"
                )
