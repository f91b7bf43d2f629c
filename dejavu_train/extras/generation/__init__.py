"""Generation under sparsity: how far sparse texts part from dense ones, and what a guard changes."""
