"""What a run by layers and GPTQ say that they hold grows as what they hold does, from a model to a larger one.

Each stage is measured in a process of its own. What libraries take beside it depends on the processor and is the same
for both models.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from bundles import make_bundle
from conftest import save_tiny_opt
from resident_memory import grown, needs_proc, peak
from small_runs import in_a_process

from dejavu_train.calibration.by_layers import ByLayers, loss_increases_by_layers, measure_heads
from dejavu_train.calibration.curves import HEAD_PROBES, MLP_PROBES
from dejavu_train.calibration.sensitivity import SensitivityProbe
from dejavu_train.data.collect_layers import collect_by_layers
from dejavu_train.data.recording import Recording
from dejavu_train.data.shards import ActivationManifest, ShardEntry
from dejavu_train.data.windows import Window
from dejavu_train.families import Target, UnitKey
from dejavu_train.models.config_values import read_dims, read_values
from dejavu_train.models.int4 import row_layouts
from dejavu_train.models.layer_walk import LayerWalk
from dejavu_train.models.weight_format import FLOAT16
from dejavu_train.predictors.low_rank import LowRankPredictor
from dejavu_train.quantize.check import gptq_bytes
from dejavu_train.quantize.config import QuantizeConfig
from dejavu_train.quantize.foreign import MatrixReader
from dejavu_train.quantize.source import StoredTensors
from dejavu_train.quantize.stream import Skeleton, embed, quantised_layers
from dejavu_train.run.command import parse_config
from dejavu_train.run.footprint import footprint
from dejavu_train.training.config import TuneConfig
from dejavu_train.training.finetune import finetune

pytestmark = needs_proc
CPU, WINDOW = torch.device("cpu"), 256
SLACK = 4e6  # bytes that allocators keep of one model more than of the other
SHAPES = {  # of the larger model, and what the smaller one has instead
    "logits": ({"hidden_size": 64, "ffn_dim": 128, "vocab_size": 50272}, {"vocab_size": 25136}),
    "neurons": ({"hidden_size": 64, "ffn_dim": 8192}, {"ffn_dim": 4096}),
    "moments": ({"hidden_size": 128, "ffn_dim": 2048}, {"ffn_dim": 512}),
    "width": ({"hidden_size": 768, "ffn_dim": 64, "num_attention_heads": 12}, {"hidden_size": 384}),
}


def windows_of(model, count):
    return [np.random.default_rng(i).integers(4, read_dims(model).vocab_size, WINDOW, np.int32) for i in range(count)]


def collect(model, folder):
    shape, config = read_dims(model), configured(model).collect
    windows = [Window(i, ids) for i, ids in enumerate(windows_of(model, 8))]
    entry = ShardEntry(0, "train", 8 * WINDOW)
    manifest = ActivationManifest("random", "hash", shape, "bfloat16", {}, {}, (entry,))
    manifest.save(folder)
    walk = LayerWalk(model, CPU, "float32")
    collect_by_layers(walk, Recording(manifest, [(entry, windows)], {entry}, config, Path(folder)))


def calibrate(model, folder):
    shape = read_dims(model)
    layered = ByLayers(LayerWalk(model, CPU, "float32"), Path(folder), "hash")
    probes, chosen = {}, {}
    for target, densities in ((Target.MLP, MLP_PROBES), (Target.HEADS, HEAD_PROBES)):
        key, predictor = UnitKey(0, target), LowRankPredictor(shape.d_model, 2, shape.units(target))
        probes[key] = SensitivityProbe(predictor.requires_grad_(False), key.site, densities)
        chosen = {0: ({"site_layer": 0, "site": str(key.site.input)}, predictor)}  # the heads'
    means = {i: torch.zeros(shape.n_heads, shape.head_dim) for i in range(shape.n_layers)}
    windows = [window.tolist() for window in windows_of(model, 1)]
    measure_heads(layered, chosen, means, windows)
    loss_increases_by_layers(layered, probes, windows)


def tune(model, folder):
    config = configured(model)
    bundle = make_bundle(Path(model), rank=2).at(mlp_density=0.5)
    windows = [window.tolist() for window in windows_of(model, 8)]
    walk, weights = LayerWalk(model, CPU, "float32"), FLOAT16
    finetune(walk, bundle, windows, config.tune, weights, state_path=Path(folder) / "tuning.ckpt")


def quantise(model, folder):
    values, source, config = read_values(model), StoredTensors(model), quantising(model)
    skeleton = Skeleton(values, source, CPU)
    batches = embed(skeleton, windows_of(model, 8), config.batch_size, Path(folder), "a test")
    layouts = row_layouts("opt", read_dims(model))
    next(quantised_layers(skeleton, MatrixReader(source, values), layouts, config, batches))


def configured(model):
    flags = ["--collect.by_layers=true", "--text.source=text.txt"]
    flags += ["--collect.device=cpu", "--mlp.rank=2", "--tune.steps=2", "--tune.tokens=1024", "--tune.batch_tokens=512"]
    return parse_config([f"--model={model}", f"--collect.window={WINDOW}", "--collect.batch_size=8", *flags])


def quantising(model):
    return QuantizeConfig(model, window=WINDOW, batch_size=8, device="cpu")


def tell(stage, models, folder, told):
    """Puts by how many bytes the peak of the larger model is above that of the smaller one into `told`."""
    work = globals()[stage]
    places = [folder / str(i) for i, _ in enumerate(models)]
    for place in places:
        place.mkdir(parents=True)
    tiny, smaller, larger = ((str(model), place) for model, place in zip(models, places, strict=True))
    less = grown(work, tiny, *smaller)
    told.value = peak(work, *larger) - less


def check_growth(models, folder, stage, name, stated):
    """The measured peak grows with the model by most of what the stated one does, and by no more."""
    pair = models[f"smaller {name}"], models[name]
    measured = in_a_process(tell, stage, (models["tiny"], *pair), folder)
    expected = stated(str(pair[1])) - stated(str(pair[0]))
    assert expected > 2 * SLACK, "growth that the allocator cannot hide"
    assert 0.6 * expected - SLACK < measured < 1.05 * expected + SLACK, (measured / 1e6, expected / 1e6)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder, tiny = tmp_path_factory.mktemp("shapes"), {"hidden_size": 64, "word_embed_proj_dim": 64}
    made = {"tiny": save_tiny_opt(folder / "tiny", **tiny)}
    for name, (values, less) in SHAPES.items():
        for kind, sizes in ((name, values), (f"smaller {name}", values | less)):
            made[kind] = save_tiny_opt(folder / kind, word_embed_proj_dim=sizes["hidden_size"], **sizes)
    return made


@pytest.mark.parametrize(
    "stage, name",
    [
        pytest.param("collect", "neurons", marks=pytest.mark.long),
        ("calibrate", "logits"),
        ("calibrate", "neurons"),
        ("tune", "logits"),
        pytest.param("tune", "neurons", marks=pytest.mark.long),
    ],
)
def test_by_layers(models, tmp_path, stage, name):
    """The stated peak is that of the stage that needs more. So a stage may hold less, and none more."""

    def stated(model):
        config, shape = configured(model), read_dims(model)
        config = dataclasses.replace(config, collect=dataclasses.replace(config.collect, dtype="float32"))
        if stage != "collect":  # calibrating takes a window at a time, and tuning so many tokens
            config = dataclasses.replace(config, collect=dataclasses.replace(config.collect, batch_size=1))
        if stage != "tune":
            config = dataclasses.replace(config, tune=TuneConfig())
        held = footprint(config.settled(shape), shape, 0)
        return held.weights + held.work + held.host

    check_growth(models, tmp_path, stage, name, stated)


@pytest.mark.parametrize("name", ["moments", "width"])
def test_gptq(models, tmp_path, name):
    def stated(model):
        stream = 8 * 8 * WINDOW * read_dims(model).d_model  # its files, whose pages are the system's
        return gptq_bytes(quantising(model), read_dims(model)) + stream

    check_growth(models, tmp_path, "quantise", name, stated)
