"""Language models as sampling and learning run them, whatever the weights of members are."""
