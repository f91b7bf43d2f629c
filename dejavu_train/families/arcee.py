"""Arcee: squared ReLU without a gate, RMSNorm, rotary positions, shared K/V heads. AFM-4.5B is one."""

from dejavu_train.families.dims import Activation
from dejavu_train.families.standard import StandardFamily


class ArceeFamily(StandardFamily):
    classes = {"arcee": "Arcee"}
    least_transformers = "4.53"
    activations = {"relu2": Activation.RELU2, "relu": Activation.RELU}
    defaults = {"hidden_act": "relu2"}
    turns_part = False
