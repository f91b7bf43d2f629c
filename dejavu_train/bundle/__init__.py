"""Bundles, as shipped, and all that follows from them without data: specs, selection, bytes, densities. Imports
models and predictors."""
