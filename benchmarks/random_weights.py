"""Writes random tensors of `engine.weights`, of a true shape: for benchmarks."""

import torch
from torch import Tensor

from dejavu_train.engine.model_weights import KINDS, norms_placed, placed_by
from dejavu_train.engine.planned import hidden_values
from dejavu_train.engine.weights import DecodeWeights, LayerWeights
from dejavu_train.families import ModelDims
from dejavu_train.families.dims import Norm, Positions, QkNorm
from dejavu_train.kernels.common.layer_norm import LayerNormWeights
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.formats.matrix import Linear, Matrix, Rows
from dejavu_train.kernels.stages.norm import HeadNorms
from dejavu_train.models.int4_sizes import COLUMNS_PER_WORD, head_sizes, part_sizes

CODE_SIZE = 4.64  # root mean square of the codes -8..7


def weights_of_shape(
    shape: ModelDims,
    dtype: torch.dtype,
    device: torch.device | str,
    std: float = 0.02,
    packed: bool = False,
    packed_head: bool = False,
) -> DecodeWeights:
    """Random weights of a true shape, made on the device: for benchmarks. Layers share nothing.

    packed: matrices of random words, with scales of either sign, that stand nowhere as numbers. packed_head: the LM
        head as well, which is the embedding otherwise.
    """
    generator = torch.Generator(device).manual_seed(0)
    d, ffn, h, hd = shape.d_model, shape.d_ffn, shape.n_heads, shape.head_dim
    g, r = shape.n_kv_heads, shape.kv_group

    def normal(*sizes: int) -> Tensor:
        return torch.empty(*sizes, dtype=dtype, device=device).normal_(0, std, generator=generator)

    def matrix(part: str, *sizes: int) -> Matrix:
        return words_of(part_sizes(shape)[part].group, *sizes) if packed else Rows(normal(*sizes))

    def words_of(group: int, *sizes: int) -> Int4Rows:
        *leading, columns = sizes
        groups = columns // group
        words = torch.empty(*leading, columns // COLUMNS_PER_WORD, dtype=torch.int32, device=device)
        words.random_(-(2**31), 2**31, generator=generator)
        signs = torch.empty(*leading, groups, dtype=torch.float16, device=device).random_(2, generator=generator)
        return Int4Rows(words, signs.mul_(2).sub_(1).mul_(std / CODE_SIZE))

    def zeros(*sizes: int) -> Tensor:
        return torch.zeros(*sizes, dtype=dtype, device=device)

    def norm(columns: int = d) -> LayerNormWeights:
        rms = shape.norm in (Norm.RMS_NORM, Norm.RMS_NORM_PLAIN)
        one = torch.ones(columns, dtype=dtype, device=device)
        return LayerNormWeights(one, zeros(columns), kind=KINDS[rms])

    layers = [
        LayerWeights(
            norm1=norm(),
            qkv=Linear(matrix("q", g, r + 2, hd, d), zeros(g, r + 2, hd)),
            out=Linear(matrix("out", h, d, hd) if packed else Rows(normal(d, h * hd)), zeros(d)),
            norm2=norm(),
            up=Linear(matrix("up", ffn, d), zeros(ffn)),
            down=Linear(matrix("down", ffn, d) if packed else Rows(normal(d, ffn)), zeros(d)),
            down_transposed=packed,
            gate=Linear(matrix("up", ffn, d), zeros(ffn)) if shape.gated else None,
            hidden=hidden_values(shape),
            head_norms=None if shape.qk_norm is QkNorm.NONE else HeadNorms(norm(hd), norm(hd)),
        )
        for _ in range(shape.n_layers)
    ]
    embedding = normal(shape.vocab_size, d)
    learned = shape.positions is Positions.LEARNED
    positions = normal(shape.max_positions, d) if learned else None
    head = head_sizes(shape, "int4") if packed_head else None
    lm_head: Matrix = Rows(embedding) if head is None else words_of(head.group, shape.vocab_size, d)
    placed = placed_by(shape, usual_turns(shape) if shape.positions is Positions.ROTARY else None, device)
    behind = norm() if shape.embedding_norm else None
    layers, final_norm = norms_placed(layers, None if shape.post_norm else norm())
    return DecodeWeights(shape, embedding, positions, layers, final_norm, lm_head, placed, behind)


def usual_turns(dims: ModelDims) -> Tensor:
    """Cosines and sines (P, 2, r / 2) of a model with the base 10,000: for random weights."""
    half = int(dims.head_dim * dims.rotary_share) // 2
    angles = torch.arange(dims.max_positions)[:, None] * 10_000.0 ** (-torch.arange(half).float() / half)
    return torch.stack([angles.cos(), angles.sin()], dim=1)
