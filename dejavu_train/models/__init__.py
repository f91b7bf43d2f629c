"""OPT models: loading, naming by a hash of the weights, hooks. Imports only errors and files of this package."""
