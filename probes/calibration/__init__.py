"""What a model's folder keeps besides weights: thresholds that are measured on its own answers."""
