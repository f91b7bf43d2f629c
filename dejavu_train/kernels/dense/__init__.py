"""Dense products of the step. Imports kernels.common."""
