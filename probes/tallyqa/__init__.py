"""TallyQA: counting questions."""
