"""Prediction, selection and the sparse MLP. Imports kernels.common and kernels.dense."""
