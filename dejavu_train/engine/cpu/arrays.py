"""The arrays of the CPU engine, in the groups in which compiled code receives them.

    L layers   T context   V vocabulary   d model width   f neurons   h heads   e head width
    g units of attention: heads of K and V, each with the c = h / g query heads that share it
    D = d in whole chunks of CHUNK columns   B batch rows   N threads
    P predictors   R the largest rank   C layers with a second stage

A *row* is d weights that are multiplied with one number or summed into one. It is a row of q, k, v, up or the LM head
as stored, or a column of the output projection or of down. All rows of a model lie in one array, so that whatever is
selected is a list of row numbers. ``value = code * scale`` with one scale for each ``group`` columns. fp32 codes have
scale 1. Rows of the output projection of a 4-bit model have scale 1, because their groups lie across a head's rows.
What a head's rows sum up to is multiplied by ``out_scale``, the scale of each head and output. Columns from d to D are
zero, in rows and in vectors.

The *operand* is what rows are multiplied with: an fp32 vector for fp32 rows. For int8 rows whole numbers in
-LEVELS..LEVELS with a unit, since products of whole numbers are several times faster than those of converted codes.
"""

import math

import numpy as np

from dejavu_train.engine.cpu.groups import Group
from dejavu_train.engine.cpu_limits import CHUNK
from dejavu_train.families import ModelDims

QKV, OUT, MLP_UP, MLP_DOWN, MLP_IN = range(5)  # parts of a layer, columns of Model.first
HEADS, MLP = range(2)  # targets, columns of Selectors.at
FLOAT32, FLOAT16, INT8, INT4 = range(4)  # how a predictor is stored
KIND, RANK, UNITS, RELU, TOP_K, DOWN, UP, DOWN_SCALE, UP_SCALE, BIAS = range(10)  # columns of Selectors.spec
WEIGHTS, PREDICTORS, LM_HEAD, KV = range(4)  # columns of Scratch.bytes_read
DONE, SPARSE, DENSE = range(3)  # State.row_state
LINE = 64  # bytes; what two threads write again and again never lies on one cache line
PADDED = LINE // 4  # elements between the parts of two threads
GREEDY, SAMPLED = range(2)  # greedy rows alone, or each row as its numbers say
LEVELS = 127 * 257  # the largest of an operand, in int16
RELU_KIND, RELU2_KIND, GELU_KIND, GELU_TANH_KIND = range(4)  # Model.activation
NEVER, BEFORE, BEHIND = range(3)  # Model.head_norm: where norms of q and k stand, seen from their rotation


class Model(Group):
    """Weights of a model, and the numbers that say how they are used.

    Rows of q, k and v: first[QKV] + (c + 2) e unit, then the unit's c e rows of q, e of k, e of v.
    """

    rows: np.ndarray
    """(n, D) fp32 or int8: the rows of all parts but those that are packed."""
    scales: np.ndarray
    """(n, ceil(D / group)) fp32."""
    pairs: np.ndarray
    """(m, D / 2) uint8: rows of 4 bits, two a byte, see `level_products`. Without them 0 rows of the others' kind."""
    pair_scales: np.ndarray
    """(m, ceil(D / pair_group)), in whole blocks: fp16 as uint16."""
    pair_most: np.ndarray
    """(m,) fp32: the largest size of a row's scales."""
    pair_group: int
    """Columns of ``pairs`` that share a scale."""
    packed: np.ndarray
    """(L, 5): whether a part's rows lie in ``pairs``."""
    out_scale: np.ndarray
    """(L, h, D) fp32 of a 4-bit model's codes, else (0, h, D)."""
    group: int
    """Columns that share a scale."""
    first: np.ndarray
    """(L, 5): first row of each part, in ``rows`` or ``pairs``. MLP_IN: of what is activated first, the gate or up."""
    embedding: int
    """First row of the tokens' embedding."""
    lm_head: int
    """First row of the LM head."""
    screen: np.ndarray
    """(V, D) int8: the LM head a second time, where rows are fp32."""
    screen_scale: np.ndarray
    """(V, ceil(D / WIDEST_GROUP))."""
    screen_error: np.ndarray
    """(V, 2): error of an int8 logit at most, for each unit of the norm of x and for each unit of its levels."""
    vocab: int
    """Tokens, V."""
    kv_group: int
    """Query heads that share a head of K and V, c."""
    norms: np.ndarray
    """(2 L + 2, 2, d): weight and bias of the norms in order of use, the last that of the embedding."""
    eps: float
    """The norms' eps."""
    centred: int
    """Whether a norm takes x less its mean, as LayerNorm has it."""
    post_norm: int
    """Whether norms stand behind the halves."""
    final_norm: int
    """Whether there is one before the LM head."""
    embedding_norm: int
    """Whether there is one behind the embedding."""
    qkv_bias: np.ndarray
    """By layer, in the order of the rows."""
    up_bias: np.ndarray
    """(L, f)."""
    in_bias: np.ndarray
    """(L, f): bias of what is activated first."""
    down_bias: np.ndarray
    """(L, d)."""
    positions: np.ndarray
    """(T, d) as OPT stores them, (0, d) of others."""
    turns: np.ndarray
    """(T, 2, r / 2): cosines and sines that turn q and k, (0, 2, 0) of others."""
    head_norm: int
    """Place of the norms of q and k: NEVER, BEFORE or BEHIND."""
    head_norms: np.ndarray
    """(L, 2, 2, e): weight and bias of the norms of q and k, those of q times their scaling."""
    head_eps: float
    """The eps of the norms of q and k."""
    slopes: np.ndarray
    """(h): of ALiBi, else 0."""
    q_scaling: float
    """Factor of q where nothing norms it."""
    activation: int
    """Kind of activation, RELU_KIND and so on."""
    threshold: float
    """Number that an active neuron exceeds."""
    gated: int
    """As in `BlockParts`."""
    activates_up: int
    """As in `BlockParts`."""
    logit_cap: float
    """Bound of the logits, 0 = none."""


class Selectors(Group):
    """Additions of a bundle: predictors, the means of skipped heads, the second stage of cascades.

    at (L, 2): number of the predictor of a target, -1 = dense. sites (2 L + 1), readers: the predictors that read at
    half s (attn_in of layer s // 2, or mlp_in) are readers[sites[s] : sites[s + 1]]. spec (P, 10): see the columns.
    Offsets count elements of the flat arrays float32, float16 (as uint16), int8 and int4 (bytes of two codes, as in
    ``quantization``). Down lies there as stored, up transposed. out_bias (L, d) includes the projected means. means (L,
    h, e). kept (L): where attn_in of a layer is kept, -1 = nowhere. fine (L): number of the cascade, -1 = none. upper
    (C f, D / 2): two codes + 8 a byte, column j low and D / 2 + j high. whole (C f, D) int16 with whole_scale (C f, 1).
    grid (C f, 2), with columns step, stage-2 threshold.
    """

    at: np.ndarray
    sites: np.ndarray
    readers: np.ndarray
    spec: np.ndarray
    threshold: np.ndarray
    float32: np.ndarray
    float16: np.ndarray
    int8: np.ndarray
    int4: np.ndarray
    scale: np.ndarray
    bias: np.ndarray
    out_bias: np.ndarray
    means: np.ndarray
    kept: np.ndarray
    fine: np.ndarray
    upper: np.ndarray
    whole: np.ndarray
    whole_scale: np.ndarray
    grid: np.ndarray

    def without_second_stage(self) -> "Selectors":
        """The same, but every neuron that a predictor lets through is multiplied. Shares its arrays."""
        fields = {name: getattr(self, name) for name in type(self).__annotations__}
        return Selectors(**{**fields, "fine": np.full_like(self.fine, -1)})

    def without_predictors(self) -> "Selectors":
        """The same with every unit computed, and nothing kept for one that was skipped. Shares its arrays."""
        fields = {name: getattr(self, name) for name in type(self).__annotations__}
        nothing = {name: np.full_like(getattr(self, name), -1) for name in ("at", "kept")}
        return Selectors(**{**fields, **nothing, "sites": np.zeros_like(self.sites)})


class State(Group):
    """Per row: sequence (B), the number of the sequence whose token it runs, 0 to S - 1. Engines have a row for each
    sequence. Verification has eight rows of one. position, known, least, limit, sparse_from, row_state, and how the row
    samples (B): see ``advance``. scored (B): whether its logits are kept. fault (B): 0, or the position before which
    numbers were first not finite. fault_site (B): the half that they came from, as `normalise` counts, 0 = the LM head.

    Per sequence: tokens (S, T) int32, nll (S, T) fp32, seen (S, V) int32, see `penalise`. Caches: keys (L, S, g, e, T),
    values (L, S, g, T, e) fp32, or fp16 as uint16. attn_in (layers with sparse heads, S, T, D) as operands, with
    attn_unit (., S, T). watermark (L, S, g): K and V are valid below.
    """

    sequence: np.ndarray
    tokens: np.ndarray
    nll: np.ndarray
    position: np.ndarray
    known: np.ndarray
    least: np.ndarray
    limit: np.ndarray
    sparse_from: np.ndarray
    row_state: np.ndarray
    scored: np.ndarray
    stops: np.ndarray
    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    min_p: np.ndarray
    repetition: np.ndarray
    presence: np.ndarray
    frequency: np.ndarray
    seed: np.ndarray
    seen: np.ndarray
    fault: np.ndarray
    fault_site: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    attn_in: np.ndarray
    attn_unit: np.ndarray
    watermark: np.ndarray

    def clear(self) -> None:
        """Forget all rows. Caches keep their content, which no watermark and no position reaches."""
        zero = (self.position, self.known, self.least, self.limit, self.sparse_from, self.fault, self.fault_site)
        for array in (*zero, self.scored, self.watermark, self.min_p, self.presence, self.frequency):
            array[:] = 0
        self.row_state[:], self.stops[:], self.repetition[:] = DONE, -1, 1


class Scratch(Group):
    """Scratch of each thread, with gaps at the end of its part. x, normed (N, B, D) fp32, operand (N, B, D) and
    operand_unit (N, B) of normed. levels (N, B, D) int16, level_unit, level_sum (N, B). partial (2, N, B, D), scores
    (N, max(T, g, e)), mask, heads (N, g). units, unit_rows, found, found_rows (N, f). A list of row numbers (N, .)
    int32, with results or factors of each (N, B, .) fp32, and a second of them where MLPs are gated. best_token and
    faulty (N, B), counts and bytes_read (N, 4). What all share: hidden (P, B, R), q and heads_out (B, h e), unit_logits
    (B, f), logits (B, V), residual (B, d), ones (B). raw (B, V): logits
    as the model gives them, of scored rows.
    """

    x: np.ndarray
    normed: np.ndarray
    operand: np.ndarray
    operand_unit: np.ndarray
    levels: np.ndarray
    level_unit: np.ndarray
    level_sum: np.ndarray
    scores: np.ndarray
    partial: np.ndarray
    mask: np.ndarray
    heads: np.ndarray
    units: np.ndarray
    unit_rows: np.ndarray
    found: np.ndarray
    found_rows: np.ndarray
    numbers: np.ndarray
    results: np.ndarray
    second: np.ndarray
    best_token: np.ndarray
    faulty: np.ndarray
    counts: np.ndarray
    bytes_read: np.ndarray
    hidden: np.ndarray
    q: np.ndarray
    heads_out: np.ndarray
    unit_logits: np.ndarray
    logits: np.ndarray
    raw: np.ndarray
    residual: np.ndarray
    ones: np.ndarray


def padded(d: int) -> int:
    """d columns in whole chunks."""
    return -(-d // CHUNK) * CHUNK


def aligned(size: tuple[int, ...], dtype: type) -> np.ndarray:
    """Zeros that start on a cache line."""
    n_bytes = math.prod(size) * np.dtype(dtype).itemsize
    memory = np.zeros(n_bytes + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + n_bytes].view(dtype).reshape(size)


SHARED = ("tokens", "seen", "nll", "stops", "keys", "values", "watermark")


def new_state(
    shape: ModelDims, batch: int, context: int, n_kept: int, operand: type, of: State | None = None,
    cached: type = np.float32,
) -> State:  # fmt: skip
    """All rows done. Pages of the caches are taken from memory as rows grow.

    Args:
        n_kept: layers with sparse heads. operand: fp32 or int16.
        of: a state of one sequence, which all rows are rows of. None = each row is a sequence of its own.
        cached: fp32, or uint16 of fp16: K and V where ``of`` is None.
    """
    n_layers, g, e = shape.n_layers, shape.n_kv_heads, shape.head_dim
    n_sequences = batch if of is None else 1

    def ints(*size: int) -> np.ndarray:
        return np.zeros(size, np.int64)

    def floats(*size: int) -> np.ndarray:
        return np.zeros(size, np.float32)

    shared = (
        {name: getattr(of, name) for name in SHARED}
        if of is not None
        else dict(
            tokens=np.zeros((batch, context), np.int32),
            seen=np.zeros((batch, shape.vocab_size), np.int32),
            nll=floats(batch, context),
            stops=ints(8) - 1,
            keys=np.zeros((n_layers, batch, g, e, context), cached),
            values=np.zeros((n_layers, batch, g, context, e), cached),
            watermark=ints(n_layers, batch, g),
        )
    )
    return State(
        **shared,
        sequence=np.arange(batch) if of is None else ints(batch),
        position=ints(batch),
        known=ints(batch),
        least=ints(batch),
        limit=ints(batch),
        sparse_from=ints(batch),
        row_state=ints(batch),
        scored=ints(batch),
        temperature=floats(batch) + 1,
        top_p=floats(batch) + 1,
        top_k=ints(batch),
        min_p=floats(batch),
        repetition=floats(batch) + 1,
        presence=floats(batch),
        frequency=floats(batch),
        seed=ints(batch),
        fault=ints(batch),
        fault_site=ints(batch),
        attn_in=np.zeros((n_kept, n_sequences, context, padded(shape.d_model)), operand),
        attn_unit=floats(n_kept, n_sequences, context) + 1,
    )


def new_scratch(
    shape: ModelDims, batch: int, context: int, n_threads: int, selectors: Selectors, operand: type
) -> Scratch:
    """Scratch of one engine. operand: fp32 or int16."""
    d, f, g, vocab = shape.d_model, shape.d_ffn, shape.n_kv_heads, shape.vocab_size
    wide = shape.n_heads * shape.head_dim
    rank = max([1, *selectors.spec[:, RANK].tolist()])

    def floats(*size: int) -> np.ndarray:
        return aligned(size, np.float32)

    def ints(*size: int) -> np.ndarray:
        return aligned(size, np.int64)

    vectors = (n_threads, batch + 1, padded(d))  # the last is a gap
    listed = max(f, wide + 2 * g * shape.head_dim, -(-vocab // n_threads)) + PADDED
    normed = floats(*vectors)
    return Scratch(
        x=floats(*vectors),
        normed=normed,
        operand=normed if operand == np.float32 else aligned(vectors, operand),
        operand_unit=floats(n_threads, PADDED) + 1,
        levels=aligned(vectors, np.int16),
        level_unit=floats(n_threads, PADDED),
        level_sum=ints(n_threads, PADDED),
        scores=floats(n_threads, max(context, g, shape.head_dim) + PADDED),
        partial=floats(2, *vectors),
        mask=ints(n_threads, g + PADDED),
        heads=ints(n_threads, g + PADDED),
        units=ints(n_threads, f + PADDED),
        unit_rows=ints(n_threads, f + PADDED),
        found=ints(n_threads, f + PADDED),
        found_rows=ints(n_threads, f + PADDED),
        numbers=aligned((n_threads, listed), np.int32),
        results=floats(n_threads, batch, listed),
        second=floats(n_threads, batch, (f if shape.gated else 0) + PADDED),
        best_token=ints(n_threads, PADDED),
        faulty=ints(n_threads, PADDED),
        counts=ints(n_threads, PADDED),
        bytes_read=ints(n_threads, PADDED),
        hidden=floats(max(1, len(selectors.spec)), batch, rank),
        q=floats(batch, wide),
        heads_out=floats(batch, wide),
        unit_logits=floats(batch, f),
        logits=floats(batch, vocab),
        raw=floats(batch, vocab),
        residual=floats(batch, d),
        ones=np.ones(batch, np.float32),
    )
