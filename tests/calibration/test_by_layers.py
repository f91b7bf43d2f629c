"""Calibration by layers: the numbers of a model in memory, bit for bit, and a killed one goes on in its window."""

import pytest
import torch
from family_models import CASES, HYBRIDS, save_family

from dejavu_train.calibration import by_layers
from dejavu_train.calibration.by_layers import (
    ByLayers,
    Sharing,
    calibrate_part,
    loss_increases_by_layers,
    measure_heads,
)
from dejavu_train.calibration.head_losses import measure_whole
from dejavu_train.calibration.sensitivity import SensitivityProbe, loss_increases
from dejavu_train.families import Site, UnitKey, blocks_of, dims_of
from dejavu_train.models.layer_walk import LayerWalk
from dejavu_train.models.load import load_model
from dejavu_train.predictors.bit_planes import choose_grid
from dejavu_train.predictors.low_rank import LowRankPredictor

WINDOWS = [[2, *range(10, 40)], [2, *range(50, 75)], [2, *range(5, 20)]]


def walked(model, folder, start=None):
    sharing = None if start is None else Sharing(str(model), None, "cpu", "float32", start)
    return ByLayers(LayerWalk(str(model), torch.device("cpu"), "float32"), folder, "hash", sharing)


def problem(shape):
    """Predictors of every layer and target, that of the last layer's neurons reads the layer below."""
    torch.manual_seed(3)
    probes, chosen, means = {}, {}, {}
    for layer in shape.layers_of("heads"):
        means[layer] = torch.randn(shape.n_kv_heads, shape.group_dim) / 10
        heads = LowRankPredictor(shape.d_model, 8, shape.n_kv_heads)
        site = UnitKey(layer, "heads").site
        probes[UnitKey(layer, "heads")] = SensitivityProbe(heads, site, [0.3, -0.2], means[layer])
        chosen[layer] = {"site_layer": site.layer, "site": site.input}, heads
    for layer in shape.layers_of("mlp"):
        neurons = LowRankPredictor(shape.d_model, 8, shape.d_ffn)
        site = UnitKey(layer, "mlp").site if layer < shape.n_layers - 1 else Site(layer - 1, "mlp_in")
        probes[UnitKey(layer, "mlp")] = SensitivityProbe(neurons, site, [0.2, 0.0, -1.0])
    return probes, chosen, means


@pytest.mark.parametrize("name", [name for name in (*CASES, *HYBRIDS) if name != "galactica"])
def test_numbers_are_those_of_a_model_in_memory(name, tmp_path):
    path = save_family(name, tmp_path / "model")
    model = load_model(str(path))
    probes, chosen, means = problem(dims_of(model.config))
    layered = walked(path, tmp_path / "states")
    assert loss_increases_by_layers(layered, probes, WINDOWS) == loss_increases(model, probes, WINDOWS)
    made, whole = measure_heads(layered, chosen, means, WINDOWS), measure_whole(model, chosen, means, WINDOWS)
    for found, wanted in zip(made, whole, strict=True):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[layer], wanted[layer]) for layer in wanted)


def with_second_stages(model, probes):
    for layer, block in enumerate(blocks_of(model)):
        up = block.up.weight.detach().float()
        cascade = [*choose_grid(up), torch.full((len(up),), 0.05)]
        key = UnitKey(layer, "mlp")
        probes[key] = SensitivityProbe(probes[key].predictor, probes[key].site, [0.0, -1e4], cascade=cascade)
    return probes


def test_a_second_stage_is_tested_on_its_own_layer(tiny_opt, tmp_path):
    model = load_model(str(tiny_opt))
    probes = with_second_stages(model, problem(dims_of(model.config))[0])
    assert loss_increases_by_layers(walked(tiny_opt, tmp_path), probes, WINDOWS) == loss_increases(
        model, probes, WINDOWS
    )


@pytest.mark.parametrize("parts, count", [([0, 1], 2), ([3, 1, 2, 0], 4), ([1], 2), ([], 3)])
def test_parts_of_several_processes_give_the_same(tiny_opt, tmp_path, monkeypatch, parts, count):
    """Bit for bit, in any order. What some leave out is done by the caller, which does nothing else of it."""
    model, shared = load_model(str(tiny_opt)), []
    probes, chosen, means = problem(dims_of(model.config))
    probes = with_second_stages(model, probes)
    wanted = loss_increases(model, probes, WINDOWS), measure_whole(model, chosen, means, WINDOWS)
    write, alone = by_layers.States.write, []

    def start(folder, what):
        shared.append(what)
        for number in parts:
            calibrate_part(folder, what, number, count)
        alone.clear()

    def counted(states, name, *rest):
        alone.append(name)
        write(states, name, *rest)

    monkeypatch.setattr(by_layers.States, "write", counted)
    layered = walked(tiny_opt, tmp_path / "states", start)
    losses = measure_heads(layered, chosen, means, WINDOWS)
    assert loss_increases_by_layers(layered, probes, WINDOWS) == wanted[0]
    for found, each in zip(losses, wanted[1], strict=True):
        assert all(torch.equal(found[layer], each[layer]) for layer in each)
    assert shared == ["inputs", "gradients", "sensitivities"]
    assert bool(alone) == (len(parts) < count)


class _Own(LowRankPredictor):
    pass


def test_predictors_of_an_own_class_stay_in_one_process(tiny_opt, tmp_path, caplog):
    model = load_model(str(tiny_opt))
    probes, _, _ = problem(dims_of(model.config))
    key, d = UnitKey(0, "mlp"), dims_of(model.config).d_model
    probes[key] = SensitivityProbe(_Own(d, 8, dims_of(model.config).d_ffn), key.site, [0.1])
    caplog.set_level("INFO")
    layered = walked(tiny_opt, tmp_path, lambda *_: pytest.fail("nobody could read them"))
    assert loss_increases_by_layers(layered, probes, WINDOWS) == loss_increases(model, probes, WINDOWS)
    assert "predictors of a class of yours" in caplog.text


@pytest.mark.parametrize("writes", [3, 12, 25, 40, 60])
def test_a_killed_calibration_goes_on(tiny_opt, tmp_path, monkeypatch, writes):
    """Killed at any write, it reads no layer again that all windows have behind them, and gives the same."""
    model = load_model(str(tiny_opt))
    probes, chosen, means = problem(dims_of(model.config))
    wanted = loss_increases(model, probes, WINDOWS), measure_whole(model, chosen, means, WINDOWS)
    write, count = by_layers.States.write, [0]

    def killed(*arguments):
        count[0] += 1
        if count[0] == writes:
            raise KeyboardInterrupt
        write(*arguments)

    def both():
        layered = walked(tiny_opt, tmp_path)
        losses = measure_heads(layered, chosen, means, WINDOWS)
        return loss_increases_by_layers(layered, probes, WINDOWS), losses

    monkeypatch.setattr(by_layers.States, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        both()
    made = both()
    assert made[0] == wanted[0]
    for found, each in zip(made[1], wanted[1], strict=True):
        assert all(torch.equal(found[layer], each[layer]) for layer in each)
    before = count[0]
    assert both()[0] == wanted[0]
    assert count[0] == before  # nothing is left to do
