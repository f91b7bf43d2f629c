"""Collecting streams: its memory does not grow with the tokens. Each run is a process of its own. Its peak is read."""

import resource

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
