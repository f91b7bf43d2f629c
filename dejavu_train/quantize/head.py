"""Quantises the LM head on what it reads: the final LayerNorm of the quantised layers' outputs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dejavu_train.families.opt import EMBEDDING
from dejavu_train.models.int4 import Int4Rows, Int8Rows
from dejavu_train.models.int4_sizes import RowSizes
from dejavu_train.quantize.config import QuantizeConfig
from dejavu_train.quantize.gptq import InputGroups, quantise_columns
from dejavu_train.quantize.layer import Batch, MatrixErrors, Moments
from dejavu_train.quantize.rounding import round_nearest, round_nearest_8
from dejavu_train.quantize.source import StoredTensors

HEAD, NORM = "lm_head.weight", "decoder.final_layer_norm"


@torch.no_grad()
def quantised_head(
    source: StoredTensors,
    values: Mapping[str, Any],
    sizes: RowSizes,
    config: QuantizeConfig,
    batches: list[Batch],
    device: torch.device,
) -> tuple[Int4Rows | Int8Rows, MatrixErrors]:
    """The head's rows, to nearest in 8 bits or without calibration text.

    Args:
        source: of the model's tensors, the head's own or the embeddings that it is tied to.
        values: of the model's config.json.
        batches: the calibration text behind the last layer.
    """
    weight = source[EMBEDDING if values.get("tie_word_embeddings", True) else HEAD].to(device).float()
    moments = Moments()
    if batches:
        norm = _final_norm(source, values, weight.shape[1]).to(device)
        for batch in batches:
            moments.add(norm(batch.hidden), batch.real)
    rows: Int4Rows | Int8Rows
    if sizes.bits == 8:
        rows = Int8Rows.of(*round_nearest_8(weight, sizes.group))
    elif batches and config.gptq:
        grid = InputGroups(sizes.rows, sizes.columns, sizes.group, device)
        codes = quantise_columns(weight.clone(), moments.products(), grid, config)
        rows = Int4Rows.of(codes, grid.scales)
    else:
        rows = Int4Rows.of(*round_nearest(weight, sizes.group))
    products = moments.products() if batches else None
    return rows, MatrixErrors.of(rows.dense() - weight, weight, products)


def _final_norm(source: StoredTensors, values: Mapping[str, Any], d: int) -> nn.Module:
    """As transformers' OPT makes it."""
    if values.get("_remove_final_layer_norm"):
        return nn.Identity()
    norm = nn.LayerNorm(d, elementwise_affine=bool(values.get("layer_norm_elementwise_affine", True)))
    norm.load_state_dict({part: source[f"{NORM}.{part}"].float() for part in norm.state_dict()})
    return norm
