"""Models: loading, naming by a hash of the weights, reading layer by layer, hooks."""
