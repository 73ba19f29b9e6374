"""The differences between two pictures: how an answer claims them, and the metrics of SPD-Faith Bench."""
