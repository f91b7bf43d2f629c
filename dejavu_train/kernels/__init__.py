"""Triton kernels of sparse decoding, each with its plain-torch reference. The folder ``kernels`` on top is a link here.

Nothing here imports `dejavu_train` outside this package. Import modules by name: importing the package loads nothing.
"""
