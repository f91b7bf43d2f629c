"""Importing this lets Mistral's MLPs of transformers compute FATReLU and dReLU, however they are made."""

from transformers.models.mistral.modeling_mistral import MistralMLP

from dejavu_train.families.gates import compute_gates

compute_gates(MistralMLP)
