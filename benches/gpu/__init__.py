"""What hetspmd costs on one GPU, and whether it is faster than what people use on unlike GPUs."""
