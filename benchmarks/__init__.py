"""Measurements anyone can run; raw data, versions and seeds lie beside the numbers in results/."""
