"""Weights of a lossless draft beside those of the model: rounded to 4 bits at load, or those of a quantised folder.

What is no matrix of a layer is the model's own: embeddings, norms, biases, and the LM head of rounded weights.
"""

import dataclasses

from torch import Tensor

from dejavu_train.engine.memory import check_room, weight_bytes
from dejavu_train.engine.model_weights import weights_of_model
from dejavu_train.engine.ranks.reading import load_shard
from dejavu_train.engine.ranks.shard import Shard
from dejavu_train.engine.weights import DecodeWeights, LayerWeights
from dejavu_train.ground.errors import UserError
from dejavu_train.kernels.formats.format import Format
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.formats.matrix import Linear
from dejavu_train.models.config_values import INT4, quant_method, read_dims, read_values
from dejavu_train.models.int4_sizes import part_sizes
from dejavu_train.models.load import load_model
from dejavu_train.quantize.rounding import round_nearest

NAME = "weights of the draft"


def draft_weights(weights: DecodeWeights, asked: str, shard: Shard | None = None) -> DecodeWeights:
    """The weights of a draft, made once and kept beside ``weights``.

    Args:
        asked: ``int4``, or a folder that ``python -m dejavu_train.quantize`` wrote from the same model.
        shard: of which the weights are. None = they are whole.
    Raises:
        UserError: weights in 4 bits already, a width without such a form, a folder of another shape, another form.
        DoesNotFit: the GPU's memory.
    """
    if asked not in weights.drafts:
        if weights.packed:
            raise UserError("draft_weights are for a model that is not in 4 bits itself; leave draft_weights out")
        if asked == "int8":
            raise UserError("draft_weights=int8 is for the CPU engine; on a GPU pass draft_weights='int4'")
        weights.drafts[asked] = rounded(weights) if asked == "int4" else stored(weights, asked, shard)
    return weights.drafts[asked]


def rounded_bytes(weights: DecodeWeights) -> int:
    """Bytes of all layers' matrices in 4 bits."""
    return weights.shape.n_layers * sum(size.nbytes for size in part_sizes(weights.shape).values())


def bytes_beside(draft: DecodeWeights, weights: DecodeWeights) -> int:
    """Bytes of a draft's weights that are not those of ``weights``."""
    own = {tensor.data_ptr() for tensor in weights.tensors()}
    return sum(tensor.nbytes for tensor in draft.tensors() if tensor.data_ptr() not in own)


def rounded(weights: DecodeWeights) -> DecodeWeights:
    """Every matrix of every layer to the nearest codes. All else is shared."""
    sizes, h = part_sizes(weights.shape), weights.shape.n_heads
    check_room({NAME: rounded_bytes(weights)}, weights.embedding.device)

    def coded(linear: Linear, part: str, rows: Tensor) -> Linear:
        codes, scales = round_nearest(rows.flatten(0, -2).float(), sizes[part].group)
        return Linear(Int4Rows.of(codes, scales).view(*rows.shape), linear.bias)

    def layer_of(layer: LayerWeights) -> LayerWeights:
        dtype = weights.embedding.dtype
        out, down = layer.whole_out(dtype), layer.down.weight.dense(dtype)
        return dataclasses.replace(
            layer,
            qkv=coded(layer.qkv, "q", layer.qkv.weight.dense(dtype)),
            out=coded(layer.out, "out", out.unflatten(1, (h, -1)).transpose(0, 1).contiguous()),
            up=coded(layer.up, "up", layer.up.weight.dense(dtype)),
            down=coded(layer.down, "down", down if layer.down_transposed else down.T.contiguous()),
            down_transposed=True,
        )

    return dataclasses.replace(weights, layers=[layer_of(layer) for layer in weights.layers], drafts={})


def stored(weights: DecodeWeights, folder: str, shard: Shard | None = None) -> DecodeWeights:
    """Read a quantised folder. Embeddings are the model's own, since draft and model read and write the same tokens."""
    own, device = weights.embedding, weights.embedding.device
    shape, whole = read_dims(folder), weights.shape if shard is None else shard.whole
    packed = quant_method(read_values(folder)) == INT4
    if shape != whole or not packed:
        found = f"another shape, {shape}" if packed else "no weights in 4 bits"
        raise UserError(
            f"the draft's folder must hold this model in 4 bits, {folder} has {found}; write one with python -m"
            " dejavu_train.quantize, or pass draft_weights='int4'"
        )
    model = load_model(folder) if shard is None else load_shard(folder, shard, own.dtype, device)[0]
    check_room({NAME: weight_bytes(model, own.dtype)}, device)
    read = weights_of_model(model, own.dtype, device, held=None if shard is None else shard.dims)
    read = read if shard is None else shard.with_head(read)
    head = read.lm_head if read.lm_head.format is Format.INT4 else weights.lm_head
    return dataclasses.replace(read, embedding=own, positions=weights.positions, lm_head=head, drafts={})
