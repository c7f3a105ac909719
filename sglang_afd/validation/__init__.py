"""What a validation says: its report and its thresholds, for who writes one and who reads it."""
