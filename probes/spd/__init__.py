"""The benchmark SPD-Faith: the faithfulness of a model's description of the differences between two pictures."""
