"""Nemotron and the Minitrons of its class: squared ReLU, a LayerNorm whose weight counts from 1, partial rotary.

Heads times their width need not be the width of the model, as in Minitron-8B.
"""

from dejavu_train.families.dims import Activation, Norm
from dejavu_train.families.standard import StandardFamily


class NemotronFamily(StandardFamily):
    classes = {"nemotron": "Nemotron"}
    least_transformers = "4.44"
    activations = {"relu2": Activation.RELU2, "relu": Activation.RELU}
    defaults = {"hidden_act": "relu2", "partial_rotary_factor": 0.5, "num_key_value_heads": None}
    needed = ("num_key_value_heads",)
    epsilon = "norm_eps"
    norm = Norm.LAYER_NORM_1P
