"""A dense pass over eight slots, none of which depends on the others: positions of one sequence, or of eight.

Shapes never change: eight slots run, whatever number of them is live. Norms are a program a slot, products and
attention are of `kernels.verify`. So what a slot gives is a function of its token, its position and the K and V before
it. Several ranks add up eight slots always, in one order. `check_slots_alone` looks at the products of one layer, and
at a sum, because processors promise nothing of the kind.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from dejavu_train.engine import runs
from dejavu_train.engine.ops import StepOps
from dejavu_train.engine.prefill import embedded
from dejavu_train.engine.ranks.joins import Join
from dejavu_train.engine.weights import DecodeWeights, LayerWeights
from dejavu_train.families.dims import engine_refusal
from dejavu_train.ground.errors import UserError
from dejavu_train.kernels.common.kv_cache import HeadStep, KvCache
from dejavu_train.kernels.common.layer_norm import LayerNormWeights
from dejavu_train.kernels.common.settings import settings_file
from dejavu_train.kernels.dense.screened_head import ScreenedHead
from dejavu_train.kernels.formats.matrix import Linear, Rows
from dejavu_train.kernels.stages.hidden import kept_unit
from dejavu_train.kernels.verify.attend_slots import SLOTS, slot_scratch
from dejavu_train.kernels.verify.screened_slots import ScreenScratch
from dejavu_train.kernels.verify.slot_walk import ProductScratch, is_cut


class SlotPass:
    """The dense model over caches of one sequence, or of eight.

    Args:
        caches: of its layers. ops: kernels, or the same in plain torch. screen: of its LM head, or None.
        join: of eight rows, see `joins`. None = of one GPU.
        skips: rows of neurons that are zero in every slot are not read, where neurons are rows of numbers.
    Attributes:
        logits: (8, V) fp32, of the last pass.
    Raises:
        UserError: what is not among `runs.VERIFIED`.
    """

    def __init__(
        self,
        weights: DecodeWeights,
        caches: Sequence[KvCache],
        ops: StepOps,
        pdl: bool,
        screen: ScreenedHead | None = None,
        join: Join | None = None,
        skips: bool = False,
    ) -> None:
        self.join, self.skips = join or Join(), skips and not weights.packed
        self.weights, self.caches, self.ops, self.pdl = weights, caches, ops, pdl
        shape, device, dtype = weights.shape, weights.embedding.device, weights.embedding.dtype
        if (why := engine_refusal(shape, runs.VERIFIED)) is not None:
            raise UserError(f"lossless decoding on a GPU has {why}; leave lossless out, or pass backend='cpu'")
        d, h, e = shape.d_model, shape.n_heads, shape.head_dim
        self.screen: ScreenedHead | None = None
        self.screening = ScreenScratch.empty(0, d, device)
        if screen is not None and screen.weight is weights.lm_head.parts()[0] and not is_cut(Rows(screen.weight)):
            self.screen, self.screening = screen, ScreenScratch.empty(shape.vocab_size, d, device)
        self.products = ProductScratch.empty(d, device)
        self.attention = slot_scratch(h, e, caches[0].capacity, device, len(caches[0].k))
        self.x = torch.zeros(2, SLOTS, d, device=device, dtype=torch.float32)
        self.normed = torch.zeros(SLOTS, d, dtype=dtype, device=device)
        self.q, self.mixed = torch.zeros(2, SLOTS, h, e, dtype=dtype, device=device)
        self.hidden = torch.zeros(SLOTS, shape.d_ffn, dtype=dtype, device=device)
        self.logits = torch.zeros(SLOTS, shape.vocab_size, device=device, dtype=torch.float32)

    def run(self, tokens: Tensor, position: Tensor, stops: Tensor | None = None) -> None:
        """tokens, position (8,) int32 -> logits. K and V are written at these positions.

        Slots at one position of one sequence have one token, and write the same.

        Args:
            stops: of the tokens' state, where the largest logit of each slot is wanted alone. Logits that are not the
                largest may then be -inf. None = all logits.
        """
        weights, ops, pdl = self.weights, self.ops, self.pdl
        self.run_layers(tokens, position)
        ops.layer_norm(self.x[0], weights.final_norm, self.normed, pdl=pdl)
        if self.screen is not None and stops is not None:
            ops.screened_slots(self.x[0], self.normed, self.screen, stops, self.logits, self.screening, pdl=pdl)
        else:
            self._head()
            self.join.close_head(self.logits)

    def run_layers(self, tokens: Tensor, position: Tensor) -> Tensor:
        """The same in front of the final norm. Returns (8, d) fp32, the residual stream behind the last layer."""
        self.x[0].copy_(embedded(self.weights, tokens.long(), position.long()))
        for layer, cache in zip(self.weights.layers, self.caches, strict=True):
            self._attend(layer, cache, position)
            self._multiply(layer)
        return self.x[0]

    def describe(self) -> str:
        """Say what the equality of slots holds for."""
        device, capacity = self.x.device, self.caches[0].capacity
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        head = "the LM head behind its screen where greedy" if self.screen is not None else "the whole LM head"
        found = f"launch settings {settings_file(device)}, {capacity} positions, {where}"
        zeros = "rows of silent neurons are not read" if self.skips else "all rows of neurons are read"
        return f"verification: {SLOTS} slots, {head}, {zeros}, equal by {found}"

    def reset(self) -> None:
        """Tickets are zero between passes, unless one was cut short."""
        self.products.tickets.zero_()
        self.attention.tickets.zero_()

    def _attend(self, layer: LayerWeights, cache: KvCache, position: Tensor) -> None:
        """x[1] = x[0] + what attention adds."""
        ops, pdl = self.ops, self.pdl
        ops.layer_norm(self.x[0], layer.norm1, self.normed, pdl=pdl)
        step = HeadStep(self.q, cache, position)
        ops.slot_qkv(self.normed, layer.qkv, step, self.products, pdl=pdl)
        ops.attend_slots(step, self.mixed, self.attention, pdl=pdl)
        self._add(layer.out, self.mixed.flatten(1), self.x[1], self.x[0])
        self._normalise(self.x[1], layer.behind[0])

    def _multiply(self, layer: LayerWeights) -> None:
        """x[0] = x[1] + what the MLP adds."""
        ops, pdl = self.ops, self.pdl
        ops.layer_norm(self.x[1], layer.norm2, self.normed, pdl=pdl)
        ops.slot_hidden(self.normed, layer.mlp, self.hidden, self.products, pdl=pdl)
        self._down(layer, self.hidden, self.join.part(self.x[0]), self.join.base(self.x[1]))
        self.join.close(self.x[0])
        self._normalise(self.x[0], layer.behind[1])

    def _down(self, layer: LayerWeights, hidden: Tensor, out: Tensor, residual: Tensor) -> None:
        """out = residual + down of the slots' hidden values. A silent neuron adds zero to a slot, whoever needs it."""
        down, unit, turned = layer.down, kept_unit(layer.mlp, hidden.dtype), layer.down_transposed or layer.packed
        if self.skips and turned:
            given = (hidden, down.weight, down.bias, residual, out, self.products.sums)
            self.ops.live_down(*given, pdl=self.pdl, unit=unit)
        else:
            self._project(down, hidden, out, residual, turned, unit)

    def _normalise(self, x: Tensor, norm: LayerNormWeights | None) -> None:
        if norm is not None:
            self.ops.layer_norm(x, norm, x, pdl=self.pdl)

    def _add(self, linear: Linear, x: Tensor, out: Tensor, before: Tensor) -> None:
        """out = before + what all ranks' products give."""
        self._project(linear, x, self.join.part(out), self.join.base(before))
        self.join.close(out)

    def _head(self) -> Tensor:
        """Logits of this rank's rows of the LM head."""
        logits = self.join.head(self.logits)
        self.ops.slot_linear(self.normed, self.weights.lm_head, None, logits, None, self.products, pdl=self.pdl)
        return logits

    def _project(
        self, linear: Linear, x: Tensor, out: Tensor, residual: Tensor, turned: bool = False,
        unit: float = 1.0,
    ) -> None:  # fmt: skip
        self.ops.slot_linear(x, linear.weight, linear.bias, out, residual, self.products, turned, unit, pdl=self.pdl)

    @torch.no_grad()
    def check_slots_alone(self) -> None:
        """Make sure that a slot's products do not depend on the other slots', for each matrix of the first layer.

        A screen that does not choose as the whole LM head is not used.

        Raises:
            UserError: they do, here.
        """
        layer, device, shape = self.weights.layers[0], self.x.device, self.weights.shape
        room = torch.zeros(2, 1, shape.n_kv_heads, SLOTS, shape.head_dim, dtype=self.normed.dtype, device=device)
        cache = dataclasses.replace(self.caches[0], k=room[0], v=room[1], watermark=None)

        def qkv(x: Tensor, position: Tensor) -> Tensor:
            self.ops.slot_qkv(x, layer.qkv, HeadStep(self.q, cache, position), self.products)
            written = room[:, 0, :, position.long()].permute(2, 0, 1, 3)
            return torch.cat((self.q.flatten(1), written.flatten(1)), dim=1)

        def project_out(x: Tensor, _position: Tensor) -> Tensor:
            out = torch.zeros(2, SLOTS, shape.d_model, dtype=torch.float32, device=device)
            self._project(layer.out, x, out[0], out[1])
            return out[0]

        def down(x: Tensor, _position: Tensor) -> Tensor:
            out = torch.zeros(2, SLOTS, shape.d_model, dtype=torch.float32, device=device)
            self._down(layer, x, out[0], out[1])
            return out[0]

        def head(x: Tensor, _position: Tensor) -> Tensor:
            self.normed.copy_(x)
            return self._head().clone()

        def up(x: Tensor, _position: Tensor) -> Tensor:
            self.ops.slot_hidden(x, layer.mlp, self.hidden, self.products)
            return self.hidden.clone()

        def total(x: Tensor, _position: Tensor) -> Tensor:
            out = torch.zeros(SLOTS, shape.d_model, dtype=torch.float32, device=device)
            self.join.part(out).copy_(x.float() / 3)  # so many digits that the order counts
            self.join.close(out)
            return out

        products = {
            "q/k/v": (qkv, shape.d_model),
            "the output projection": (project_out, shape.n_heads * shape.head_dim),
            "up": (up, shape.d_model),
            "down": (down, shape.d_ffn),
            "the LM head": (head, shape.d_model),
            "a sum over GPUs": (total, shape.d_model),
        }
        generator = torch.Generator(device).manual_seed(self.join.number)
        if self.screen is not None:
            self.x[0].normal_(generator=generator)
            self.ops.layer_norm(self.x[0], self.weights.final_norm, self.normed)
            stops = torch.full((1,), -1, dtype=torch.int32, device=device)
            self.ops.screened_slots(self.x[0], self.normed, self.screen, stops, self.logits, self.screening)
            found = self.logits.max(1)
            whole = head(self.normed, stops).max(1)
            if not (torch.equal(found.values, whole.values) and torch.equal(found.indices, whole.indices)):
                self.screen = None
        position = torch.arange(SLOTS, dtype=torch.int32, device=device)
        for name, (product, columns) in products.items():
            x = torch.randn(SLOTS, columns, device=device, generator=generator, dtype=torch.float32).to(
                self.normed.dtype
            )
            together = product(x, position)
            for i in range(SLOTS):
                other, places, place = torch.full_like(x, float("nan")), position.roll(3), (i + 3) % SLOTS
                other[place] = x[i]
                if not torch.equal(product(other, places)[place], together[i]):
                    raise UserError(
                        f"lossless decoding cannot run here: a slot of {name} depends on its neighbours on this"
                        " device; leave lossless out"
                    )
