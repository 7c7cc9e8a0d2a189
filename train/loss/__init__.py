"""Losses of heads and targets. Shapes as in `train.loss.attention`."""
