"""What every kernel needs: launches, checks, LayerNorm. Imports torch and triton only."""
