"""Tensor parallelism inside a node: what each rank has of a model, and how ranks work together."""
