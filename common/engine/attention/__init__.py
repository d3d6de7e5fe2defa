"""The attention seam: one plan a step, one forward a layer."""
