"""Reading the journal: the fields of rows in every form, stored completions, and judged answers."""
