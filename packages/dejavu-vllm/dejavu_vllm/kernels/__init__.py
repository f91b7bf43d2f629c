"""Kernels of the ops. They import torch, triton and kernels of dejavu_train alone."""
