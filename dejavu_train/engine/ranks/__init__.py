"""Several GPUs decode one model together. Each holds some units of every layer, and two sums a layer join them."""
