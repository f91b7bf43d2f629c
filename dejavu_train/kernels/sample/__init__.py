"""The ends of a step: embedding, and the choice of the next token. Imports kernels.common and kernels.dense."""
