import lightning
import pytest
import torch
from small_runs import activations, flags

from dejavu_train.data.config import DataConfig
from dejavu_train.data.datamodule import ShardDataModule
from dejavu_train.data.shard_reader import ShardReader
from dejavu_train.data.shards import ActivationManifest, RecordedWeights, unpack_bits
from dejavu_train.families import Site, UnitKey
from dejavu_train.ground.errors import UserError
from dejavu_train.predictors.checkpoint import as_stored, stored_tensors
from dejavu_train.predictors.losses import LOSSES
from dejavu_train.predictors.low_rank import LowRankPredictor
from dejavu_train.predictors.metrics import top_units
from dejavu_train.run.command import parse_config
from dejavu_train.training.job import init_module, second_moments
from dejavu_train.training.lit_predictor import LitPredictor, SelectionMetric


@pytest.fixture
def folder(tiny_opt, text_file):
    return activations(tiny_opt, text_file)


@pytest.fixture
def weights(folder):
    return RecordedWeights.load(folder, 1, ActivationManifest.load(folder).weight_hash)


def data_for(folder, target, site):
    return ShardDataModule(folder, UnitKey(1, target), Site(1, site), DataConfig(batch_size=256), 0)


def trained(module, data, steps):
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, limit_train_batches=min(steps, 40) or None,
    )  # fmt: skip
    if steps:
        trainer.fit(module, datamodule=data)
    return trainer.validate(module, datamodule=data, verbose=False)[0]


def test_svd_of_full_rank_is_fc1_itself(folder, weights):
    module = LitPredictor("mlp", LowRankPredictor(48, 48, 96), 96, density=0.45)
    module.init_predictor("svd", weights)
    metrics = trained(module, data_for(folder, "mlp", "mlp_in"), 0)
    assert metrics["val/recall_at_active_density"] > 0.99
    assert metrics["val/retained_mass"] > 0.99 and metrics["val/density"] == pytest.approx(0.45)


def test_the_inputs_covariance_helps_the_start(folder, weights):
    masses = {}
    for start in ("svd", "whitened_svd", "random"):
        module = LitPredictor("mlp", LowRankPredictor(48, 12, 96), 96, density=0.4)
        module.init_predictor(start, weights, second_moments(ShardReader(folder, 1, "train"), "mlp_in")[0])
        masses[start] = trained(module, data_for(folder, "mlp", "mlp_in"), 0)["val/retained_mass"]
    assert masses["random"] < masses["svd"] < masses["whitened_svd"]


def test_a_start_for_look_ahead_guesses_what_fc1_reads(folder, weights, tiny_opt, text_file):
    masses = {}
    for start in ("svd", "whitened_svd"):
        config = parse_config(flags(tiny_opt, text_file, folder.parent, "--mlp.lookahead=1", f"--mlp.init={start}"))
        module = LitPredictor("mlp", LowRankPredictor(48, 16, 96), 96, density=0.4)
        known = ActivationManifest.load(folder).weight_hash
        init_module(module, config, UnitKey(1, "mlp"), Site(1, "attn_in"), folder, known)
        masses[start] = trained(module, data_for(folder, "mlp", "attn_in"), 0)["val/retained_mass"]
    assert masses["whitened_svd"] > masses["svd"] + 0.02


@pytest.mark.parametrize("loss", LOSSES)
def test_training_improves_on_the_start(folder, weights, loss):
    data = data_for(folder, "mlp", "mlp_in")
    module = LitPredictor("mlp", LowRankPredictor(48, 16, 96), 96, density=0.4, loss=loss, learning_rate=5e-3)
    module.init_predictor("random", weights)
    before = trained(module, data, 0)["val/retained_mass"]
    after = trained(module, data, 80)["val/retained_mass"]
    assert after > before + 0.1


def test_heads(folder, weights):
    data = data_for(folder, "heads", "attn_in")
    module = LitPredictor("heads", LowRankPredictor(48, 8, 4), 4, density=0.5, loss="listwise", learning_rate=1e-2)
    with pytest.raises(UserError, match="heads"):
        module.init_predictor("svd", weights)
    module.init_predictor("small", weights)
    before = trained(module, data, 0)
    after = trained(module, data, 80)
    assert after["val/recall"] > before["val/recall"] + 0.1
    assert after["val/active_density"] == 0.5  # the label is the top half of the heads


def test_contributions_are_recomputed_and_obey_the_label(folder, weights):
    module = LitPredictor("mlp", LowRankPredictor(48, 8, 96), 96)
    module.init_predictor("random", weights)
    raw = next(iter(data_for(folder, "mlp", "mlp_in").val_dataloader()))
    raw["active"][:, :2] = 0  # sixteen neurons
    batch = module.make_batch(raw, need_contribution=True)
    inputs = raw["inputs"].float()
    expected = (inputs @ weights.up_weight.T + weights.up_bias).relu() * weights.down_norm
    expected[:, :16] = 0
    torch.testing.assert_close(batch.contribution, expected, atol=2e-2, rtol=1e-3)
    assert not batch.contribution[~unpack_bits(raw["active"], 96)].any()
    heads = LitPredictor("heads", LowRankPredictor(48, 8, 4), 4, density=0.5)
    contribution = torch.rand(5, 4)
    labels = heads.make_batch({"inputs": torch.zeros(5, 48), "contribution": contribution}, True).active
    assert torch.equal(labels, top_units(contribution, 2))


def test_the_rate_rises_and_falls(folder, weights):
    module = LitPredictor("mlp", LowRankPredictor(48, 8, 96), 96, learning_rate=1.0)
    module.init_predictor("random", weights)
    rates = []
    module.on_train_batch_end = lambda *_: rates.append(module.optimizers().param_groups[0]["lr"])
    trained(module, data_for(folder, "mlp", "mlp_in"), 80)
    assert rates[0] < rates[3] == pytest.approx(1.0)
    assert all(a >= b for a, b in zip(rates[4:], rates[5:], strict=False)) and rates[-1] < 0.05


def test_metric_sums_over_updates():
    metric = SelectionMetric()
    logits, active = torch.randn(10, 6), torch.rand(10, 6) < 0.5
    for rows in (slice(0, 3), slice(3, 10)):
        metric.update(logits[rows], active[rows], active[rows].float())
    assert metric.compute().sum(1).tolist() == [60, active.sum(), active.sum()]
    metric.reset()
    assert metric.compute().sum() == 0


def test_int4_is_trained_as_it_is_deployed(folder, weights):
    module = LitPredictor("mlp", LowRankPredictor(48, 12, 96), 96, density=0.4, learning_rate=1e-2)
    module.predictor.rounded_to = "int4"
    module.init_predictor("random", weights)
    before = trained(module, data_for(folder, "mlp", "mlp_in"), 0)
    after = trained(module, data_for(folder, "mlp", "mlp_in"), 60)
    assert after["val/retained_mass"] > before["val/retained_mass"]
    x = torch.randn(5, 48)
    seen = module.predictor(x)
    deployed = LowRankPredictor(48, 12, 96)
    deployed.load_state_dict(module.predictor.state_dict())
    as_stored(deployed, stored_tensors(deployed, "int4"))
    torch.testing.assert_close(deployed(x), seen, rtol=1e-3, atol=1e-2)  # but for the bias, which is fp16
