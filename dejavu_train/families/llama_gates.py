"""Importing this lets Llama's MLPs of transformers compute FATReLU and dReLU, however they are made."""

from transformers.models.llama.modeling_llama import LlamaMLP

from dejavu_train.families.gates import compute_gates

compute_gates(LlamaMLP)
