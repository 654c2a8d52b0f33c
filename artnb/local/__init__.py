"""Engine and trainer in this process."""
