"""Helpers of every kernel: launches, checks, LayerNorm. Imports torch and triton only."""
