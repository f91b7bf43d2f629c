"""Tells what any causal language model would gain from contextual sparsity, without training anything."""
