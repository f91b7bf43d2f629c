"""q/k/v of selected heads with 4-bit weights, and the tensor cores' tile that they are made of."""

import pytest
import torch
import triton
import triton.language as tl
from int4_helpers import random_rows, with_outliers

from dejavu_train.kernels.common.int4_mma import int4_mma
from dejavu_train.kernels.common.kv_cache import HeadStep, KvCache
from dejavu_train.kernels.common.limits import Products
from dejavu_train.kernels.common.selection import Selection
from dejavu_train.kernels.formats.int4 import unpack_int4
from dejavu_train.kernels.formats.matrix import Linear
from dejavu_train.kernels.lookahead.qkv_select import qkv_select, qkv_select_reference
from dejavu_train.kernels.stages.predictor import Predictor, PredictorWeights, head_selection
from dejavu_train.kernels.stages.qkv import QkvSettings, qkv, qkv_reference

NAN = float("nan")


@triton.jit
def _mma_kernel(words, x, out, V: tl.constexpr, L: tl.constexpr, ASM: tl.constexpr):
    lane = tl.arange(0, L)
    w = ()
    for v in tl.static_range(2 * V):
        w = w + (tl.load(words + lane * (2 * V) + v),)
    planes = ()
    for k in tl.static_range(4 * V):
        planes = planes + (tl.load(x + lane * (4 * V) + k),)
    sums = int4_mma(w, planes, V, ASM)
    for c in tl.static_range(4):
        tl.store(out + lane * 4 + c, sums[c])


def warps_tile(device, v, asm=False):
    """Lane (g, t) holds v words of rows g and g + 8, and input g's columns."""
    torch.manual_seed(v)
    words = torch.randint(-(2**31), 2**31, (64, 2, v)).to(torch.int32)
    x = with_outliers(torch.randn(64, 8 * v)).half()
    out = torch.full((64, 4), NAN, device=device)
    _mma_kernel[(1,)](words.to(device), x.view(torch.int32).to(device), out, v, 64, asm, num_warps=2)
    codes = unpack_int4(words.view(-1, v)).view(2, 8, 4, 2, 8 * v).double()  # warp, g, t, row half, columns
    want = torch.einsum("wgthc,wntc->whgn", codes, x.view(2, 8, 4, 8 * v).double())
    want = want.view(2, 2, 8, 4, 2).permute(0, 2, 3, 1, 4).reshape(64, 4)  # lane (g, t): row half, parity
    torch.testing.assert_close(out.cpu().double(), want, atol=1e-2, rtol=1e-5)
    return out


@pytest.mark.parametrize("v", [1, 2, 4])
def test_a_warps_tile(device, v):
    warps_tile(device, v)


@pytest.mark.gpu
@pytest.mark.parametrize("v", [1, 2, 4])
def test_the_assembly_equals_its_twin(v):
    torch.testing.assert_close(warps_tile("cuda", v, True), warps_tile("cuda", v), atol=1e-2, rtol=1e-5)


def case(device, batch, n_heads, head_dim, d, group, density, capacity=9, size=0.05):
    weight = random_rows(device, n_heads, 3, head_dim, d, group=group, size=size)
    attn_in = with_outliers(torch.randn(batch, capacity, d, device=device)).half()
    bias = torch.randn(n_heads, 3, head_dim, device=device)
    position = torch.randint(capacity // 2, capacity, (batch,), dtype=torch.int32, device=device)
    for b in range(batch):
        attn_in[b, int(position[b]) + 1 :] = NAN
    watermark = (torch.rand(batch, n_heads, device=device) * (position[:, None] + 1)).to(torch.int32)
    selection = head_selection(n_heads, device)
    selection.set_mask(torch.rand(batch, n_heads, device=device) < density)
    return attn_in, weight, bias, selection, position, watermark


def outputs(attn_in, bias, dtype=torch.float32):
    batch, capacity, _ = attn_in.shape
    n_heads, _, head_dim = bias.shape
    q = torch.full((batch, n_heads, head_dim), NAN, device=bias.device, dtype=dtype)
    k, v = (torch.full((batch, n_heads, capacity, head_dim), NAN, device=bias.device, dtype=dtype) for _ in range(2))
    return q, k, v


def check(function, reference, tensors, skip_unselected=True, **options):
    """Against float64: products are exact, sums of fp32. What is not asked for stays as it was."""
    attn_in, weight, bias, selection, position, watermark = tensors
    made, exact = outputs(attn_in, bias), outputs(attn_in, bias, torch.float64)

    def run(call, q, k, v, **options):
        step = HeadStep(q, KvCache(k, v, attn_in, watermark), position, selection)
        call(Linear(weight, bias), step, **options)

    kept = weight.scales.clone()
    if skip_unselected:
        weight.scales[selection.row_bits == 0] = NAN  # heads that no row selects are not multiplied
    run(function, *made, **options)
    weight.scales.copy_(kept)
    run(reference, *exact)
    size = (attn_in.nan_to_num().double().abs().amax() * weight.scales.double().abs().amax() * 8).item()
    for got, want in zip(made, exact, strict=True):
        torch.testing.assert_close(got.double(), want.double(), equal_nan=True, atol=2e-6 * size, rtol=1e-5)
    return made


@pytest.mark.parametrize(
    ("batch", "n_heads", "head_dim", "d", "group", "density"),
    [(1, 2, 16, 256, 128, 0.5), (2, 1, 80, 96, 32, 0.7), (1, 1, 32, 192, 64, 1.0), (1, 1, 128, 128, 128, 1.0)],
)
def test_qkv(device, batch, n_heads, head_dim, d, group, density):
    check(qkv, qkv_reference, case(device, batch, n_heads, head_dim, d, group, density))


def lacking(device, lacks, selected, d=64, group=32):
    """lacks (batch, heads): how many positions each row's head lacks, up to 32. selected: 0 or 1, of the same shape."""
    lacks, selected = (torch.tensor(each, dtype=torch.int32, device=device) for each in (lacks, selected))
    batch, n_heads = lacks.shape
    tensors = case(device, batch, n_heads, 16, d, group, 1.0, capacity=33)
    selection, position, watermark = tensors[3:]
    position.copy_(31 - torch.arange(batch))
    tensors[0].copy_(with_outliers(torch.randn(tensors[0].shape)))
    for b in range(batch):
        tensors[0][b, int(position[b]) + 1 :] = NAN
    watermark.copy_((position[:, None] + 1 - lacks).clamp(min=0))
    selection.set_mask(selected.bool())
    return tensors


LACKING = [  # (pairs that heads lack, heads that rows select)
    ([[1, 2, 7]], [[1, 1, 1]]),
    ([[30, 2, 17, 1]], [[0, 1, 1, 0]]),  # programs of heads that are not selected share in the third one's groups
    ([[14]], [[1]]),  # twice as many items of later groups as programs
    ([[9, 3]], [[0, 0]]),
    ([[1, 5, 1], [3, 4, 2], [9, 1, 1]], [[1, 0, 1], [0, 0, 1], [1, 0, 0]]),
    ([[12, 8], [30, 1], [12, 1]], [[1, 1], [1, 0], [0, 1]]),
    ([[3, 6, 7, 10, 11]], [[1, 1, 1, 1, 1]]),  # where groups of four begin and end
    ([[2, 7, 7, 6]], [[1, 1, 0, 1]]),  # as many items as one idle head's programs take
    ([[32, 3, 10]], [[1, 0, 1]]),  # more
]


@pytest.mark.parametrize(("lacks", "selected"), LACKING)
def test_what_heads_lack(device, lacks, selected):
    check(qkv, qkv_reference, lacking(device, lacks, selected))


def test_lines_of_a_tile_in_assembly(device, queues_in_assembly):
    """A head that was idle for long has K and V filled in by several programs."""
    tensors = case(device, 1, 2, 16, 384, 128, 1.0, capacity=20)
    position, watermark = tensors[4:]
    watermark[:, 0], watermark[:, 1] = 0, position
    with QkvSettings(16, 2, 64, 4, 2, 8).in_use():
        check(qkv, qkv_reference, tensors)


@pytest.mark.parametrize(
    ("case_number", "d", "group", "warps", "steps", "wide"),
    [(0, 320, 32, 1, 4, 4), (1, 1280, 128, 2, 4, 4), (2, 576, 64, 1, 8, 8), (3, 64, 32, 1, 4, 8), (4, 40, 40, 1, 4, 8),
     (5, 128, 128, 2, 4, 8), (7, 128, 128, 1, 8, 4)],
)  # fmt: skip
def test_early_asks_in_assembly(device, queues_in_assembly, case_number, d, group, warps, steps, wide):
    """Words of a first step that are asked for before the inputs, in several steps or beyond a row's end. No program
    leaves while copies are on their way."""
    tensors = lacking(device, *LACKING[case_number], d=d, group=group)
    with QkvSettings(16, 2, 32 * warps, steps, warps, wide).in_use():
        check(qkv, qkv_reference, tensors)
    if queues_in_assembly is not None:
        assert queues_in_assembly.shared.size > 0
        assert queues_in_assembly.left + queues_in_assembly.on_their_way() == 0


def with_predictor(device, rank=16, n=70):
    """qkv_select as a function of qkv's arguments. Its list is compared with the reference's."""
    mlp = PredictorWeights(torch.empty(0), torch.randn(n, rank, device=device), torch.randn(n, device=device))
    hidden, zero = torch.randn(1, rank, device=device), torch.zeros(1, device=device)
    state, lists = torch.ones(1, dtype=torch.int32, device=device), []

    def call(*tensors, **options):
        lists.append(Selection.empty(n, device))
        (qkv_select if not options.pop("reference", False) else qkv_select_reference)(
            *tensors, Predictor(mlp, zero, lists[-1], hidden, Products.ROW_TILES), state, **options
        )
        if len(lists) == 2:
            assert torch.equal(lists[0].indices(), lists[1].indices())

    return call


def test_beside_a_predictor(device):
    call = with_predictor(device)
    check(call, lambda *tensors, **options: call(*tensors, reference=True, **options),
          case(device, 1, 2, 16, 128, 128, 0.5))  # fmt: skip


def test_errors_name_what_does_not_fit(device):
    tensors = case(device, 1, 2, 16, 64, 64, 1.0)
    with pytest.raises(ValueError, match="attn_in: expected float16, got float32"):
        check(qkv, qkv_reference, (tensors[0].float(), *tensors[1:]))
    with pytest.raises(ValueError, match="pairs 2 and wide 4 or 8"), QkvSettings(16, 2, 32, 4, 1, 16).in_use():
        check(qkv, qkv_reference, tensors)
    with pytest.raises(ValueError, match="up to 8 batch rows, not 9"):
        check(qkv, qkv_reference, case(device, 9, 2, 16, 64, 64, 1.0))


@pytest.mark.gpu
@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize(
    ("batch", "n_heads", "head_dim", "d"),
    [(1, 4, 64, 256), (3, 8, 80, 640), (1, 3, 128, 384),
     (1, 32, 128, 4096), (1, 72, 128, 9216), (1, 56, 128, 7168), (1, 96, 128, 12288), (1, 32, 80, 2560),
     (4, 32, 64, 2048), (8, 40, 128, 5120)],
)  # fmt: skip
def test_at_true_shapes(filled, batch, n_heads, head_dim, d):
    tensors = case("cuda", batch, n_heads, head_dim, d, 128, 0.5 if filled else 1.0, size=d**-0.5 / 5)
    if not filled:
        tensors = (*tensors[:-1], None)
    plain, dependent = (check(qkv, qkv_reference, tensors, pdl=pdl) for pdl in (False, True))
    torch.testing.assert_close(dependent, plain, equal_nan=True, atol=0, rtol=0)
    if batch == 1:
        call = with_predictor("cuda", d // 16, 4 * d)
        check(call, lambda *tensors, **options: call(*tensors, reference=True, **options), tensors)
