"""One learning step, from rewarded actions to optimizer steps."""
