"""The FFN role: the serve loop that runs the experts for the attention ranks."""
