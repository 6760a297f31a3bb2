"""Environments: prompt datasets and conversations (`text`), Gymnasium and PettingZoo (`control`)."""
