"""Many environments at once: the rollout pipeline and the Gymnasium vector environment."""
