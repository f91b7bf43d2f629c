"""Who a server is compared with, and what it is timed with on a GPU."""

import pytest

from benchmarks.cpu_decode import our_rival, run_in_turns
from benchmarks.random_folder import write
from dejavu_train.families import ModelDims
from dejavu_train.sparse.model import SparseOPTForCausalLM


def test_a_folder_of_random_weights_selects_what_was_asked(tmp_path):
    """What a server on a GPU is timed with. Here a small shape, on the CPU engine."""
    shape = ModelDims(64, 1024, 2, 4, 8192, 64)
    write("opt", shape, tmp_path / "m", (0.2, 0.5), 16)
    model = SparseOPTForCausalLM.from_pretrained(tmp_path / "m", backend="cpu", sparse_from="prompt")
    rival = our_rival("sparse", model.engine_pool().engine(1, 64), [[2, 3, 4]], 40)
    run_in_turns([rival], 1, 30)
    assert sum(rival.mlp) / len(rival.mlp) == pytest.approx(0.2, abs=0.08)
    assert model.bundle.mean_density("mlp") == 0.2 and model.bundle.mean_density("heads") == 0.5
