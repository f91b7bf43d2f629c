"""All decoder layers of a decoding step of one row as one cooperative kernel, over 4-bit weights where they lie.

    for each layer:  x += out(attention(q, k, v of norm1(x)));  x += down(h(norm2(x))) of the neurons of a mode
    h = act(up(n)), or act(gate(n)) up(n), as `StepSizes` says

x (d,) fp32. Neurons: all, all but those that are zero behind their activation, or those that the MLP's predictor
selects from norm1(x). `layers.cu` has the kernel, and docs/notes/one-kernel.md explains it.
`decoder_layers_reference` is the same in plain torch, without rounding.
"""

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dejavu_train.kernels.common.activation import activation_reference
from dejavu_train.kernels.common.checks import check_shape, require
from dejavu_train.kernels.common.kv_cache import KvCache
from dejavu_train.kernels.common.layer_norm import LayerNormWeights, NormKind, layer_norm_reference
from dejavu_train.kernels.common.positions import turned_reference
from dejavu_train.kernels.formats.codes import nibble_codes, unscaled
from dejavu_train.kernels.formats.int4 import Int4Rows, pack_int4
from dejavu_train.kernels.formats.matrix import Linear
from dejavu_train.kernels.persistent.program import Launcher, Program
from dejavu_train.kernels.persistent.sizes import (
    GROUP,
    PROGRAMS,
    RANKS,
    SYNC,
    THREADS,
    Neurons,
    StepSizes,
)
from dejavu_train.kernels.stages.predictor import PredictorWeights, check_matrix, down_reference

PARTS = ("instructions.cuh", "shapes.cuh", "products.cuh", "producer.cuh", "layers.cu")  # of one source, in order
SOURCES = tuple(Path(__file__).with_name(name) for name in PARTS)
ARCH = "sm_90a"  # bulk copies and barriers of Hopper, and instructions of no other
FAULTS = (
    "", "a page was never free", "a page never came", "the list of neurons never came", "a program never came to the"
    " barrier", "the predictor's hidden values never came", "a mask never came", "the neurons' values never came",
    "a part of a head never came", "a sum left its range",
)  # fmt: skip
ERROR_AT = 4 * 32  # of sync


@dataclass(frozen=True)
class StepLayer:
    """Tensors of one layer: Int4Rows as `engine.weights` lays them, down as rows of neurons, biases and norms in fp16.

    cache: k and v (1, kv_heads, capacity, head_dim) fp16. predictor: of the MLP, from norm1's output, as nibbles.
    threshold: (1,) fp32. gate: of a gated MLP, as up.
    """

    qkv: Linear
    out: Linear
    up: Linear
    down: Linear
    norm1: LayerNormWeights
    norm2: LayerNormWeights
    cache: KvCache
    predictor: PredictorWeights | None = None
    threshold: Tensor | None = None
    gate: Linear | None = None

    def tensors(self) -> list[Tensor | None]:
        """In the order of `Layer` in the source. A predictor's matrices are packed as rows of words.

        The largest of down's scales, for each 128 columns, are made now. A gate lies in up's place, and up at the end.
        """
        found: list[Tensor | None] = []
        for linear in (self.qkv, self.out, self.gate or self.up, self.down):
            found += [*_rows(linear).parts(), linear.bias]
        for norm in (self.norm1, self.norm2):
            found += [norm.weight, norm.bias]
        found += [self.cache.k, self.cache.v]
        own, largest = self.predictor, _rows(self.down).scales.abs().amax(0).float()
        behind = [] if self.gate is None else [*_rows(self.up).parts(), self.up.bias]
        if own is None:
            return [*found, *[None] * 6, largest, *behind]
        assert own.down_scale is not None and own.up_scale is not None
        bias = torch.zeros_like(own.up_scale) if own.bias is None else own.bias
        d, rank = _rows(self.qkv).shape[-1], len(own.down)
        packed = (pack_int4(nibble_codes(*each)) for each in ((own.down, d), (own.up, rank)))
        first, second = packed
        return [*found, first, own.down_scale, second, own.up_scale, bias, self.threshold, largest, *behind]


def _rows(linear: Linear) -> Int4Rows:
    weight = linear.weight
    if not isinstance(weight, Int4Rows):
        raise ValueError(f"expected a matrix of 4 bits, got {weight.format}")
    return weight


class DecoderLayers:
    """The kernel with the tensors of a model, and what its programs tell each other.

    Args:
        layers: all of them, on a GPU of compute capability 9.0. position, row_state: (1,) int32, see `TokenState`.
    Raises:
        ValueError: shapes, dtypes or a scale's groups that it does not read. NoCompiler, RuntimeError: see `program`.
    """

    def __init__(self, sizes: StepSizes, layers: Sequence[StepLayer], position: Tensor, row_state: Tensor) -> None:
        require(not sizes.refusal, sizes.refusal)
        for layer in layers:
            check_layer(sizes, layer)
        self.sizes, self.position, self.row_state = sizes, position, row_state
        device = position.device
        self._held = [layer.tensors() for layer in layers]
        table = [[0 if tensor is None else tensor.data_ptr() for tensor in tensors] for tensors in self._held]
        self.table = torch.tensor(table, dtype=torch.int64, device=device)
        require(self.table.shape[1] * 8 == sizes.layer_bytes, "the table's rows are those of the source")
        turning = layers[0].cache.turning  # the same of all layers
        none = torch.zeros(1, dtype=torch.float32, device=device)
        self.turns = none if turning is None else turning.fitting(layers[0].cache.k)
        self.capacity, self.eps = layers[0].cache.capacity, layers[0].norm1.eps

        def zeros(n: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(n, dtype=dtype, device=device)

        self.delta, self.heads, self.hidden = (
            zeros(3 * sizes.d, torch.int32),
            zeros(sizes.kv_heads * sizes.exchange),
            zeros(RANKS[-1]),
        )
        self.masks, self.sync = zeros(4 * PROGRAMS), zeros(SYNC, torch.int32)
        self.launch = layers_launcher(sizes, device)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """x (1, d) fp32 -> out (1, d), and K/V of the row's position into the caches.

        A step that fails leaves NaN in out, and its reason in `fault`.
        """
        for name, tensor in (("x", x), ("out", out)):
            check_shape(name, tensor, 1, self.sizes.d)
        scratch = (self.delta, self.heads, self.hidden, self.masks, self.sync)
        tensors = (self.table, x, out, self.position, self.row_state, *scratch)
        numbers = ((len(self.table), ctypes.c_int), (self.capacity, ctypes.c_int), (self.eps, ctypes.c_float))
        stream = torch.cuda.current_stream(x.device).cuda_stream
        pointers = ((tensor.data_ptr(), None) for tensor in tensors)
        self.launch(stream, [*pointers, *numbers, (self.turns.data_ptr(), None)])

    def fault(self) -> str:
        """Why a step failed since the last `reset`, or ""."""
        return FAULTS[int(self.sync[ERROR_AT])]

    def reset(self) -> None:
        """Forget a step that failed."""
        for tensor in (self.delta, self.heads, self.hidden, self.masks, self.sync):
            tensor.zero_()


@functools.cache
def layers_launcher(sizes: StepSizes, device: torch.device) -> Launcher:
    """Kernel for these sizes on a GPU, compiled before or now.

    Raises:
        NoCompiler, RuntimeError: see `program.Launcher.load`.
    """
    with torch.cuda.device(device):
        torch.cuda.mem_get_info(device)  # a thread that has not called CUDA yet has no context for the driver's calls
        return Launcher.load(program_of(sizes), PROGRAMS, THREADS, sizes.shared_bytes)


def program_of(sizes: StepSizes) -> Program:
    """Source for these sizes."""
    source = "\n".join(f'#line 1 "{path.name}"\n{path.read_text()}' for path in SOURCES)
    return Program(source, "decoder_layers", sizes.defines, ARCH)


def check_layer(sizes: StepSizes, layer: StepLayer) -> None:
    """Raise ValueError for tensors that the kernel would misread."""
    d, head_dim, heads, n = sizes.d, sizes.head_dim, sizes.heads, sizes.d_ffn
    qkv = (sizes.kv_heads, sizes.share + 2, head_dim, d)
    require((layer.gate is not None) == sizes.gated, "gates are there, or none is")
    for name, linear, shape, group in (
        ("qkv", layer.qkv, qkv, GROUP), ("out", layer.out, (heads, d, head_dim), head_dim),
        ("gate", layer.gate, (n, d), GROUP), ("up", layer.up, (n, d), GROUP), ("down", layer.down, (n, d), GROUP),
    ):  # fmt: skip
        if linear is None:
            continue
        rows, first = _rows(linear), "gate" if sizes.gated else "up"
        require(rows.shape == shape and rows.group == group, f"{name} is {rows.shape} in groups of {rows.group}")
        require(linear.bias.dtype == torch.float16, f"{name}'s bias is {linear.bias.dtype}, expected float16")
        require(sizes.biases or name == first or not linear.bias.any(), f"{name} has a bias, expected none")
    for norm in (layer.norm1, layer.norm2):
        for tensor in norm.folded:
            require(tensor.dtype == torch.float16, f"a norm is {tensor.dtype}, expected float16")
        kind = NormKind.RMS_NORM if sizes.rms else NormKind.LAYER_NORM
        require(norm.kind is kind and norm.eps == layer.norm1.eps, f"norms are a {kind} with one eps")
        require(norm.bias is not None and not (sizes.rms and norm.bias.any()), "norms have a bias, of an RMSNorm zeros")
    cache = layer.cache
    require(cache.k.dtype == cache.v.dtype == torch.float16 and len(cache.k) == 1, "caches are of one row in float16")
    require(cache.watermark is None, "all K/V are there")
    require((cache.turning is not None) == sizes.rotary, "q and k are turned, or not")
    predictor = layer.predictor
    asked = sizes.neurons is Neurons.SELECTED
    require(sizes.partly or asked == (predictor is not None), "predictors are in all layers, or in none")
    if predictor is not None:
        require(predictor.down.dtype == torch.uint8, "predictors are nibbles")
        check_matrix("down", predictor.down, predictor.down_scale, (sizes.rank, d), cache.k)
        check_matrix("up", predictor.up, predictor.up_scale, (n, sizes.rank), cache.k)


def decoder_layers_reference(
    sizes: StepSizes, layers: Sequence[StepLayer], x: Tensor, position: int, row_state: int = 1
) -> Tensor:
    """The same in float64, over the same codes. Caches stay as they are. Returns (1, d)."""
    x = x.double()
    for layer in layers:
        n = layer_norm_reference(x, layer.norm1, x.dtype)
        x = x + attention_reference(sizes, layer, n, position)
        hidden = hidden_reference(sizes, layer, first_reference(layer, x), x)
        if layer.threshold is not None and row_state != 2:
            hidden = hidden * (scores_reference(layer, n) > layer.threshold.double())
        x = x + hidden @ _dense(layer.down) + layer.down.bias.double()
    return x


def attention_reference(sizes: StepSizes, layer: StepLayer, n: Tensor, position: int) -> Tensor:
    """(1, d): what attention adds, of a norm's output n (1, d)."""
    q, k, v = qkv_reference(sizes, layer, n, position)
    keys, values = (
        torch.cat((cached[0, :, :position].double(), new.half().double()[:, None]), 1)
        for cached, new in ((layer.cache.k, k), (layer.cache.v, v))
    )
    weights = torch.softmax(q @ keys.transpose(1, 2) / math.sqrt(sizes.head_dim), -1)
    mixed = (weights @ values).flatten(0, 1)
    return torch.einsum("hdk,hk->d", _dense(layer.out), mixed)[None] + layer.out.bias.double()


def qkv_reference(sizes: StepSizes, layer: StepLayer, n: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
    """(q (kv_heads, share, head_dim), k and v (kv_heads, head_dim)), turned."""
    rows = (_dense(layer.qkv) @ n[0] + layer.qkv.bias.double()).view(sizes.kv_heads, -1, sizes.head_dim)
    if (turning := layer.cache.turning) is not None:
        at = torch.full(rows[:, :-1].shape[:2], position, device=n.device)
        rows = torch.cat((turned_reference(rows[:, :-1], turning, at), rows[:, -1:]), 1)
    return rows[:, :-2], rows[:, -2], rows[:, -1]


def first_reference(layer: StepLayer, x: Tensor) -> Tensor:
    """(1, d_ffn): products that are activated, the gate's or up's, of the stream x (1, d) in front of an MLP."""
    first = layer.gate or layer.up
    return layer_norm_reference(x, layer.norm2, x.dtype) @ _dense(first).T + first.bias.double()


def hidden_reference(sizes: StepSizes, layer: StepLayer, first: Tensor, x: Tensor) -> Tensor:
    """(1, d_ffn): hidden values of all neurons, from `first_reference`."""
    name = "relu2" if sizes.squared else "relu"
    hidden = activation_reference(first, name, sizes.threshold)
    if layer.gate is None:
        return hidden
    up = first_reference(replace(layer, gate=None), x)
    return hidden * (activation_reference(up, name, sizes.threshold) if sizes.both else up)


def scores_reference(layer: StepLayer, n: Tensor) -> Tensor:
    """(1, d_ffn): what the predictor says of a norm's output n (1, d), in float64."""
    own = layer.predictor
    assert own is not None and own.bias is not None
    hidden = down_reference(n, own)
    return hidden @ unscaled(own.up, own.up_scale, n.dtype, hidden.shape[1]).T + own.bias.double()


def _dense(linear: Linear) -> Tensor:
    return linear.weight.dense(torch.float64)
