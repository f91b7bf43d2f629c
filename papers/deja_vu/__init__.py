"""The experiments of the Deja Vu paper (Liu et al., ICML 2023) on any model and bundle."""
