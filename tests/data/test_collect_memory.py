"""Collecting streams: its memory does not grow with the tokens, by layers not with the layers either. Each run is a
process of its own. Its peak is read."""

import pytest
import torch
from conftest import save_tiny_opt
from resident_memory import grown, needs_proc, peak
from small_runs import COLLECT, in_a_process

from dejavu_train.calibration.by_layers import ByLayers, loss_increases_by_layers, measure_heads
from dejavu_train.calibration.sensitivity import SensitivityProbe
from dejavu_train.data.collect import collect
from dejavu_train.data.shards import ActivationManifest
from dejavu_train.data.text import TextSource
from dejavu_train.data.windows import CollectConfig
from dejavu_train.families import Target, UnitKey
from dejavu_train.models.config_values import read_dims
from dejavu_train.models.layer_walk import LayerWalk
from dejavu_train.predictors.low_rank import LowRankPredictor

pytestmark = needs_proc
TINY = {"train_tokens": 200, "val_tokens": 100, "calibration_tokens": 100}


def collect_tokens(model, text, folder, changes):
    collect(str(model), TextSource(source=str(text)), CollectConfig(**COLLECT | changes), folder)


def tell_growth(model, text, tokens, folder, growth):
    """Collect ``tokens`` tokens. Put how far resident memory grew, in MB, into ``growth``."""
    first = (model, text, folder / "first", TINY)
    growth.value = grown(collect_tokens, first, model, text, folder / "all", {"train_tokens": tokens}) / 1e6


def test_memory_is_flat_while_collecting(text_file, tmp_path):
    """Six times the tokens, 35 MB more of activations, and less than a sixth of that in memory."""
    model = save_tiny_opt(tmp_path / "opt", hidden_size=256, word_embed_proj_dim=256, ffn_dim=1024)
    growths = []
    for tokens in (3000, 18000):
        growths.append(in_a_process(tell_growth, model, text_file, tokens, tmp_path / str(tokens)))
        manifest = ActivationManifest.load(tmp_path / str(tokens) / "all")
        assert sum(entry.tokens for entry in manifest.shards if entry.set == "train") == tokens
    more = 15000 * manifest.row_bytes() / 1e6
    assert more > 30, more
    assert growths[1] - growths[0] < more / 6, (growths, more)


LAYERS = 6
WIDTHS = 2048, 4096  # neurons of a layer of the smaller and of the larger model
MORE_MB = 4 * 2 * 512 * (WIDTHS[1] - WIDTHS[0]) / 1e6  # by which a layer is larger


def collect_and_calibrate(model, text, folder):
    collect_tokens(model, text, folder / "shards", TINY | {"by_layers": True, "batch_size": 1})
    dims, windows = read_dims(str(model)), [[2, *range(4, 20)]]
    calibrated = ByLayers(LayerWalk(str(model), torch.device("cpu"), "float32"), folder / "states", "hash")
    keys = [UnitKey(i, Target.MLP) for i in range(dims.n_layers)]
    probes = {key: SensitivityProbe(LowRankPredictor(dims.d_model, 2, dims.d_ffn), key.site, [0.0]) for key in keys}
    loss_increases_by_layers(calibrated, probes, windows)
    means = {i: torch.zeros(dims.n_heads, dims.head_dim) for i in range(dims.n_layers)}
    measure_heads(calibrated, {}, means, windows)


def tell_growth_in_layers(models, tiny, text, folder, growth):
    """Collect, and calibrate. Put how much further memory grew with the larger model, in layers, into ``growth``."""
    less = grown(collect_and_calibrate, (tiny, text, folder / "first"), models[0], text, folder / "smaller")
    growth.value = (peak(collect_and_calibrate, models[1], text, folder / "larger") - less) / 1e6 / MORE_MB


@pytest.mark.long
def test_by_layers_two_layers_are_in_memory(tiny_opt, text_file, tmp_path):
    """One that runs, and one that is read ahead. The whole model takes seven."""
    sizes = {"hidden_size": 512, "word_embed_proj_dim": 512, "num_attention_heads": 8, "num_hidden_layers": LAYERS}
    models = [save_tiny_opt(tmp_path / f"opt-{width}", ffn_dim=width, **sizes) for width in WIDTHS]
    layers = in_a_process(tell_growth_in_layers, models, tiny_opt, text_file, tmp_path)
    assert 1.5 < layers < 4, layers
