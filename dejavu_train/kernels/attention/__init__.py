"""Attention over selected heads. Imports kernels.common, kernels.dense and kernels.mlp."""
