"""Prediction, selection and the sparse MLP. Imports kernels.common and kernels.dense.

In the order of a step: `predict` (the predictor's first product), `select` (its second product, and the list),
`sparse_fc2.pack` (the list without gaps), then `sparse_mlp` (4-bit weights: `int4_mlp`), or
`cascade` (second stage and fc1) and `sparse_fc2`.
Of several rows: `predict_batch`, `select_batch`, `cascade_batch`, `sparse_mlp_batch`.
"""
