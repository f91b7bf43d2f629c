"""Calibration needs one layer at a time: it works where memory is capped below the size of the model in fp32."""

import json
import re
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import save_tiny_opt
from safetensors.torch import save_file
from small_runs import in_a_process

from dejavu_train.calibration.calibrate import choose, measure_curves
from dejavu_train.calibration.config import CalibrateConfig
from dejavu_train.data.shards import ActivationManifest, RecordedWeights, ShardEntry, ShardWriter, pack_bits
from dejavu_train.ground.errors import UserError
from dejavu_train.models.config_values import read_dims
from dejavu_train.models.load import load_model
from dejavu_train.models.weight_format import FLOAT16
from dejavu_train.predictors.low_rank import LowRankPredictor

ROWS, LAYERS, WIDTH, FFN = 256, 32, 384, 1536
FP32_MB = LAYERS * (4 * WIDTH**2 + 2 * WIDTH * FFN) * 4 / 1e6  # 226 without embeddings
CAP_MB = 110


def write_run(model: Path, folder: Path) -> None:
    """Activations of random numbers, and random predictors, of every layer."""
    shard = ShardEntry(0, "calibration", ROWS)
    manifest = ActivationManifest("large", "hash", read_dims(str(model)), "float16", {}, {}, (shard,))
    manifest.save(folder / "activations")
    generator = torch.Generator().manual_seed(0)
    with ShardWriter(folder / "activations", manifest, shard) as writer:
        for layer in range(LAYERS):
            active = torch.rand(ROWS, FFN, generator=generator) < 0.1
            rows = {
                "attn_in": torch.randn(ROWS, WIDTH, generator=generator).half().numpy(),
                "mlp_in": torch.randn(ROWS, WIDTH, generator=generator).half().numpy(),
                "mlp_active": pack_bits(active).numpy(),
                "head_norm": torch.rand(ROWS, 6, generator=generator).half().numpy(),
                "document": np.zeros(ROWS, np.int32),
                "position": np.arange(ROWS, dtype=np.int32),
            }
            writer.write(layer, 0, rows, int(active.sum()))
            fc1, bias = torch.randn(FFN, WIDTH, generator=generator) / 20, torch.zeros(FFN)
            weights = RecordedWeights(fc1, bias, torch.ones(FFN), torch.zeros(6, WIDTH // 6))
            weights.save(folder / "activations", layer, manifest.weight_hash)
            path = folder / "predictors" / f"layer_{layer:02d}" / "mlp"
            path.mkdir(parents=True)
            predictor = LowRankPredictor(WIDTH, 8, FFN)
            save_file({name: p.data for name, p in predictor.named_parameters()}, path / "predictor.safetensors")
            metadata = {
                "layer": layer, "target": "mlp", "kind": "low_rank", "site": "mlp_in", "site_layer": layer, "rank": 8,
                "d_in": WIDTH, "n_out": FFN, "nonlinearity": "none", "bias": True, "loss": "none", "metrics": {},
            }  # fmt: skip
            (path / "predictor.json").write_text(json.dumps(metadata))


def under_a_cap(model, folder, calibrating, outcome):
    """1 where the work ended with no more than CAP_MB more than the process has, 0 where memory ran out."""
    torch.set_num_threads(1)
    torch.randn(64, 64) @ torch.randn(64, 64)  # what libraries allocate once is not the work's
    has = int(re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (has + CAP_MB * 2**20,) * 2)
    try:
        if calibrating:
            config = CalibrateConfig(mlp_density=0.2, sensitivity_tokens=0)
            parts = (folder / "predictors", folder / "activations")
            bundle = choose(measure_curves(*parts, config, device="cpu", targets=["mlp"]), config, FLOAT16)
            assert len(bundle.specs) >= LAYERS
        else:
            load_model(str(model), "float32")
        outcome.value = 1
    except (UserError, RuntimeError, MemoryError):
        outcome.value = 0


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_calibrating_needs_less_than_the_model(tmp_path):
    sizes = {"hidden_size": WIDTH, "word_embed_proj_dim": WIDTH, "ffn_dim": FFN, "num_attention_heads": 6}
    model = save_tiny_opt(tmp_path / "opt", num_hidden_layers=LAYERS, **sizes)
    write_run(model, tmp_path)
    assert 2 * CAP_MB < FP32_MB
    assert in_a_process(under_a_cap, model, tmp_path, False) == 0  # the cap is a cap
    assert in_a_process(under_a_cap, model, tmp_path, True) == 1
