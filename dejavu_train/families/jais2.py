"""Jais 2: squared ReLU, LayerNorm, rotary positions, biases everywhere."""

from dejavu_train.families.dims import Activation, Norm
from dejavu_train.families.standard import StandardFamily


class Jais2Family(StandardFamily):
    classes = {"jais2": "Jais2"}
    least_transformers = "5.0"
    activations = {"relu2": Activation.RELU2, "relu": Activation.RELU}
    defaults = {"hidden_act": "relu2", "attention_bias": True, "mlp_bias": True}
    epsilon = "layer_norm_eps"
    norm = Norm.LAYER_NORM
    turns_part = False
