"""What one GPU gives beside what it could give; run `python -m benchmarks.gpu`."""
