"""The study of variants: its losses and experts do what they say, and its table compares at equal bytes."""

import csv
from pathlib import Path

import torch

from benchmarks.study import Experts, _hard_loss
from benchmarks.tables_texts import study_table
from dejavu_train.predictors.losses import Batch, contribution
from dejavu_train.predictors.low_rank import LowRankPredictor


def test_hard_rows_weigh_more_and_power_zero_is_the_plain_loss() -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, 16, requires_grad=True)
    active = torch.rand(8, 16) < 0.3
    batch = Batch(torch.zeros(8, 4), active, torch.rand(8, 16) * active)
    plain = contribution(logits, batch)
    assert torch.allclose(_hard_loss(logits, batch, 0.0), plain)

    def pull(power: float) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(_hard_loss(logits, batch, power), logits)
        return gradient.abs().sum(-1)

    cost = batch.contribution
    assert cost is not None
    weight = torch.where(active, cost * (active.sum() / cost.sum()), 0.1)
    own = (weight * torch.nn.functional.softplus(torch.where(active, -logits, logits))).sum(-1)
    ratio = pull(1.0) / pull(0.0)
    assert torch.allclose(ratio, own / own.mean(), rtol=1e-4)


def test_a_row_goes_through_its_nearest_expert() -> None:
    torch.manual_seed(0)
    predictors = [LowRankPredictor(4, 2, 6) for _ in range(2)]
    experts = Experts(predictors, torch.tensor([[10.0, 0, 0, 0], [-10.0, 0, 0, 0]]))
    x = torch.randn(2, 3, 4)
    logits = experts(x)
    for place in ((0, 0), (0, 1), (1, 2)):
        assert torch.allclose(logits[place], predictors[int(x[place][0] < 0)](x[place]), atol=1e-6)


def test_table_compares_at_equal_bytes(tmp_path: Path) -> None:
    path = tmp_path / "docs/texts/study.csv"
    path.parent.mkdir(parents=True)
    common = {"seed": 0, "train_tokens": 1, "text": "a", "device": "CPU", "torch": "2", "commit": "c", "date": "d"}
    points = {  # divergence falls with the fourth power of the bytes; `same` lies on the same line
        "base": [(0.08, 0.08**-4), (0.1, 0.1**-4)],
        "same": [(0.088, 0.088**-4), (0.11, 0.11**-4)],
        "half": [(0.08, 0.5 * 0.08**-4), (0.1, 0.5 * 0.1**-4)],
    }
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*common, "variant", "asked", "mlp_bytes", "divergence"])
        writer.writeheader()
        for variant, values in points.items():
            for asked, (bytes_read, divergence) in zip(
                ("8.3 % of the bytes", "10.6 % of the bytes"), values, strict=True
            ):
                row = {"variant": variant, "asked": asked, "mlp_bytes": bytes_read, "divergence": divergence}
                writer.writerow(common | row)
    lines = study_table(tmp_path).splitlines()
    assert lines[2].startswith("| half")  # the best one stands first
    assert "| half | 1 | 1 | 50 | 50 | 50 |" in lines
    assert "| same | 1 | 1 | 100 | 100 | 100 |" in lines
