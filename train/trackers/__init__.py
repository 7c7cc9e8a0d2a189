"""Where the figures of a training run are shown: TensorBoard, Weights & Biases, MLflow."""
