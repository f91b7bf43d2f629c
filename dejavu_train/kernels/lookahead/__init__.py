"""Prediction beside other work of the step. Imports every other folder of kernels."""
