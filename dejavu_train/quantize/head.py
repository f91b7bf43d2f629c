"""Quantises the LM head on what it reads: the quantised layers' outputs behind the final norm."""

import torch

from dejavu_train.models.int4 import Int4Rows, Int8Rows
from dejavu_train.models.int4_sizes import RowSizes
from dejavu_train.models.stored import HEAD
from dejavu_train.quantize.config import QuantizeConfig
from dejavu_train.quantize.gptq import InputGroups, quantise_columns
from dejavu_train.quantize.layer import MatrixErrors, Moments, StreamBatch
from dejavu_train.quantize.rounding import round_nearest, round_nearest_8
from dejavu_train.quantize.stream import Skeleton


@torch.no_grad()
def quantised_head(
    skeleton: Skeleton, sizes: RowSizes, config: QuantizeConfig, batches: list[StreamBatch]
) -> tuple[Int4Rows | Int8Rows, MatrixErrors]:
    """The head's rows, to nearest in 8 bits or without calibration text.

    A head that is stored beside the embeddings counts, whatever the config says, as it does where a model is loaded.

    Args:
        skeleton: of the model, with the head's own weights or the embeddings that it is tied to.
        batches: the calibration text behind the last layer.
    """
    source, device = skeleton.source, skeleton.device
    weight = source[HEAD if HEAD in source else source.embedding].to(device).float()  # as stored, tied or not
    moments = Moments()
    if batches:
        behind = skeleton.family.final_norm(skeleton.model)
        if behind is not None:
            skeleton.fill(behind)
        for batch in batches:
            moments.add(batch.hidden if behind is None else behind(batch.hidden), batch.real)
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
