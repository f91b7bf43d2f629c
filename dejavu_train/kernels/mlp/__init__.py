"""The list of selected neurons without gaps (`pack`), and down of few rows from its codes (`int4_fc2`).

Before it come `stages.predict` and `stages.select`, behind it `stages.mlp` and `stages.mlp_batch`.
`stages.mlp_owned` needs no list.
"""
