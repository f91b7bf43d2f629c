"""What is shipped, and all that follows from it without data: specs, selection, bytes, other densities. Imports
models and predictors."""
