"""Triton kernels of sparse decoding. Import the modules by name: this file stays empty, because transformers looks
for a package called `kernels` when it is imported and would pay for (and trip over) anything found here."""
