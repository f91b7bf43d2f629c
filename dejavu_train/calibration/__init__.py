"""From predictors and rows to thresholds. Imports models, predictors, bundle and data; never sparse, engine or
evaluation."""
