"""From a bundle to the exact sparse model: masked, gathered, its cache. Imports models, predictors, bundle, engine
and kernels. Never training, shards, lightning, wandb, h5py or datasets."""
