"""The LightningModule of one (layer, target): a predictor, one loss, one optimiser, and its metrics."""

import math
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from dejavu_train.data.shards import RecordedWeights, unpack_bits
from dejavu_train.families import Target
from dejavu_train.ground.errors import UserError
from dejavu_train.predictors.losses import Batch, get_loss, needs_contribution
from dejavu_train.predictors.low_rank import LowRankPredictor, svd_init
from dejavu_train.predictors.metrics import N_BINS, at_density, logit_histograms, top_units

WARMUP = 0.05  # of the steps: Adam's moments settle meanwhile


class SelectionMetric(Metric):
    """Sums of all rows and ranks, from which the ratios at any density follow."""

    full_state_update = False
    histograms: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("histograms", torch.zeros(3, N_BINS, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, active: Tensor, contribution: Tensor) -> None:
        # Not in place: after validate() the state may be an inference tensor.
        self.histograms = self.histograms + logit_histograms(logits, active, contribution)

    def compute(self) -> Tensor:
        return self.histograms


class LitPredictor(lightning.LightningModule):
    """Trains ``logits = predictor(inputs)`` for one layer and target.

    Args:
        target: ``mlp`` (labels: active neurons) or ``heads`` (labels: the heads of largest contribution).
        predictor: maps (B, d_in) to logits (B, n_out).
        n_out: number of units.
        density: share of units that will be selected when deployed. Metrics and stopping are taken there.
        loss: as :func:`get_loss` takes it. The parameters of a loss that is a module are trained too.
        learning_rate, weight_decay: of AdamW. The rate rises in a share WARMUP of the steps, and falls along a cosine
            to a hundredth.

    A batch is what ShardDataModule makes.
    """

    def __init__(
        self,
        target: Target,
        predictor: nn.Module,
        n_out: int,
        density: float = 0.1,
        loss: str | dict[str, Any] = "contribution",
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__()
        self.target, self.density, self.n_out = target, density, n_out
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.predictor = predictor
        self.epochs = -1
        """How many the steps take, for callbacks; -1: nobody knows."""
        self.loss = get_loss(loss)
        self._train_contribution = needs_contribution(loss)
        self.metrics = SelectionMetric()
        # Neither a buffer (DDP would send it around at every step) nor state: it belongs to the model, not to us.
        self._weights: RecordedWeights | None = None

    def init_predictor(
        self,
        init: str,
        weights: RecordedWeights,
        covariance: Tensor | None = None,
        site_to_mlp_in: Tensor | None = None,
    ) -> None:
        """Take the layer's weights (for contributions) and set the first values of the predictor.

        Args:
            init: of a low-rank predictor, any other keeps the values that it was made with. ``random``. ``small``:
                logits near the bias at first. ``svd``: of the map that decides which neurons are active.
                ``whitened_svd``: that one weighed with the inputs' second moment ``covariance`` (d_in, d_in).
            site_to_mlp_in: (d, d_in), for look-ahead the linear guess of what it reads, from the predictor's input.

        Raises:
            UserError: an SVD initialisation for heads, which have no weight to decompose.
        """
        self._weights = weights
        if not isinstance(self.predictor, LowRankPredictor):
            return
        if init in ("svd", "whitened_svd"):
            if self.target != Target.MLP:
                raise UserError(f"init {init} is for the target mlp; use random or small for {self.target}")
            weighed = covariance if init == "whitened_svd" else None
            weight, bias = weights.deciding
            weight = weight if site_to_mlp_in is None else weight.double() @ site_to_mlp_in
            svd_init(self.predictor, weight, bias, weighed)
        elif init == "small":
            with torch.no_grad():
                self.predictor.up.mul_(0.01)

    def make_batch(self, raw: dict[str, Tensor], need_contribution: bool) -> Batch:
        """Labels and contributions of a raw batch, float32 on the batch's device."""
        inputs = raw["inputs"].float()
        if self.target == Target.HEADS:
            contribution = raw["contribution"].float()
            count = max(1, round(self.density * contribution.shape[1]))
            return Batch(inputs, top_units(contribution, count), contribution)
        active = unpack_bits(raw["active"], self.n_out)
        if not need_contribution:
            return Batch(inputs, active)
        assert self._weights is not None, "init_predictor gives the layer's weights"
        mlp_in = raw["mlp_in"].float() if "mlp_in" in raw else inputs
        if self._weights.up_weight.device != mlp_in.device:
            self._weights = self._weights.to(mlp_in.device)
        # The stored label decides what is active, so that label and contribution cannot disagree by a rounding.
        return Batch(inputs, active, self._weights.contribution(mlp_in).mul_(active))

    def _loss_of(self, logits: Tensor, batch: Batch) -> Tensor:
        """In float32 whatever the precision of the products: it sums over millions of units."""
        with torch.autocast(logits.device.type, enabled=False):
            contribution = None if batch.contribution is None else batch.contribution.float()
            return self.loss(logits.float(), Batch(batch.inputs, batch.active, contribution))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Nothing of ours draws while it trains; a callback or a loss of the user's may.
        checkpoint["random"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.state.fn == "fit" and "random" in checkpoint:
            torch.set_rng_state(checkpoint["random"].cpu())

    def training_step(self, raw: dict[str, Tensor], _index: int) -> Tensor:
        loss = self.loss_of_batch(raw)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(raw["inputs"]))
        return loss

    def loss_of_batch(self, raw: dict[str, Tensor]) -> Tensor:
        """The loss of a raw batch, with its gradients."""
        with torch.no_grad():
            batch = self.make_batch(raw, self._train_contribution)
        return self._loss_of(self.predictor(batch.inputs), batch)

    def score_batch(self, raw: dict[str, Tensor]) -> Tensor:
        """Count a raw batch in the metrics. Its loss."""
        batch = self.make_batch(raw, need_contribution=True)
        logits = self.predictor(batch.inputs).float()
        assert batch.contribution is not None
        self.metrics.update(logits, batch.active, batch.contribution)
        return self._loss_of(logits, batch)

    def on_validation_start(self) -> None:
        # Looked at here, not at every step: a GPU would have to be waited for.
        if not all(bool(torch.isfinite(parameter).all()) for parameter in self.predictor.parameters()):
            raise UserError(
                f"the predictor of the target {self.target} is not finite after {self.trainer.global_step} steps;"
                f" lower {self.target}.learning_rate ({self.learning_rate:g}), or train in float32"
            )

    def validation_step(self, raw: dict[str, Tensor], _index: int) -> None:
        self.log("val/loss", self.score_batch(raw), sync_dist=True, batch_size=len(raw["inputs"]))

    def on_validation_epoch_end(self) -> None:
        histograms = self.metrics.compute().cpu()
        self.metrics.reset()
        active_density = float(histograms[1].sum() / histograms[0].sum())
        for name, value in at_density(histograms, self.density).items():
            self.log(f"val/{name}", value, prog_bar=name in ("recall", "retained_mass"))
        self.log("val/active_density", active_density)
        self.log("val/recall_at_active_density", at_density(histograms, active_density)["recall"])

    def configure_optimizers(self) -> Any:
        # One kernel a step on a GPU; not with a gradient scaler, which could not clip what such an optimiser unscales.
        fused = self.device.type == "cuda" and self.trainer.precision != "16-mixed"
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay, fused=fused
        )
        steps = max(1, int(self.trainer.estimated_stepping_batches))
        warm = max(1, round(WARMUP * steps))

        def rate(step: int) -> float:
            if step < warm:
                return (step + 1) / warm
            return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, steps - warm))))

        # Not before: with a number of epochs Lightning makes the loaders to count steps, and a resumed fit is not where
        # it was yet.
        if self.epochs != -1:
            self.trainer.fit_loop.max_epochs = self.epochs
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
