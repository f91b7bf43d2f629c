"""From a bundle to fast tokens, one graph a step. Imports models, predictors, bundle and kernels. Never training,
shards, lightning, wandb, h5py or datasets."""
