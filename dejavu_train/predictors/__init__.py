"""The small networks: formula, losses, quantization, metrics, the bit planes of the second stage, files. Imports
models."""
