"""Triton kernels of sparse decoding, each with its plain-torch reference. Rooms are links to those of `kernels/`.

Nothing here imports `dejavu_train` outside this package. Import modules by name: importing the package loads nothing.
"""
