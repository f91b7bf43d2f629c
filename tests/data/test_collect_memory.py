"""Collecting streams: its memory does not grow with the tokens, by layers not with the layers either. Each run is a
process of its own. Its peak is read."""

import re
import resource
from pathlib import Path

import pytest
import torch
from conftest import save_tiny_opt
from small_runs import COLLECT, in_a_process

from dejavu_train.calibration.by_layers import ByLayers, loss_increases_by_layers, measure_heads
from dejavu_train.calibration.sensitivity import SensitivityProbe
from dejavu_train.data.collect import collect
from dejavu_train.data.shards import ActivationManifest
from dejavu_train.data.text import TextSource
from dejavu_train.data.windows import CollectConfig
from dejavu_train.families import Target, UnitKey
from dejavu_train.models.layer_walk import LayerWalk
from dejavu_train.predictors.low_rank import LowRankPredictor


def collect_and_tell(model, text, tokens, folder, peak):
    """Collect ``tokens`` tokens. Put the process's largest resident memory, in MB, into ``peak``."""
    torch.set_num_threads(1)
    config = CollectConfig(**COLLECT | {"train_tokens": tokens})
    collect(str(model), TextSource(source=str(text)), config, folder)
    peak.value = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_memory_is_flat_while_collecting(text_file, tmp_path):
    """Six times the tokens, 70 MB more of activations, and less than a third of that in memory.

    The peak of one and the same run differs by up to 15 MB between processes. Of what is held, all 70 would be seen.
    """
    model = save_tiny_opt(tmp_path / "opt", hidden_size=256, word_embed_proj_dim=256, ffn_dim=1024)
    peaks = []
    for tokens in (6000, 36000):
        peaks.append(in_a_process(collect_and_tell, model, text_file, tokens, tmp_path / str(tokens)))
        manifest = ActivationManifest.load(tmp_path / str(tokens))
        assert sum(entry.tokens for entry in manifest.shards if entry.set == "train") == tokens
    more = 30000 * manifest.row_bytes() * 2 / 1e6
    assert more > 60, more
    assert peaks[1] - peaks[0] < more / 3, (peaks, more)


LAYERS, WIDE = 8, {"hidden_size": 512, "word_embed_proj_dim": 512, "ffn_dim": 8192, "num_attention_heads": 8}
LAYER_MB = 4 * (4 * 512**2 + 2 * 512 * 8192) / 1e6


def _probe(layer):
    return SensitivityProbe(LowRankPredictor(512, 2, 8192), UnitKey(layer, Target.MLP).site, [0.0])


def collect_and_tell_growth(model, tiny, text, folder, growth):
    """Collect, and calibrate. Put how far resident memory grew, in layers, into ``growth``. Libraries do not count."""
    torch.set_num_threads(1)
    few = {"train_tokens": 200, "val_tokens": 100, "calibration_tokens": 100, "mean_tokens": 64}
    config = CollectConfig(**COLLECT | few | {"by_layers": True, "batch_size": 1})
    collect(str(tiny), TextSource(source=str(text)), config, folder / "first")
    before = int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    collect(str(model), TextSource(source=str(text)), config, folder / "second")
    calibrated = ByLayers(LayerWalk(str(model), torch.device("cpu"), "float32"), folder / "states", "hash")
    probes = {UnitKey(i, Target.MLP): _probe(i) for i in range(LAYERS)}
    loss_increases_by_layers(calibrated, probes, [[2, *range(4, 20)]])
    measure_heads(calibrated, {}, {i: torch.zeros(8, 64) for i in range(LAYERS)}, [[2, *range(4, 20)]])
    growth.value = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e6 / LAYER_MB


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_by_layers_two_layers_are_in_memory(tiny_opt, text_file, tmp_path):
    """One that runs, and one that is read ahead. Copies of what losses need, and freed memory that is kept, are two or
    three more of layers as small as these. The whole model takes nine."""
    model = save_tiny_opt(tmp_path / "opt", num_hidden_layers=LAYERS, **WIDE)
    grown = in_a_process(collect_and_tell_growth, model, tiny_opt, text_file, tmp_path)
    assert 2 < grown < 6, grown
