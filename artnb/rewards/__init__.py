"""Rewards: what is worth rewarding, looked at before and during training."""
