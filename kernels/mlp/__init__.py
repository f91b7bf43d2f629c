"""Prediction, selection and the sparse MLP. Imports kernels.common and kernels.dense.

In the order of a step: `predict` (the predictor's first product), `select` (its second product, and the list), `pack`
(the list without gaps). Then comes `stages.mlp`.
Of several rows: `predict_batch`, `select_batch`, `stages.mlp_batch`.
"""
