"""Collecting streams: its memory does not grow with the tokens, by layers not with the layers either. Each run is a
process of its own. Its peak is read."""

import re
import resource
from pathlib import Path

import pytest
import torch
from conftest import save_tiny_opt
from small_runs import COLLECT, in_a_process

from dejavu_train.data.collect import collect
from dejavu_train.data.shards import ActivationManifest
from dejavu_train.data.text import TextSource
from dejavu_train.data.windows import CollectConfig


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


def collect_and_tell_growth(model, tiny, text, folder, growth):
    """Put how far the process's resident memory grew, in layers, into ``growth``. What libraries take is not of it."""
    torch.set_num_threads(1)
    few = {"train_tokens": 200, "val_tokens": 100, "calibration_tokens": 100, "mean_tokens": 64}
    config = CollectConfig(**COLLECT | few | {"by_layers": True, "batch_size": 1})
    collect(str(tiny), TextSource(source=str(text)), config, folder / "first")
    before = int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    collect(str(model), TextSource(source=str(text)), config, folder / "second")
    growth.value = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e6 / LAYER_MB


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_by_layers_two_layers_are_in_memory(tiny_opt, text_file, tmp_path):
    """One that runs, one that is read ahead, and a layer for copies of what losses need. Without, eight and one are."""
    model = save_tiny_opt(tmp_path / "opt", num_hidden_layers=LAYERS, **WIDE)
    grown = in_a_process(collect_and_tell_growth, model, tiny_opt, text_file, tmp_path)
    assert 2 < grown < 4.5, grown
