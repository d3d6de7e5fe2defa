"""LoRA adapters: read from disk, kept in host memory, placed into slots, applied to batches."""
