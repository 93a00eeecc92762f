"""Trace: model and example batch -> the joint ATen graph of one training step."""
