"""sglang_afd"""
