"""What a step should cost, from theory: pure Python, no JAX."""
