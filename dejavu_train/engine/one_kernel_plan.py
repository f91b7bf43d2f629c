"""All layers of a step in one kernel: where sizes and formats allow that.

What it does not take runs as a chain of kernels, and `DecodeEngine.describe` says why.
"""

from collections.abc import Mapping

from dejavu_train.engine.facts import PredictorFacts
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.planned import Formats
from dejavu_train.families import ModelDims, Target, UnitKey
from dejavu_train.families.dims import SILENT, Activation, Norm, Positions, QkNorm
from dejavu_train.kernels.persistent.sizes import GROUP, Neurons, StepSizes


def one_kernel_sizes(
    dims: ModelDims,
    predictors: Mapping[UnitKey, PredictorFacts | None],
    formats: Formats,
    options: EngineOptions,
    ranks: int,
    skips: bool,
) -> tuple[StepSizes | None, str]:
    """(what the kernel would be compiled for, why it cannot be), of one row in 4 bits. One of the two is empty.

    Args:
        skips: rows of silent neurons are not read where a layer selects nothing.
    """
    chosen = [predictors.get(UnitKey(layer, Target.MLP)) for layer in range(dims.n_layers)]
    facts = [each for each in chosen if each is not None]
    sizes = StepSizes(
        dims.d_model, dims.n_heads, dims.head_dim, dims.d_ffn, dims.n_layers,
        Neurons.SELECTED if facts else Neurons.LIVE if skips else Neurons.ALL, facts[0].rank if facts else 0,
        kv_heads=dims.n_kv_heads, rms=dims.norm in (Norm.RMS_NORM, Norm.RMS_NORM_PLAIN),
        rotary=dims.positions is Positions.ROTARY, biases=dims.biases, gated=dims.gated,
        squared=dims.activation is Activation.RELU2, both=dims.activation is Activation.DRELU,
        threshold=dims.threshold, partly=0 < len(facts) < dims.n_layers,
    )  # fmt: skip
    for why, refused in (
        ("none was asked for", options.one_kernel is False),
        ("it runs on one GPU", ranks > 1),
        (f"it takes groups of {GROUP}, not {formats.group}", formats.group != GROUP),
        (f"it has activations that are zero for many neurons, not {dims.activation}", dims.activation not in SILENT),
        ("its norms stand in front of halves alone", dims.post_norm or dims.qk_norm is not QkNorm.NONE),
        ("its positions are learned or rotary", dims.positions is Positions.ALIBI),
        ("a guard measures layer by layer", options.guarded),
        ("it selects no heads", any(key[1] == Target.HEADS and each is not None for key, each in predictors.items())),
        ("layers without predictors leave silent neurons out", sizes.partly and not skips),
        ("predictors have one rank, a threshold and int4", any(
            each.rank != sizes.rank or each.top_k is not None or each.format != "int4" for each in facts
        )),
        ("predictors read their layer's attn_in", any(
            each is not None and each.site.half != 2 * layer for layer, each in enumerate(chosen)
        )),
        ("predictors of earlier sites run inline or on a stream", bool(facts) and options.look_ahead != "fused"),
        (sizes.refusal, bool(sizes.refusal)),
        ("it was not timed where some layers have no predictor, and one_kernel=True asks for it",
         options.one_kernel is None and sizes.partly),
    ):  # fmt: skip
        if refused:
            return None, why
    return sizes, ""
