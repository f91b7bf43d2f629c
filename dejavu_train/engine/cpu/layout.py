"""Where the rows of a model lie, and its numbers: `arrays.Model` of the sizes and kinds of any family."""

import math

import numpy as np

from dejavu_train.engine.cpu.arrays import (
    BEFORE,
    BEHIND,
    GELU_KIND,
    GELU_TANH_KIND,
    MLP_DOWN,
    MLP_IN,
    MLP_UP,
    NEVER,
    OUT,
    QKV,
    RELU2_KIND,
    RELU_KIND,
    Model,
    padded,
)
from dejavu_train.engine.cpu.row_kernels import WIDEST_GROUP
from dejavu_train.engine.cpu_limits import BLOCK, CHUNK, HALF, WHOLE
from dejavu_train.families import ModelDims
from dejavu_train.families.dims import Activation, Norm, Positions, QkNorm
from dejavu_train.ground.errors import UserError

DTYPES = {"float32": np.float32, "float16": np.uint16, "bfloat16": np.uint32, "int8": np.int8, "int4": np.int8}
"""The dtypes of rows that are not packed: fp16 by its bits, bf16 as pairs, codes."""
SMALL = (
    "norms", "qkv_bias", "up_bias", "in_bias", "down_bias", "positions", "turns", "head_norms", "slopes",
)  # fmt: skip
"""The arrays of `arrays.Model` that are no matrix. They are fp32 in every format."""
ACTIVATIONS = {
    Activation.RELU: RELU_KIND, Activation.FATRELU: RELU_KIND, Activation.DRELU: RELU_KIND,
    Activation.RELU2: RELU2_KIND, Activation.GELU: GELU_KIND, Activation.GELU_TANH: GELU_TANH_KIND,
}  # fmt: skip
HEAD_NORMS = {QkNorm.NONE: NEVER, QkNorm.BEFORE: BEFORE, QkNorm.BEHIND: BEHIND}
CENTRED = (Norm.LAYER_NORM, Norm.LAYER_NORM_1P)


def new_model(
    shape: ModelDims, stored: str, group: int | None, *, tied: bool, eps: float, head_eps: float, final_norm: bool,
    coded: bool = False, wide: np.ndarray | None = None,
) -> Model:  # fmt: skip
    """The arrays of a model of these sizes, and the numbers that say what its layers compute.

    Args:
        stored: one of ``DTYPES``. group: columns that share a scale, None = CHUNK, of 4 bits HALF.
        coded: codes and scales of a 4-bit model. wide: (L, 5) bool, parts that 4 bits are not enough for, None = none.
        tied: the LM head is the embedding. eps, head_eps: of the norms, and of those of queries and keys.
        final_norm: there is one.
    Raises:
        UserError: a group that does not exist.
    """
    least, allowed = (HALF, "a power of two from") if stored == "int4" else (CHUNK, "a multiple of")
    uneven = group is not None and (group & (group - 1) if stored == "int4" else group % CHUNK)
    if group is not None and (stored in WHOLE or not least <= group <= WIDEST_GROUP or uneven):
        raise UserError(
            f"group must be {allowed} {least} up to {WIDEST_GROUP}, of weights stored in int8 or int4; got {group} of"
            f" {stored}"
        )
    d, f, n_layers, vocab = shape.d_model, shape.d_ffn, shape.n_layers, shape.vocab_size
    h, e, columns = shape.n_heads, shape.head_dim, padded(d)
    pair_group = group or HALF
    group = columns if stored in WHOLE else CHUNK if stored == "int4" else min(group or CHUNK, columns)
    qkv, sizes = (h + 2 * shape.n_kv_heads) * e, part_rows(shape)
    packed = np.full((n_layers, len(sizes)), stored == "int4")
    packed &= True if wide is None else ~wide
    first, n_pairs = _place(np.where(packed, sizes, 0))
    others, embedding = _place(np.where(packed, 0, sizes))
    first = np.where(packed, first, others)
    if not shape.gated:  # what is activated first is up
        first[:, MLP_IN], packed[:, MLP_IN] = first[:, MLP_UP], packed[:, MLP_UP]
    n_rows = embedding + vocab * (1 if tied else 2)
    pairs, blocks = ((n_pairs, columns // 2), np.uint8), math.ceil(columns / pair_group / BLOCK)
    screened = vocab if stored in WHOLE else 1
    learned = shape.max_positions if shape.positions is Positions.LEARNED else 0
    turned = shape.max_positions if shape.positions is Positions.ROTARY else 0
    half = int(shape.rotary_share * e) // 2 if turned else 0
    head_norm, up_bias = HEAD_NORMS[shape.qk_norm], np.zeros((n_layers, f), np.float32)
    return Model(
        rows=np.empty((n_rows, columns // (2 if stored == "bfloat16" else 1)), DTYPES[stored]),
        scales=np.ones((n_rows, math.ceil(columns / group)), np.float32),
        pairs=np.empty(*(pairs if stored == "int4" else ((0, columns), DTYPES[stored]))),
        pair_scales=np.empty((n_pairs, blocks * BLOCK), np.uint16 if stored == "int4" else np.float32),
        pair_most=np.empty(n_pairs, np.float32),
        pair_group=pair_group,
        packed=packed.astype(np.int64),
        out_scale=np.ones((n_layers if coded else 0, shape.n_heads, columns), np.float32),
        group=group,
        first=first.astype(np.int64),
        embedding=embedding,
        lm_head=embedding if tied else embedding + vocab,
        screen=np.zeros((screened, columns), np.int8),
        screen_scale=np.ones((screened, math.ceil(columns / WIDEST_GROUP)), np.float32),
        screen_error=np.zeros((screened, 2), np.float32),
        vocab=vocab,
        kv_group=shape.kv_group,
        norms=np.zeros((2 * n_layers + 2, 2, d), np.float32),
        eps=eps,
        centred=int(shape.norm in CENTRED),
        post_norm=int(shape.post_norm),
        final_norm=int(final_norm),
        embedding_norm=int(shape.embedding_norm),
        qkv_bias=np.zeros((n_layers, qkv), np.float32),
        up_bias=up_bias,
        in_bias=np.zeros((n_layers, f), np.float32) if shape.gated else up_bias,
        down_bias=np.zeros((n_layers, d), np.float32),
        positions=np.zeros((learned, d), np.float32),
        turns=np.zeros((turned, 2, half), np.float32),
        head_norm=head_norm,
        head_norms=np.zeros((n_layers, 2, 2, e), np.float32),
        head_eps=head_eps,
        slopes=np.zeros(h, np.float32),
        q_scaling=e**-0.5 if head_norm == NEVER else 1.0,
        activation=ACTIVATIONS[shape.activation],
        threshold=float(shape.threshold),
        gated=int(shape.gated),
        activates_up=int(shape.activation is Activation.DRELU),
        logit_cap=float(shape.logit_cap),
    )


def part_rows(shape: ModelDims) -> np.ndarray:
    """Rows of the parts of a layer, (5) by part. Without a gate MLP_IN has none of its own: it is MLP_UP."""
    heads = shape.n_heads * shape.head_dim
    shared = shape.n_kv_heads * shape.head_dim
    assert (QKV, OUT, MLP_UP, MLP_DOWN, MLP_IN) == (0, 1, 2, 3, 4)
    return np.array([heads + 2 * shared, heads, shape.d_ffn, shape.d_ffn, shape.d_ffn if shape.gated else 0])


def _place(sizes: np.ndarray) -> tuple[np.ndarray, int]:
    """Where parts of these sizes (L, 5) begin, one behind the other, and where the last ends."""
    ends = sizes.cumsum().reshape(sizes.shape)
    return ends - sizes, int(sizes.sum())
