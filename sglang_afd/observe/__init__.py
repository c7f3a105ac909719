"""What a deployment shows of itself: what every rank holds."""
