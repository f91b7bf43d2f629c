"""Predictors as an engine uses them, from tensors alone."""

from dataclasses import replace

import torch

from dejavu_train.kernels.common.layer_norm import layer_norm_reference
from dejavu_train.kernels.common.limits import ROW_LANES, Products, takes_row_words
from dejavu_train.kernels.stages.norm import layer_norm
from dejavu_train.kernels.stages.predict import predict
from dejavu_train.kernels.stages.predict_rows import predict_rows
from dejavu_train.kernels.stages.predictor import Predictor, PredictorWeights, down_reference
from dejavu_train.kernels.stages.select import select
from dejavu_train.predictors.quantization import quantise_rows


def products_of(weights, batch=1, block=64):
    """How an engine's plan lets these weights be multiplied in kernels of their own."""
    nibbles, rank = weights.up.dtype == torch.uint8, len(weights.down)
    if batch > 1:
        return Products.WORDS if nibbles else Products.TILES
    if not nibbles:
        return Products.REGISTERS
    return Products.ROW_WORDS if takes_row_words(rank, block, ROW_LANES) else Products.ROW_TILES


def quantized(weights):
    """A predictor's weights with codes of int8 for both matrices."""
    (down, down_scale), (up, up_scale) = (quantise_rows(each) for each in (weights.down, weights.up))
    return replace(weights, down=down, up=up, down_scale=down_scale, up_scale=up_scale)


def predictor_of(weights, threshold, selection, batch=1, products=None, **options):
    products = products or products_of(weights, batch, selection.block)
    return Predictor.of(weights, threshold, selection, products, batch, **options)


def predict_down_reference(x, ln, weight, scale=None, relu=False):
    """(B, rank) of the first half alone, with its norm, in plain torch. fp64 when x is fp64."""
    n = layer_norm_reference(x, ln, torch.float64 if x.dtype == torch.float64 else torch.float32)
    return down_reference(n, PredictorWeights(weight, weight, None, scale, None, relu))


def predict_select(x, predictor, ln=None, row_state=None, normalised_out=None, logits_out=None, pdl=False):
    """Both halves. Without `ln` x is normalised already."""
    products = predictor.products
    if products.of_one_row:
        predict(x, ln, predictor, normalised_out, pdl)
    else:
        if ln is not None:
            if normalised_out is None:
                normalised_out = torch.empty_like(x, dtype=torch.float16 if products is Products.WORDS else x.dtype)
            layer_norm(x, ln, normalised_out, pdl)
            x = normalised_out
        predict_rows(x, predictor, pdl)
    select(predictor, row_state, logits_out, pdl)
