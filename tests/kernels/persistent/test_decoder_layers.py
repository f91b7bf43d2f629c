"""All layers in one kernel against plain torch, on a GPU and on a CPU that takes its place (host.cuh).

Beside that what the compiler makes, and what is refused.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from host import HostLauncher
from layer_models import FORMS, put_thresholds, random_layers, sizes_of

from dejavu_train.kernels.common.layer_norm import LayerNormWeights, layer_norm_reference
from dejavu_train.kernels.persistent import decoder_layers
from dejavu_train.kernels.persistent import sizes as persistent_sizes
from dejavu_train.kernels.persistent.decoder_layers import (
    DecoderLayers,
    check_layer,
    decoder_layers_reference,
    program_of,
    qkv_reference,
)
from dejavu_train.kernels.persistent.program import NoCompiler, Program
from dejavu_train.kernels.persistent.sizes import LEAST_PAGES, Neurons

WIDTHS = (2048, 4096)
LAYERS = ((2048, 3), (4096, 1))  # that a CPU runs in seconds
MODES = list(Neurons)
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def compiler():
    try:
        Program("", "", {}, "sm_90a").compiled()
    except NoCompiler as error:
        pytest.skip(str(error).splitlines()[0])


@pytest.mark.parametrize("neurons", MODES)
@pytest.mark.parametrize(
    ("d", "form"),
    [(2048, "opt"), (4096, "opt"), *(pytest.param(4096, form, marks=pytest.mark.long) for form in [*FORMS][1:])],
)
def test_the_compiler_needs_no_more_than_a_multiprocessor_has(d, form, neurons):
    compiler()
    sizes = sizes_of(d, 48, neurons, form=form)
    _, log = program_of(sizes).compiled(verbose=True)
    (used,) = [int(line.split("Used ")[1].split()[0]) for line in log.splitlines() if "Used " in line]
    # Twelve warps a quarter's registers: ten are there, and a quarter of the multiprocessor has three of them.
    assert used <= 168 and sizes.pages >= LEAST_PAGES


def test_a_source_that_does_not_compile_says_where():
    compiler()
    with pytest.raises(NoCompiler, match="layers.cu.*error"):
        Program("int x = y;", "none", {}, "sm_90a").compiled()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"d": 2560}, "a width of 2048 or 4096, not 2560"), ({"kv_heads": 40}, "heads of 8 or 16 or 32, not 40"),
        ({"head_dim": 80}, "a head dim of 64 or 128, not 80"), ({"heads": 40}, "40 heads with 32 of K and V"),
        ({"rank": 192}, "rank of 128 or 256, not 192"), ({"d_ffn": 20480}, "16384 at most, not 20480"),
        ({"d_ffn": 16000 + 64}, "a multiple of 128"), ({"layers": 700}, "no room for its pages"),
    ],
)  # fmt: skip
def test_sizes_that_it_does_not_take_are_named(changed, said):
    assert sizes_of(4096, 32, Neurons.SELECTED).refusal == ""
    assert said in replace(sizes_of(4096, 32, Neurons.SELECTED), **changed).refusal


def test_tensors_that_it_would_misread_are_refused():
    sizes, rotary = (sizes_of(2048, 1, Neurons.ALL, form=form) for form in ("opt", "prosparse"))
    (layer,), (turned,) = (random_layers(each, 64, "cpu") for each in (sizes, rotary))
    check_layer(sizes, layer)
    check_layer(rotary, turned)
    up, norm = layer.up, layer.norm1
    for taken, wrong, said in (
        (sizes, replace(layer, up=replace(up, bias=up.bias.float())), "up's bias is torch.float32"),
        (sizes, replace(layer, up=replace(up, weight=up.weight.view(4096, 4096))), "up is"),
        (sizes, replace(layer, norm2=LayerNormWeights(norm.weight, norm.bias, eps=1e-6)), "one eps"),
        (sizes, replace(layer, norm1=LayerNormWeights(norm.weight.float(), norm.bias)), "a norm is torch.float32"),
        (sizes, replace(layer, cache=turned.cache), "q and k are turned, or not"),
        (rotary, replace(turned, gate=None), "gates are there, or none is"),
        (rotary, replace(turned, norm2=layer.norm2), "norms are a rms_norm"),
        (rotary, replace(turned, out=replace(turned.out, bias=layer.out.bias)), "out has a bias, expected none"),
        (rotary, replace(turned, norm2=replace(turned.norm2, bias=norm.bias)), "of an RMSNorm zeros"),
    ):
        with pytest.raises(ValueError, match=said):
            check_layer(taken, wrong)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=gpu)])
def device(request, monkeypatch):
    if request.param == "cpu":
        monkeypatch.setattr(decoder_layers, "layers_launcher", HostLauncher)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    return request.param


@pytest.fixture(autouse=True)
def dense_once(monkeypatch):
    """Unpacks a matrix once a test, not for each product."""
    plain, made = decoder_layers._dense, {}

    def dense(linear):
        words, scales = linear.weight.words, linear.weight.scales
        key = words.data_ptr(), scales.data_ptr(), scales._version
        if key not in made:
            made[key] = plain(linear), linear  # an address is not given twice
        return made[key][0]

    monkeypatch.setattr(decoder_layers, "_dense", dense)


def problem(device, d, n_layers, neurons, position, relu=False, form="opt"):
    """(sizes, layers, input, the kernel)."""
    sizes = sizes_of(d, n_layers, neurons, relu, form)
    layers = list(random_layers(sizes, 200, device))
    x = torch.randn(1, d, device=device, generator=torch.Generator(device).manual_seed(1))
    if sizes.rank or sizes.threshold:
        put_thresholds(sizes, layers, x, position)
    at, state = (torch.full((1,), value, dtype=torch.int32, device=device) for value in (position, 1))
    return sizes, layers, x, DecoderLayers(sizes, layers, at, state)


def off(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


def equals_plain_torch(device, d, n_layers, neurons, position, relu=False, form="opt"):
    sizes, layers, x, kernel = problem(device, d, n_layers, neurons, position, relu, form)
    for layer in layers:  # what lies behind the position was never written
        layer.cache.k[:, :, position:], layer.cache.v[:, :, position:] = float("nan"), float("nan")
    out = torch.full_like(x, float("nan"))
    expected = decoder_layers_reference(sizes, layers, x, position)
    kernel(x, out)
    assert not kernel.fault() and off(out, expected) < 5e-4
    normed = layer_norm_reference(x.double(), layers[0].norm1, torch.float64)
    _, *new = qkv_reference(sizes, layers[0], normed, position)
    for each, cached in zip(new, (layers[0].cache.k, layers[0].cache.v), strict=True):
        assert off(cached[0, :, position], each) < 1e-3
    if sizes.rank:
        put_thresholds(sizes, layers, x, position, row_state=2)
        kernel.row_state.fill_(2)
        kernel(x, out)
        assert off(out, decoder_layers_reference(sizes, layers, x, position, row_state=2)) < 5e-4


@pytest.mark.parametrize("position", [0, 1, 31, 32, 150, 199])
@pytest.mark.parametrize("neurons", MODES)
@pytest.mark.parametrize("d", WIDTHS)
class TestOnAGpu:
    pytestmark = gpu

    def test_it_equals_plain_torch(self, d, neurons, position):
        for relu in (False, True) if neurons is Neurons.SELECTED else (False,):
            equals_plain_torch("cuda", d, 3, neurons, position, relu)


@pytest.mark.parametrize(
    ("d", "n_layers", "neurons", "position", "relu"),
    [
        (2048, 2, Neurons.ALL, 40, False), (2048, 2, Neurons.LIVE, 150, False), (2048, 2, Neurons.SELECTED, 0, True),
        *(
            pytest.param(d, n_layers, neurons, position, relu, marks=pytest.mark.long)
            for d, n_layers in LAYERS
            for neurons in MODES
            for position, relu in ((0, False), (32, True), (199, False))
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_it_equals_plain_torch_on_a_cpu(device, d, n_layers, neurons, position, relu):
    equals_plain_torch(device, d, n_layers, neurons, position, relu)


@pytest.mark.parametrize(
    ("d", "form", "n_layers", "neurons", "position"),
    [
        (2048, "prosparse", 1, Neurons.ALL, 150), (2048, "prosparse", 2, Neurons.LIVE, 40),
        (2048, "prosparse", 1, Neurons.SELECTED, 0), (2048, "drelu", 1, Neurons.LIVE, 40),
        (2048, "minitron", 1, Neurons.SELECTED, 150),
        *(
            pytest.param(d, form, n_layers, neurons, position, marks=pytest.mark.long)
            for d, n_layers in LAYERS
            for form in [*FORMS][1:]
            for neurons in MODES
            for position in (0, 199)
        ),
    ],
)  # fmt: skip
def test_it_equals_plain_torch_in_other_families(device, d, form, n_layers, neurons, position):
    equals_plain_torch(device, d, n_layers, neurons, position, form=form)


@pytest.mark.parametrize("neurons", MODES)
class TestFaults:
    def test_a_sum_beyond_its_range_is_named_and_forgotten(self, device, neurons):
        _, layers, x, kernel = problem(device, 2048, 1, neurons, 40)
        out, right = torch.zeros_like(x), torch.zeros_like(x)
        kernel(x, right)
        scales = layers[0].out.weight.scales
        kept = scales.clone()
        scales.fill_(float("inf"))
        kernel(x, out)
        assert out.isnan().all() and kernel.fault() == "a sum left its range"
        scales.copy_(kept)
        kernel.reset()
        kernel(x, out)
        assert torch.equal(out, right) and not kernel.fault()

    @pytest.mark.parametrize("what", ["v", "k", "bias"])
    def test_a_number_that_is_not_finite_is_named(self, device, neurons, what):
        _, layers, x, kernel = problem(device, 2048, 1, neurons, 40)
        layer, out = layers[0], torch.zeros_like(x)
        if what == "bias":
            layer.up.bias.fill_(float("nan"))
        else:
            getattr(layer.cache, what)[:, 3, 7] = float("nan" if what == "v" else "inf")
        kernel(x, out)
        assert out.isnan().all() and kernel.fault() == "a sum left its range"


@pytest.mark.parametrize("without", [*(pytest.param(each, marks=pytest.mark.long) for each in ((0,), (1,))), (0, 2)])
def test_layers_without_a_predictor_leave_silent_neurons_out(device, without):
    sizes, layers, x, kernel = problem(device, 2048, 3, Neurons.SELECTED, 40)
    layers = [replace(each, predictor=None, threshold=None) if i in without else each for i, each in enumerate(layers)]
    sizes = replace(sizes, partly=True)
    put_thresholds(sizes, layers, x, 40)
    kernel = DecoderLayers(sizes, layers, kernel.position, kernel.row_state)
    out, first = torch.zeros_like(x), torch.zeros_like(x)
    kernel(x, first)
    assert not kernel.fault() and off(first, decoder_layers_reference(sizes, layers, x, 40)) < 5e-4
    for _ in range(2):  # lists are counted over launches
        kernel(x, out.zero_())
        assert torch.equal(out, first) and not kernel.fault()


@pytest.mark.parametrize("neurons", [*(pytest.param(each, marks=pytest.mark.long) for each in MODES[:2]), MODES[2]])
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_a_copy_that_never_lands_ends_every_wait_and_is_forgotten(device, neurons):
    _, _, x, kernel = problem(device, 2048, 1, neurons, 40)
    out, right = torch.zeros_like(x), torch.zeros_like(x)
    kernel(x, right)
    kernel.launch.without = 2000
    kernel(x, out)
    assert out.isnan().all() and " never " in kernel.fault()  # of all waits, who notices first
    kernel.launch.without = -1
    kernel.reset()
    kernel(x, out)
    assert torch.equal(out, right) and not kernel.fault()


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_a_ring_of_few_pages_is_enough(device, monkeypatch):
    monkeypatch.setattr(persistent_sizes, "MOST_PAGES", LEAST_PAGES)
    assert sizes_of(4096, 1, Neurons.ALL).pages == LEAST_PAGES
    equals_plain_torch(device, 4096, 1, Neurons.LIVE, 199)


def test_a_large_scale_of_down_is_felt_in_its_columns_alone(device):
    sizes, layers, x, kernel = problem(device, 2048, 1, Neurons.ALL, 40)
    layers[0].down.weight.scales[5, 3] *= 300
    kernel = DecoderLayers(sizes, layers, kernel.position, kernel.row_state)
    out, expected = torch.zeros_like(x), decoder_layers_reference(sizes, layers, x, 40)
    kernel(x, out)
    others = torch.ones(2048, dtype=torch.bool, device=device)
    others[3 * 128 : 4 * 128] = False
    assert not kernel.fault() and off(out[:, others], expected[:, others]) < 5e-4


def test_a_model_without_biases_may_add_thousands_to_a_column_of_a_small_stream(device):
    sizes, layers, x, kernel = problem(device, 2048, 1, Neurons.ALL, 40, form="prosparse")
    x *= 0.03
    put_thresholds(sizes, layers, x, 40)
    added = decoder_layers_reference(sizes, layers, x, 40)[0] - x[0]
    layers[0].down.weight.scales[:, 5] *= 3000 / float(added[5 * 128 : 6 * 128].abs().max())
    kernel = DecoderLayers(sizes, layers, kernel.position, kernel.row_state)
    out, expected = torch.zeros_like(x), decoder_layers_reference(sizes, layers, x, 40)
    kernel(x, out)
    others = torch.ones(2048, dtype=torch.bool, device=device)
    others[5 * 128 : 6 * 128] = False
    assert expected.abs().max() > 2000 and not kernel.fault()
    assert off(out, expected) < 5e-4 and off(out[:, others], expected[:, others]) < 5e-4


def test_launches_are_counted_anew_after_some_days(device):
    _, _, x, kernel = problem(device, 2048, 1, Neurons.SELECTED, 40)
    out, right = torch.zeros_like(x), torch.zeros_like(x)
    kernel(x, right)
    kernel.reset()
    last = (3 << 30) - 1
    counts = {0: last, 3 * 32: last * 128, **{32 * (8 + i): last * 2 * 16 for i in range(8)}}
    for at, count in counts.items():  # as uint32
        kernel.sync[at] = (count + (1 << 31)) % (1 << 32) - (1 << 31)
    for _ in range(2):
        kernel(x, out.zero_())
        assert torch.equal(out, right) and not kernel.fault()
    assert int(kernel.sync[0]) == 1


@pytest.mark.parametrize("neurons", MODES)
@pytest.mark.parametrize("form", FORMS)
class TestStepsOnAGpu:
    pytestmark = gpu

    def test_a_thousand_steps_are_equal_beside_another_stream(self, form, neurons):
        _, _, x, kernel = problem("cuda", 4096, 4, neurons, 130, form=form)
        out, first = torch.zeros_like(x), torch.zeros_like(x)
        kernel(x, first)
        load, beside = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for step in range(1000):
            if step % 50 == 0:
                with torch.cuda.stream(beside):
                    torch.mm(load, load)
            kernel(x, out.zero_())
            wrong += (out != first).any()
        assert int(wrong) == 0 and not kernel.fault()
