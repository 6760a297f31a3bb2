"""Environments: prompt datasets, conversations (`text`), Gymnasium, PettingZoo (`control`)."""
