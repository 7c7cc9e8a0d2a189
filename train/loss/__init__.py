"""What is minimised. Shapes as in `train.loss.attention`."""
